"""Stop strings: a response ends with the first one, which remains part of it."""

from __future__ import annotations

from collections.abc import Sequence


def end_of_stop(text: str, stop: Sequence[str]) -> int | None:
    """The end position of the first stop string to be completed in a text; None if there is none."""
    ends = [start + len(one) for one in stop if (start := text.find(one)) >= 0]
    return min(ends, default=None)


def cut_at_stop(tokenizer, tokens: list[int], stop: Sequence[str]) -> tuple[list[int], str] | None:
    """The tokens up to the one that completes a stop string, and their text up to the string's end.

    The text is shorter than the tokens if the last token extends beyond the string.

    Args:
        tokenizer: the tokenizer of the tokens.
        tokens: tokens of a response, possibly followed by padding.
        stop: stop strings, none empty.

    Returns:
        Tokens and text; None if the response contains no stop string.
    """

    def decoded(count: int) -> str:
        return tokenizer.decode(tokens[:count], skip_special_tokens=True)

    if not stop or end_of_stop(decoded(len(tokens)), stop) is None:
        return None
    # If a prefix contains a stop string, so does every longer prefix: search by bisection.
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
        ValueError: a single string instead of a list, or an empty string, which would end every response at once.
    """
    if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
        raise ValueError(f"stop must be a list of texts, none of them empty, got {stop!r}")
    return tuple(stop)
