"""The inputs of a policy loss, and the ratios of new over old probabilities that are made of them.

Shapes: B responses of up to T tokens. A log-ratio is new minus old: [B, T] for one per token, [B, 1] for one per
response.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trl_ext.losses.kl import MAX_EXPONENT
from trl_ext.losses.masking import masked_sum


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
