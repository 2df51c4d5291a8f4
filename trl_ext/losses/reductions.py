"""Reductions over the tokens that a mask selects, and estimates of the KL divergence at each token.

A mask is 1 (or True) where a token counts. Values at other positions are ignored, even if they are NaN or infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_ext.names import nearest

AGGREGATIONS = ("sequence_mean", "token_mean", "constant", "sum")
KL_ESTIMATORS = ("k1", "k2", "k3")

# exp(20) is 5e8: a larger value is a numerical fault, not a probability ratio.
MAX_EXPONENT = 20.0


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
    row_count: float | None = None,
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
        row_count: the divisor of the other kinds instead of B, in the same way.

    Raises:
        ValueError: an unknown kind, or `constant` without a positive constant.
    """
    rows = len(mask) if row_count is None else row_count
    if kind == "sequence_mean":
        lengths = (mask != 0).sum(-1).clamp(min=1)
        return (masked_sum(losses, mask, dim=-1) / lengths).sum() / rows
    if kind == "token_mean":
        count = (mask != 0).sum().clamp(min=1) if token_count is None else token_count
        return masked_sum(losses, mask) / count
    if kind == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"the aggregation 'constant' divides by constant, which must be positive, got {constant}")
        return masked_sum(losses, mask, dim=-1).sum() / rows / constant
    if kind == "sum":
        return masked_sum(losses, mask, dim=-1).sum() / rows
    raise ValueError(
        f"unknown aggregation {kind!r}{nearest(str(kind), list(AGGREGATIONS))} Known: {', '.join(AGGREGATIONS)}"
    )


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate of the reverse KL divergence `KL(policy || reference)` at each sampled token.

    With `d = log_probs - ref_log_probs` at a token sampled from the policy:

    - `k1 = d`: unbiased, either sign;
    - `k2 = d^2 / 2`: biased, never negative, low variance;
    - `k3 = exp(-d) - 1 + d`: unbiased, never negative.

    They estimate the same quantity but have different gradients. On-policy, the expected gradient is that of

    | kind | as a loss                | in the reward (detached, times the score function) |
    |------|--------------------------|----------------------------------------------------|
    | k1   | nothing: it is zero      | the reverse KL                                     |
    | k2   | the reverse KL           | neither                                            |
    | k3   | the forward KL           | neither                                            |

    With the importance ratio and its gradient as a factor, k1 or k3 as a loss has the gradient of the reverse KL, also
    off-policy. Per token, a loss ignores how a token changes the divergence at later ones; k1 summed over the response
    and put in the reward does not.

    Args:
        log_probs: log-probabilities of the sampled tokens under the policy, in nats, any shape.
        ref_log_probs: the same under the reference.
        kind: `k1`, `k2` or `k3`. The exponent of k3 is clamped at 20: a token with d below -20 has no gradient, and
            trainers count it in `log_ratio/clamped`.

    Raises:
        ValueError: an unknown kind.

    Schulman 2020, "Approximating KL divergence"; gradients: arXiv 2510.01555, 2506.09477; with the importance ratio:
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        # Clamped in both terms: clamping only the exponential would leave a gradient of the wrong sign beyond.
        inverse = (-difference).clamp(max=MAX_EXPONENT)
        return torch.expm1(inverse) - inverse
    raise ValueError(
        f"unknown KL estimator {kind!r}{nearest(str(kind), list(KL_ESTIMATORS))} Known: {', '.join(KL_ESTIMATORS)}"
    )
