"""One property of every refusal: an error of one line that says what is wrong and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest


def assert_refused(call: Callable[[], object], *words: str, error: type[Exception] = ValueError) -> None:
    """The call fails with one line that holds all of the words."""
    with pytest.raises(error) as caught:
        call()
    assert_one_line(str(caught.value), words)


def assert_one_line(text: str, words: Iterable[str]) -> None:
    assert "\n" not in text.strip(), text
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
