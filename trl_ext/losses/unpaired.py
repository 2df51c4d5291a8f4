"""Losses of single responses labelled desirable or undesirable: pure functions, one loss per response."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


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


def bco(log_ratio: Tensor, desirable: Tensor, shift: Tensor | float, *, beta: float = 0.1) -> Tensor:
    """BCO: `-log s(beta h - d)` for a desirable response, `-log s(d - beta h)` for an undesirable one. [B].

    `s` is the logistic function, and `d` a shift of the rewards `beta h`, without gradient: `reward_shift`.
    Jung et al. 2024, arXiv 2404.04656; the paper's runs have beta 0.01.

    Args:
        log_ratio: `h`, log of policy over reference probability of each response, summed over its tokens, [B].
        desirable: true where a response is desirable, [B].
        shift: a number.
        beta: strength; smaller values let the policy go further from the reference.
    """
    logits = beta * log_ratio - shift
    return -logsigmoid(torch.where(desirable.bool(), logits, -logits))


def reward_shift(sums: Sequence[float]) -> float:
    """BCO's shift: half the sum of the mean rewards of desirable and of undesirable responses, whatever their numbers.

    Args:
        sums: sum and number of desirable responses' rewards, then of undesirable ones'; 0 for a mean of none.
    """
    return (sums[0] / max(sums[1], 1) + sums[2] / max(sums[3], 1)) / 2
