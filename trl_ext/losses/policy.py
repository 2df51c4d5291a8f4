"""Policy-gradient losses: from token log-probabilities and advantages to token losses, and their reduction.

Shapes: B responses of up to T tokens. A log-ratio is new minus old: [B, T] for one per token, [B, 1] for one per
response. Advantages are [B], [B, 1] or [B, T]. Every loss is minimised and returned unreduced; at ratio 1 its gradient
is `-advantage` times that of the log-probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_ext.losses.kl import MAX_EXPONENT
from trl_ext.losses.masking import masked_sum
from trl_ext.registry import nearest

AGGREGATIONS = ("sequence_mean", "token_mean", "constant", "sum")


@dataclass
class PolicyScores:
    """The inputs of a policy loss for B responses.

    Attributes:
        log_probs: token log-probabilities under the policy, with gradient, in nats, [B, T].
        old_log_probs: the same when the responses were sampled, without gradient, [B, T]; None only if the algorithm
            has no ratio.
        mask: 1 where a token counts, [B, T].
        advantages: [B, 1] or [B, T]; [B] is treated as [B, 1].
        ratio: the unit of `log_ratio`: each `token`, the whole `sequence`, or `none`.
    """

    log_probs: Tensor
    old_log_probs: Tensor | None
    mask: Tensor
    advantages: Tensor
    ratio: str = "token"

    def __post_init__(self):
        self.advantages = _column(self.advantages)

    @property
    def log_ratio(self) -> Tensor:
        """Log of new over old probability: [B, T] for `token`, [B, 1] for `sequence`.

        Raises:
            ValueError: the algorithm has no ratio.
        """
        if self.ratio == "none" or self.old_log_probs is None:
            raise ValueError(
                "this algorithm has no importance ratio: register it with ratio='token' or ratio='sequence' to read "
                "scores.log_ratio"
            )
        if self.ratio == "sequence":
            return sequence_log_ratio(self.log_probs, self.old_log_probs, self.mask)
        return token_log_ratio(self.log_probs, self.old_log_probs)


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Log of each token's new over old probability. [B, T]."""
    return log_probs - old_log_probs


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Mean of the token log-ratios of each response, the log of GSPO's ratio; 0 for an empty response. [B, 1].

    Zheng et al. 2025, arXiv 2507.18071, equation 7.
    """
    total = masked_sum(log_probs - old_log_probs, mask, dim=-1)
    return (total / (mask != 0).sum(-1).clamp(min=1)).unsqueeze(-1)


def _column(advantages: Tensor) -> Tensor:
    """Advantages of shape [B] as [B, 1]; others unchanged."""
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)` with the exponent clamped at 20 against overflow. Clamped values have no gradient."""
    return log_ratio.clamp(max=MAX_EXPONENT).exp()


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate, `-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)`.

    The gradient is exactly zero where the ratio is beyond the clip in the direction that the advantage favours: above
    `1 + clip_high` if the advantage is positive, below `1 - clip_low` if it is negative. A log-ratio above 20 is
    clamped and has no gradient either; trainers log the share of such tokens as `log_ratio/clamped`.

    Args:
        log_ratio: [B, T] or [B, 1].
        advantages: [B], [B, 1] or [B, T].
        clip_low, clip_high: how far the ratio may fall and rise. Unequal ones: DAPO, arXiv 2503.14476.
        dual_clip: if the advantage is negative, the loss is at most this many times `-advantage`; above 1
            (Ye et al. 2019, arXiv 1912.09729).

    Schulman et al. 2017, arXiv 1707.06347, equation 7.
    """
    advantages = _column(advantages)
    ratio = bounded_ratio(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def unclipped_surrogate(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`-ratio A`: the importance-weighted policy gradient, without a constraint towards the old policy.

    A log-ratio above 20 is clamped and has no gradient, as in `clipped_surrogate`.
    """
    return -bounded_ratio(log_ratio) * _column(advantages)


def cispo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, ratio_cap: float = 5.0) -> Tensor:
    """CISPO: `-min(ratio, ratio_cap) A log_prob`, with no gradient through the capped ratio; no token is dropped.

    Args:
        log_ratio: [B, T] or [B, 1].
        log_probs: [B, T].
        advantages: [B], [B, 1] or [B, T].
        ratio_cap: the cap itself, not its distance from 1.

    MiniMax 2025, arXiv 2506.13585, equation 4; cap of about 5: arXiv 2510.13786.
    """
    weights = bounded_ratio(log_ratio.detach()).clamp(max=ratio_cap)
    return -weights * _column(advantages) * log_probs


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """`-A log_prob`: the policy gradient for responses of the current policy. [B, T]. Williams 1992."""
    return -_column(advantages) * log_probs


def quadratic_ratio(log_ratio: Tensor, advantages: Tensor, *, strength: float) -> Tensor:
    """`-ratio A + strength / 2 (ratio - 1)^2`: a quadratic penalty on the distance to ratio 1 instead of a clip.

    The loss of Group Orthogonalized Policy Optimization, arXiv 2602.21269, as its abstract suggests it; the paper's
    strength was not available. A log-ratio above 20 is clamped and has no gradient, as in `clipped_surrogate`.
    """
    ratio = bounded_ratio(log_ratio)
    return -ratio * _column(advantages) + strength / 2 * (ratio - 1).square()


# Values of the setting `surrogate`. Positional parameters are attributes of `PolicyScores`.
SURROGATES: dict[str, Callable[..., Tensor]] = {
    "clip": clipped_surrogate,
    "no_clip": unclipped_surrogate,
    "cispo": cispo,
    "reinforce": reinforce,
    "quadratic_ratio": quadratic_ratio,
}


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
