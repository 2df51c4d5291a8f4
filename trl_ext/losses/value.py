"""PPO's value loss, and the statistics that whiten advantages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.losses.reductions import masked_sum

# Added to the standard deviation before dividing by it.
WHITENING_EPS = 1e-8


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """Half the squared error of a value or of its clipped version, whichever is larger.

    `1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)`: a value that has moved further than `clip`
    towards its return has a gradient of exactly zero; one that has moved away from it is pulled back.

    Args:
        values: estimates before each token, with gradient, [B, T].
        old_values: the estimates when the responses were sampled, [B, T].
        returns: the targets of the values, [B, T].
        clip: how far a value may move from the old one; None for half the squared error alone.

    Returns:
        Losses, unreduced, [B, T].

    Raises:
        ValueError: shapes that differ, or a `clip` that is not positive.

    Schulman et al. 2017, arXiv 1707.06347, and its implementation; the details: arXiv 2005.12729.
    """
    if not values.shape == old_values.shape == returns.shape:
        raise ValueError(
            f"clipped_value_loss needs values, old_values and returns of one shape, got {list(values.shape)}, "
            f"{list(old_values.shape)} and {list(returns.shape)}"
        )
    old_values, returns = old_values.detach(), returns.detach()
    errors = (values - returns).square()
    if clip is None:
        return errors / 2
    if not clip > 0:
        raise ValueError(f"values are clipped to old_values plus and minus clip, which must be positive, got {clip}")
    # A selection instead of a maximum, which would halve the gradient at ties.
    clipped = is_value_clipped(values, old_values, returns, clip=clip)
    return torch.where(clipped, (_near(values, old_values, clip) - returns).square(), errors) / 2


def is_value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Where `clipped_value_loss` uses the clipped value, so that there is no gradient. Boolean, [B, T]."""
    return (_near(values, old_values, clip) - returns).square() > (values - returns).square()


def _near(values: Tensor, old_values: Tensor, clip: float) -> Tensor:
    return values.detach().clamp(old_values - clip, old_values + clip)


def moments(
    values: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Number, mean and sum of squared deviations of the values where the mask is 1; float64 scalars.

    `reduce` sums a tensor over all processes; None for a single process.
    """
    reduce = reduce or (lambda tensor: tensor)
    wide = values.detach().double()
    count, total = reduce(torch.stack([(mask != 0).sum().double(), masked_sum(wide, mask)]))
    mean = total / count.clamp(min=1)
    return count, mean, reduce(masked_sum((wide - mean).square(), mask))


def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """`(values - mean) / (std + 1e-8)` over the tokens that count, with the sample's standard deviation.

    Args:
        values, mask: [B, T]; the mask is 1 where a token counts.
        shift_mean: False to add the mean back to the values, as for rewards.
        reduce: sums a tensor over all processes, for the statistics of the global batch; None for a single process.

    Returns:
        Whitened values of the same dtype, without gradient, 0 where the mask is 0, [B, T].
    """
    count, mean, squares = moments(values, mask, reduce)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    wide = values.detach().double()
    whitened = (wide - mean) / (std + WHITENING_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(mask == 0, 0).to(values.dtype)


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, *, reduce: Callable[[Tensor], Tensor] | None = None
) -> float:
    """`1 - Var(returns - values) / Var(returns)` over the tokens that count: 1 at best, 0 for a constant.

    NaN if the returns do not vary. The arguments are those of `whiten`.
    """
    *_, unexplained = moments(returns - values, mask, reduce)
    *_, squares = moments(returns, mask, reduce)
    return (1 - unexplained / squares).item() if squares > 0 else float("nan")
