"""Importance weights for responses whose sampler gave other probabilities than the trainer does for the same weights.

An inference engine computes with other kernels or in another precision than the trainer. All functions read token
log-probabilities at the time of sampling, [B, T]: the trainer's own (`old_log_probs`) and those that the sampler
recorded (`sampler_log_probs`). The ratio of a token is `exp(old - sampler)`. Weights have no gradient; they multiply
the token losses of the surrogate, but not its KL term.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trl_ext.losses.kl import MAX_EXPONENT
from trl_ext.losses.masking import masked_sum


def truncated(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratio, kept within bounds. With `low` 0: truncated importance sampling (TIS), Yao et al. 2025."""
    return ratio.clamp(low, high)


def masked_outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratio, and 0 where it is out of bounds: IcePop, arXiv 2510.18855, and masked importance sampling (MIS)."""
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


# Name -> whose ratio (each token's, or the product or geometric mean of a response's), function, default bounds.
CORRECTIONS: dict[str, tuple[str, Callable[[Tensor, float, float], Tensor], float | None, float | None]] = {
    "token_truncate": ("token", truncated, 0.0, 2.0),
    "token_mask": ("token", masked_outside, 0.5, 5.0),
    "sequence_truncate": ("product", truncated, 0.0, 2.0),
    "sequence_mask": ("product", masked_outside, 0.0, 3.0),
    # Useful bounds are very close to 1, and depend on the sampler's precision.
    "geometric_mask": ("mean", masked_outside, None, None),
}


def bounds_of(kind: str, low: float | None = None, high: float | None = None) -> tuple[float, float]:
    """The bounds on the ratio, by default those of the kind.

    Raises:
        ValueError: the kind has no default bounds and one is missing, or they are not in order.
    """
    _, _, lowest, highest = CORRECTIONS[kind]
    low, high = lowest if low is None else low, highest if high is None else high
    if low is None or high is None:
        raise ValueError(f"{kind} has no default bounds on the ratio: give both, such as 0.999 and 1.001")
    if not 0 <= low < high:
        raise ValueError(f"{kind} keeps ratios from {low} to {high}: give 0 <= lower bound < upper bound")
    return low, high


def mismatch_weights(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    mask: Tensor,
    kind: str,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Importance weights of a named correction: [B, T] for a token's ratio, [B, 1] for a response's.

    Tokens without a recorded log-probability (NaN) have ratio 1. Log-ratios are clamped at plus and minus 20.

    Args:
        old_log_probs: token log-probabilities at the time of sampling, by the trainer, in nats, [B, T].
        sampler_log_probs: the same by the sampler, [B, T].
        mask: 1 where a token counts, [B, T].
        kind: a name in `CORRECTIONS`.
        low, high: bounds on the ratio, as for `bounds_of`.
    """
    unit, function, _, _ = CORRECTIONS[kind]
    low, high = bounds_of(kind, low, high)
    difference = _difference(old_log_probs, sampler_log_probs, mask)
    if unit != "token":
        difference = difference.sum(dim=1, keepdim=True)
    if unit == "mean":
        difference = difference / (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    return function(difference.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp(), low, high)


def disagreement(old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the sampler and the trainer disagree on the tokens that count, as sums that add up over micro-batches.

    Returns:
        `tokens`, `absolute` (sum of the absolute log-ratios), `weights` and `squared_weights` (sums of the ratios and
        of their squares), and `largest` (the largest absolute log-ratio, 0 without tokens).
    """
    difference = _difference(old_log_probs, sampler_log_probs, mask)
    ratio = difference.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    return {
        "tokens": (mask != 0).sum().to(difference.dtype),
        "absolute": difference.abs().sum(),
        "weights": masked_sum(ratio, mask),
        "squared_weights": masked_sum(ratio.square(), mask),
        "largest": difference.abs().max() if difference.numel() else difference.new_zeros(()),
    }


def _difference(old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor) -> Tensor:
    """The log-ratios of the tokens that count and have been recorded, and 0 elsewhere. [B, T]."""
    difference = old_log_probs.detach() - sampler_log_probs.detach()
    return difference.masked_fill((mask == 0) | sampler_log_probs.isnan(), 0.0)
