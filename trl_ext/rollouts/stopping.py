"""Stop strings: a response ends with the first one, which remains part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteria

# Tokens whose text is empty or part of a character, beside those of a stop string.
_FURTHER_TOKENS = 8


class StopInResponse(StoppingCriteria):
    """Ends the rows of `generate` whose response contains a stop string.

    transformers' own criterion also sees the prompt. A string that begins there would end a response that does not
    contain it, and from which `cut_at_stop` could not remove the padding.

    Args:
        tokenizer: the tokenizer of the tokens.
        stop: stop strings, as `check_stop` returns them.
        width: columns of the prompts.
    """

    def __init__(self, tokenizer, stop: Sequence[str], width: int):
        self.tokenizer, self.stop, self.width = tokenizer, stop, width
        self._tail = max(len(one.encode()) for one in stop) + _FURTHER_TOKENS

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        ended = [self.has_ended(row[self.width :]) for row in input_ids.tolist()]
        return torch.tensor(ended, device=input_ids.device)

    def has_ended(self, tokens: list[int]) -> bool:
        """Whether the tokens of a response contain a stop string, given that those before the last did not."""
        # Few rows end in a step, so that most are decided by their last tokens.
        return all(
            end_of_stop(self.tokenizer.decode(part, skip_special_tokens=True), self.stop) is not None
            for part in (tokens[-self._tail :], tokens)
        )


def end_of_stop(text: str, stop: Sequence[str]) -> int | None:
    """The end position of the first stop string to be completed in a text; None if there is none."""
    ends = [start + len(one) for one in stop if (start := text.find(one)) >= 0]
    return min(ends, default=None)


def cut_at_stop(tokenizer, tokens: list[int], stop: Sequence[str]) -> tuple[list[int], str] | None:
    """The tokens up to the one that completes a stop string, and their text up to the string's end.

    The text is shorter than the tokens if the last token extends beyond the string.

    Padding may follow the tokens of the response. None if it contains no stop string.
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
