"""Scores that a reward model assigns to token sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trl_ext.models.batches import in_batches, pad_rows
from trl_ext.models.packing import packing_of


@torch.no_grad()
def score_sequences(
    model,
    sequences: Sequence[Sequence[int]],
    *,
    batch_size: int = 16,
    pad_token_id: int = 0,
    progress: str | None = None,
) -> Tensor:
    """One score per sequence, in right-padded batches of similar length, or of sequences with a common beginning if
    the model's passes are packed.

    Args:
        model: called with `input_ids` and `attention_mask`, returns an output whose `logits` have the shape [B, 1]: a
            transformers model for sequence classification with one label. Temporarily put into evaluation mode.
        sequences: N lists of token ids, none empty.
        batch_size: rows per forward pass.
        pad_token_id: the model's padding token, which it uses to find the last token of a row.
        progress: label of the progress bar; None for no bar.

    Returns:
        Float32 scores on the CPU, in the order of the sequences, [N].

    Raises:
        ValueError: an empty sequence.
    """
    for index, sequence in enumerate(sequences):
        if not len(sequence):
            raise ValueError(f"sequence {index} is empty: there is no token to read a score at")
    device = next(model.parameters()).device
    packing = packing_of(model)
    packed = packing is not None and packing.active

    def scored(rows: list[int]) -> Tensor:
        input_ids, attention_mask = pad_rows([sequences[row] for row in rows], pad_token_id, "right")
        logits = model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device)).logits
        return logits.squeeze(-1).float().cpu()

    order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]) if packed else -len(sequences[i]))
    return torch.tensor(in_batches(model, scored, order, batch_size=batch_size, progress=progress))
