"""Estimates of the KL divergence between the policy and the reference, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_ext.registry import nearest

KL_ESTIMATORS = ("k1", "k2", "k3")

# exp(20) is 5e8: a larger value is a numerical fault, not a probability ratio.
MAX_EXPONENT = 20.0


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
