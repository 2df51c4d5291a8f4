"""Prompts and responses as padded token batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trl_ext.data.conversation import text_ids


def tokenize_prompt_and_output(prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer) -> dict[str, Tensor]:
    """Tokenize prompts and outputs separately, concatenate them, and shift them for next-token prediction.

    The special tokens that the tokenizer adds before a text occur once, before the prompt. No end-of-text token is
    added after the output. Rows are padded on the right with the padding token, or with the end-of-text token if the
    tokenizer has none.

    Args:
        prompt_strs: B prompts, each of at least one token.
        output_strs: B outputs; the mask of an empty one is all zeros.
        tokenizer: a tokenizer of transformers.

    Returns:
        With L the tokens of the longest prompt and output together, each of shape [B, L - 1]:

        - `input_ids`: the tokens but the last, int64;
        - `labels`: the tokens but the first, int64;
        - `response_mask`: True where the label is a token of the output.

    Raises:
        ValueError: no rows, lists of different length, a prompt without tokens, or a tokenizer without a padding and
            an end-of-text token.
    """
    if len(prompt_strs) != len(output_strs) or not len(prompt_strs):
        raise ValueError(
            f"expected as many outputs as prompts and at least one, got {len(prompt_strs)} prompts and "
            f"{len(output_strs)} outputs"
        )
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if padding is None:
        raise ValueError("the tokenizer has neither a padding nor an end-of-text token: set tokenizer.pad_token")
    prompts = [text_ids(tokenizer, prompt) for prompt in prompt_strs]
    outputs = [tokenizer(output, add_special_tokens=False)["input_ids"] for output in output_strs]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} has no tokens: there is nothing to predict its first output token from")
    longest = max(len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True))
    tokens = torch.full((len(prompts), longest), padding)
    is_output = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        end = len(prompt) + len(output)
        tokens[row, :end] = torch.tensor([*prompt, *output])
        is_output[row, len(prompt) : end] = True
    # Copies, so that changing one in place does not change the other.
    return {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone(), "response_mask": is_output[:, 1:]}


def completion_mask(completion_ids: Tensor, eos_token_id: int | Sequence[int]) -> Tensor:
    """True up to and including each completion's first end-of-text token, or everywhere without one. [B, T].

    Args:
        completion_ids: generated tokens and the padding after them, [B, T].
        eos_token_id: the token that ends a completion, or several.
    """
    ends = torch.isin(completion_ids, torch.as_tensor(eos_token_id, device=completion_ids.device)).long()
    return ends.cumsum(dim=1) - ends == 0
