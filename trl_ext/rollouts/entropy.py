"""Entropy of a model's predictions for the tokens of its responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trl_ext.models import token_entropy
from trl_ext.models.batches import in_batches, pad_rows, response_logits
from trl_ext.rollouts.generation import Generation


@torch.no_grad()
def response_entropies(
    model,
    generations: Sequence[Generation],
    *,
    batch_size: int = 8,
    pad_token_id: int = 0,
    progress: str | None = None,
) -> list[float | None]:
    """Mean entropy over the tokens of each response, in nats, under the model at temperature 1.

    Args:
        model: a causal language model; temporarily put into evaluation mode.
        generations: prompts and responses as token ids.
        batch_size: rows per forward pass.
        pad_token_id: any id of the vocabulary; padding is masked out.
        progress: label of the progress bar; None for no bar.

    Returns:
        One number per response; None for a response without tokens.
    """

    def of_batch(numbers: list[int]) -> list[float | None]:
        rows = [row for row in numbers if generations[row].response_ids]
        found = iter(_entropies(model, [generations[row] for row in rows], pad_token_id) if rows else ())
        return [next(found) if generations[row].response_ids else None for row in numbers]

    order = sorted(range(len(generations)), key=lambda i: -len(_tokens(generations[i])))
    return in_batches(model, of_batch, order, batch_size=batch_size, progress=progress)


def _tokens(generation: Generation) -> list[int]:
    return [*generation.prompt_ids, *generation.response_ids]


def _entropies(model, rows: Sequence[Generation], pad_token_id: int) -> list[float]:
    input_ids, attention_mask = pad_rows([_tokens(row) for row in rows], pad_token_id, "left")
    kept = max(len(row.response_ids) for row in rows)
    logits = response_logits(model, input_ids.to(model.device), attention_mask.to(model.device), kept)
    # Row by row: float32 logits of the whole batch would be the largest tensor.
    return [
        token_entropy(logits[place, kept - len(row.response_ids) :]).mean().item() for place, row in enumerate(rows)
    ]
