"""Policy-gradient losses: from token log-probabilities and advantages to token losses.

Shapes: B responses of up to T tokens. A log-ratio is new minus old: [B, T] for one per token, [B, 1] for one per
response. Advantages are [B], [B, 1] or [B, T]; log-probabilities and masks are [B, T]. Every loss is minimised and
returned unreduced; at ratio 1 its gradient is `-advantage` times that of the log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trl_ext.losses.reductions import MAX_EXPONENT, masked_mean, masked_sum


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
        sampler_log_probs: `old_log_probs` as the sampler itself recorded them, [B, T]: NaN where it did not, or None.
        ref_log_probs: token log-probabilities under the reference, [B, T], or None.
    """

    log_probs: Tensor
    old_log_probs: Tensor | None
    mask: Tensor
    advantages: Tensor
    ratio: str = "token"
    sampler_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None

    def __post_init__(self):
        self.advantages = column(self.advantages)

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

    @property
    def behaviour_log_probs(self) -> Tensor:
        """`sampler_log_probs` where recorded, and `old_log_probs` elsewhere. [B, T]."""
        if self.sampler_log_probs is None:
            return self.old_log_probs
        return torch.where(self.sampler_log_probs.isnan(), self.old_log_probs, self.sampler_log_probs)

    def without_padding(self, ratio: str) -> PolicyScores:
        """The same with zeros at padding, where an infinity or a NaN would reach the gradient even of a masked sum."""
        padding = self.mask == 0
        names = ("log_probs", "old_log_probs", "sampler_log_probs", "ref_log_probs", "advantages")
        tensors = {name: getattr(self, name) for name in names}
        # Advantages may be of whole responses, [B, 1].
        grids = {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.dim() == 2}
        blank = {n: t.masked_fill(padding, 0) for n, t in grids.items() if t.shape == padding.shape}
        return replace(self, ratio=ratio, **blank)


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Log of each token's new over old probability. [B, T]."""
    return log_probs - old_log_probs


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Mean of the token log-ratios of each response, the log of GSPO's ratio; 0 for an empty response. [B, 1].

    Zheng et al. 2025, arXiv 2507.18071, equation 7.
    """
    total = masked_sum(log_probs - old_log_probs, mask, dim=-1)
    return (total / (mask != 0).sum(-1).clamp(min=1)).unsqueeze(-1)


def column(advantages: Tensor) -> Tensor:
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
        clip_low, clip_high: how far the ratio may fall and rise. Unequal ones: DAPO, arXiv 2503.14476.
        dual_clip: if the advantage is negative, the loss is at most this many times `-advantage`; above 1
            (Ye et al. 2019, arXiv 1912.09729).

    Schulman et al. 2017, arXiv 1707.06347, equation 7.
    """
    advantages = column(advantages)
    ratio = bounded_ratio(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def clipped_shares(scores: PolicyScores, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Shares of the tokens that `clipped_surrogate` clips, or of the responses for a ratio of sequences.

    `clip_ratio/low_mean`: the ratio is below `1 - clip_low` and the advantage negative. `clip_ratio/high_mean`: it is
    above `1 + clip_high` and the advantage positive. `clip_ratio/region_mean`: either. `clip_ratio/low_min` and
    `clip_ratio/high_max` are the extremes over responses; NaN if no response has a token. All are scalars.
    """
    ratio, mask = bounded_ratio(scores.log_ratio), scores.mask != 0
    low = (ratio < 1 - clip_low) & (scores.advantages < 0)
    high = (ratio > 1 + clip_high) & (scores.advantages > 0)
    if scores.ratio == "sequence" and low.shape[1] == 1:
        # Each response counts once.
        mask = torch.ones_like(low)
    count = mask.sum().clamp(min=1)
    return {
        "clip_ratio/low_mean": masked_sum(low.float(), mask) / count,
        "clip_ratio/high_mean": masked_sum(high.float(), mask) / count,
        "clip_ratio/region_mean": masked_sum((low | high).float(), mask) / count,
        "clip_ratio/low_min": masked_mean(low.float(), mask, dim=-1).nanquantile(0),
        "clip_ratio/high_max": masked_mean(high.float(), mask, dim=-1).nanquantile(1),
    }


def unclipped_surrogate(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`-ratio A`: the importance-weighted policy gradient, without a constraint towards the old policy.

    A log-ratio above 20 is clamped and has no gradient, as in `clipped_surrogate`.
    """
    return -bounded_ratio(log_ratio) * column(advantages)


def cispo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, ratio_cap: float = 5.0) -> Tensor:
    """CISPO: `-min(ratio, ratio_cap) A log_prob`, with no gradient through the capped ratio; no token is dropped.

    `ratio_cap` is the cap itself, not its distance from 1.
    MiniMax 2025, arXiv 2506.13585, equation 4; cap of about 5: arXiv 2510.13786.
    """
    weights = bounded_ratio(log_ratio.detach()).clamp(max=ratio_cap)
    return -weights * column(advantages) * log_probs


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """`-A log_prob`: the policy gradient for responses of the current policy. [B, T]. Williams 1992."""
    return -column(advantages) * log_probs


def sapo(
    log_ratio: Tensor, advantages: Tensor, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05
) -> Tensor:
    """SAPO: `-4 / tau sigmoid(tau (ratio - 1)) A`: a gate that closes smoothly as the ratio leaves 1.

    With p the sigmoid, the gradient is `4 p (1 - p)` times that of `-ratio A`. Tau is `temperature_pos` where the
    advantage is positive and `temperature_neg` elsewhere. At ratio 1 the loss is `-2 A / tau`, and the gradient -A.
    arXiv 2511.20347.
    """
    advantages = column(advantages)
    temperature = torch.full_like(advantages, temperature_neg).masked_fill(advantages > 0, temperature_pos)
    return -4 / temperature * torch.sigmoid(temperature * (bounded_ratio(log_ratio) - 1)) * advantages


def gmpo(log_ratio: Tensor, mask: Tensor, advantages: Tensor, *, log_clip: float = 0.4) -> Tensor:
    """GMPO: `-A exp(mean(clipped log-ratio))`: the geometric mean of a response's clipped ratios. [B, 1].

    Each token's log-ratio is clipped to plus and minus `log_clip`, in the direction that the advantage favours. A
    clipped token has no gradient, and still scales that of the others. The ratio is of tokens, [B, T], and there is
    one advantage for each response.
    arXiv 2507.20673.
    """
    advantages = column(advantages)
    clipped = log_ratio.clamp(-log_clip, log_clip)
    log_ratio = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    mean = masked_sum(log_ratio, mask, dim=-1) / (mask != 0).sum(-1).clamp(min=1)
    return -advantages * bounded_ratio(mean.unsqueeze(-1))
