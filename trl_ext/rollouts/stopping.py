"""Stop strings: a response ends with the first of them, which stays a part of it."""

from __future__ import annotations

from collections.abc import Sequence


def end_of_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string that is complete first ends in a text; None where there is none."""
    ends = [start + len(one) for one in stop if (start := text.find(one)) >= 0]
    return min(ends, default=None)


def cut_at_stop(tokenizer, tokens: list[int], stop: Sequence[str]) -> tuple[list[int], str] | None:
    """The tokens up to the one that completes a stop string, and their text up to the string's end.

    The two differ where that token holds more characters than the string's last ones.

    Args:
        tokenizer: that of the tokens.
        tokens: of a response, and what may have been padded behind it.
        stop: stop strings, none empty.

    Returns:
        Tokens and text; None where the response holds no stop string.
    """

    def decoded(count: int) -> str:
        return tokenizer.decode(tokens[:count], skip_special_tokens=True)

    if not stop or end_of_stop(decoded(len(tokens)), stop) is None:
        return None
    # A prefix that holds a stop string stays one that does when it grows.
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if end_of_stop(decoded(middle), stop) is None:
            low = middle + 1
        else:
            high = middle
    text = decoded(low)
    return tokens[:low], text[: end_of_stop(text, stop)]


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        ValueError: one text instead of a list of them, or an empty one, which would end every response at once.
    """
    if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
        raise ValueError(f"stop must be a list of texts, none of them empty, got {stop!r}")
    return tuple(stop)
