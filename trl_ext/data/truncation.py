"""Token ids of a prompt, and separate token limits for the prompt and for the responses of a preference pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def truncate_pair(
    prompt_ids: Sequence[int],
    chosen_ids: Sequence[int],
    rejected_ids: Sequence[int],
    *,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """Keep the end of the prompt and the start of each response.

    The end of a prompt holds the question that the response answers. A response that is cut loses its
    end-of-sequence token, so it does not teach the model to stop there. Both responses share one limit.

    Args:
        prompt_ids, chosen_ids, rejected_ids: token ids, each of any length.
        max_prompt_tokens: the most prompt tokens to keep; None keeps all.
        max_response_tokens: the most tokens to keep of each response; None keeps all.

    Returns:
        The three lists of token ids, copied.

    Raises:
        ValueError: a limit is below 1.
    """
    _check_limit("max_prompt_tokens", max_prompt_tokens)
    _check_limit("max_response_tokens", max_response_tokens)
    prompt = list(prompt_ids)
    if max_prompt_tokens is not None:
        prompt = prompt[-max_prompt_tokens:]
    return prompt, list(chosen_ids[:max_response_tokens]), list(rejected_ids[:max_response_tokens])


def _check_limit(name: str, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"{name} must be at least 1, got {limit}; pass None for no limit")


def text_ids(tokenizer, text: str, **options: Any) -> list[int]:
    """Token ids of a text that another follows, without the end token that some tokenizers append to every text.

    The tokens that the tokenizer puts before a text stay, and so does an end token that the text itself contains.
    """
    ids = tokenizer(text, **options)["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        return ids
    own = tokenizer(text, add_special_tokens=False, **options)["input_ids"]
    # Of an empty text, a single token is the beginning if it can be one.
    appended = ids[-len(own) :] != own if own else len(ids) > 1 or tokenizer.bos_token_id != ids[-1]
    return ids[:-1] if appended else ids
