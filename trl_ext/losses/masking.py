"""Sums, means and reductions over the positions that a mask selects. A mask is 1 (or True) where a token counts.

Values at other positions are ignored, even if they are NaN or infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_ext.names import nearest

AGGREGATIONS = ("sequence_mean", "token_mean", "constant", "sum")


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is 1.

    Args:
        values: any shape.
        mask: a shape that broadcasts with that of `values`.
        dim: the dimension to sum over; None for all of them.
    """
    values, counts = torch.broadcast_tensors(values, mask != 0)
    kept = values.masked_fill(~counts, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is 1; NaN if the mask selects nothing. The arguments are those of `masked_sum`.

    `aggregate` is the reduction that counts an empty row as 0.
    """
    values, counts = torch.broadcast_tensors(values, mask != 0)
    count = counts.sum() if dim is None else counts.sum(dim)
    return masked_sum(values, counts, dim) / count


def masked_normalize(values: Tensor, mask: Tensor, constant: float, dim: int | None = None) -> Tensor:
    """`masked_sum`, divided by `constant` whatever the number of tokens.

    Raises:
        ValueError: `constant` is not positive.
    """
    if constant <= 0:
        raise ValueError(f"masked_normalize divides by constant, which must be positive, got {constant}")
    return masked_sum(values, mask, dim) / constant


def aggregate(
    losses: Tensor,
    mask: Tensor,
    kind: str,
    *,
    constant: float | None = None,
    token_count: Tensor | float | None = None,
) -> Tensor:
    """Reduce token losses to the scalar that is minimised.

    - `sequence_mean`: the mean over each response's tokens, then over the B responses (GRPO). A token weighs less in
      a longer response, so long wrong responses are pushed down less.
    - `token_mean`: the sum over all tokens, divided by their number (DAPO).
    - `constant`: the sum over all tokens, divided by `B constant` (Dr.GRPO).
    - `sum`: the mean over responses of the sum over their tokens, the form of the policy-gradient theorem.

    A response without tokens counts as 0 and as one of the B.

    Args:
        losses: [B, T], or [B, 1] for the same loss at each of a response's tokens.
        mask: 1 where a token counts, [B, T].
        kind: one of the four.
        constant: the divisor of `constant`: the generation budget in tokens.
        token_count: the divisor of `token_mean` instead of `mask.sum()`, if these rows are one part of an optimizer
            batch: the token count of the whole batch if the parts are summed, or that count divided by the number of
            parts if they are averaged.

    Raises:
        ValueError: an unknown kind, or `constant` without a positive constant.
    """
    if kind == "sequence_mean":
        lengths = (mask != 0).sum(-1).clamp(min=1)
        return (masked_sum(losses, mask, dim=-1) / lengths).mean()
    if kind == "token_mean":
        count = (mask != 0).sum().clamp(min=1) if token_count is None else token_count
        return masked_sum(losses, mask) / count
    if kind == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"the aggregation 'constant' divides by constant, which must be positive, got {constant}")
        return masked_sum(losses, mask, dim=-1).mean() / constant
    if kind == "sum":
        return masked_sum(losses, mask, dim=-1).mean()
    raise ValueError(
        f"unknown aggregation {kind!r}{nearest(str(kind), list(AGGREGATIONS))} Known: {', '.join(AGGREGATIONS)}"
    )
