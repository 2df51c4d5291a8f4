"""KTO's loss of single responses labelled desirable or undesirable: a pure function, one loss per response."""

from __future__ import annotations

import torch
from torch import Tensor


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    kl_log_ratio: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO: `w_d (1 - s(beta (h - z)))` for a desirable response, `w_u (1 - s(beta (z - h)))` for an undesirable one.

    `s` is the logistic function and `z = max(0, mean of kl_log_ratio)` estimates the divergence from the reference;
    no gradient flows through it. The mean is clamped, not its terms. Ethayarajh et al. 2024, arXiv 2402.01306,
    equations 6 and 7.

    Args:
        log_ratio: `h`, log of policy over reference probability of each response, summed over its tokens, [B].
        desirable: true where a response is desirable, [B].
        kl_log_ratio: the same log-ratio of responses to other prompts, any number of them, [K].
        beta: strength; smaller values let the policy go further from the reference.
        desirable_weight, undesirable_weight: the paper's lambdas.

    Returns:
        Losses, [B].

    Raises:
        ValueError: no log-ratios to estimate the divergence from, or a weight that is not positive.
    """
    if kl_log_ratio.numel() == 0:
        raise ValueError("KTO estimates the divergence from kl_log_ratio, and it is empty: give at least one")
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        if not weight > 0:
            raise ValueError(f"{name} must be positive, got {weight}")
    divergence = kl_log_ratio.detach().mean().clamp(min=0)
    gain = beta * (log_ratio - divergence)
    desirable = desirable.bool()
    weights = torch.where(desirable, gain.new_tensor(desirable_weight), gain.new_tensor(undesirable_weight))
    return weights * torch.sigmoid(torch.where(desirable, -gain, gain))
