"""Stop strings: a response ends with the first one, which remains part of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteria

# Tokens whose text is empty or part of a character, beside those of a stop string.
_FURTHER_TOKENS = 8


class StopInResponse(StoppingCriteria):
    """Ends the rows of `generate` whose response, after `width` columns of the prompt, contains a stop string.

    transformers' own criterion also sees the prompt. A string that begins there would end a response that does not
    contain it, and from which `cut_at_stop` could not remove the padding.
    """

    def __init__(self, tokenizer, stop: Sequence[str], width: int):
        self.tokenizer, self.stop, self.width = tokenizer, stop, width
        self._tail = max(len(one.encode()) for one in stop) + _FURTHER_TOKENS

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        responses = input_ids[:, self.width :].tolist()
        # Few rows end in a step, so that most are decided by their last tokens.
        ended = [self._has_stop(row[-self._tail :]) and self._has_stop(row) for row in responses]
        return torch.tensor(ended, device=input_ids.device)

    def _has_stop(self, tokens: list[int]) -> bool:
        return end_of_stop(self.tokenizer.decode(tokens, skip_special_tokens=True), self.stop) is not None


def end_of_stop(text: str, stop: Sequence[str]) -> int | None:
    """The end position of the first stop string to be completed in a text; None if there is none."""
    ends = [start + len(one) for one in stop if (start := text.find(one)) >= 0]
    return min(ends, default=None)


def cut_at_stop(tokenizer, tokens: list[int], stop: Sequence[str]) -> tuple[list[int], str] | None:
    """The tokens up to the one that completes a stop string, and their text up to the string's end.

    The text is shorter than the tokens if the last token extends beyond the string. Padding may follow the tokens of
    the response. None if it contains no stop string.
    """

    def end(count: int) -> int | None:
        return end_of_stop(tokenizer.decode(tokens[:count], skip_special_tokens=True), stop)

    if not stop or end(len(tokens)) is None:
        return None
    # If a prefix contains a stop string, so does every longer prefix.
    count = bisect_left(range(len(tokens)), True, key=lambda count: end(count) is not None)
    return tokens[:count], tokenizer.decode(tokens[:count], skip_special_tokens=True)[: end(count)]


def check_stop(stop: Sequence[str], tokenizer=None) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        ValueError: a single string instead of a list; an empty string, which would end every response at once; or a
            special token of the tokenizer, which the text of a response does not contain.
    """
    if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
        raise ValueError(f"stop must be a list of texts, none of them empty, got {stop!r}")
    if special := set(stop) & set(getattr(tokenizer, "all_special_tokens", ())):
        raise ValueError(
            f"stop has the special token {min(special)!r}, which is not part of a response's text: add it to "
            "eos_token_id of the model's generation_config.json instead"
        )
    return tuple(stop)
