"""Entropy of a model's predictions for the tokens of its responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

from trl_ext.models import token_entropy
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
    order = sorted(range(len(generations)), key=lambda i: -_length(generations[i]))
    results: list[float | None] = [None] * len(order)
    was_training = model.training
    model.eval()
    try:
        starts = range(0, len(order), batch_size)
        for start in tqdm(starts, desc=progress, leave=False) if progress else starts:
            rows = [row for row in order[start : start + batch_size] if generations[row].response_ids]
            if rows:
                entropies = _batch(model, [generations[row] for row in rows], pad_token_id)
                for row, entropy in zip(rows, entropies, strict=True):
                    results[row] = entropy
    finally:
        model.train(was_training)
    return results


def _length(generation: Generation) -> int:
    return len(generation.prompt_ids) + len(generation.response_ids)


def _batch(model, rows: Sequence[Generation], pad_token_id: int) -> list[float]:
    """Pad rows on the left, so that logits are computed only for response tokens."""
    width, kept = max(map(_length, rows)), max(len(row.response_ids) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for place, row in enumerate(rows):
        input_ids[place, width - _length(row) :] = torch.tensor([*row.prompt_ids, *row.response_ids])
        attention_mask[place, width - _length(row) :] = 1
    input_ids, attention_mask = input_ids.to(model.device), attention_mask.to(model.device)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=kept + 1,
    ).logits[:, -kept - 1 : -1]
    # Row by row: float32 logits of the whole batch would be the largest tensor.
    return [
        token_entropy(logits[place, kept - len(row.response_ids) :]).mean().item() for place, row in enumerate(rows)
    ]
