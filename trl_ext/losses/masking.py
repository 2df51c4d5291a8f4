"""Sums and means over the positions that a mask selects. A mask is 1 (or True) where a token counts.

Values at other positions are ignored, even if they are NaN or infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Mean of `values` where `mask` is 1; NaN if the mask selects nothing.

    `aggregate` is the reduction that counts an empty row as 0.

    Args:
        values: any shape.
        mask: a shape that broadcasts with that of `values`.
        dim: the dimension to reduce; None for all of them.
    """
    values, counts = torch.broadcast_tensors(values, mask != 0)
    count = counts.sum() if dim is None else counts.sum(dim)
    return masked_sum(values, counts, dim) / count


def masked_normalize(values: Tensor, mask: Tensor, constant: float, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is 1, divided by `constant` whatever the number of tokens.

    Args:
        values: any shape.
        mask: a shape that broadcasts with that of `values`.
        constant: the divisor of the sum.
        dim: the dimension to reduce; None for all of them.

    Raises:
        ValueError: `constant` is not positive.
    """
    if constant <= 0:
        raise ValueError(f"masked_normalize divides by constant, which must be positive, got {constant}")
    return masked_sum(values, mask, dim) / constant
