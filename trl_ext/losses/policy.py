"""Policy-gradient losses: from token log-probabilities and advantages to token losses.

Shapes: B responses of up to T tokens. A log-ratio is new minus old: [B, T] for one per token, [B, 1] for one per
response. Advantages are [B], [B, 1] or [B, T]; log-probabilities, masks and covariances are [B, T]. Every loss is
minimised and returned unreduced; at ratio 1 its gradient is `-advantage` times that of the log-probability, except for
the tokens that `clip_cov` drops and for `optimal_advantage`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.losses.kl import MAX_EXPONENT
from trl_ext.losses.masking import masked_sum
from trl_ext.losses.policy_scores import bounded_ratio, column


def _choose(condition: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    """One number where the condition holds and the other elsewhere, in the dtype of `like`."""
    return torch.full_like(like, other).masked_fill(condition, one)


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
    advantages = column(advantages)
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
    return -bounded_ratio(log_ratio) * column(advantages)


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
    return -weights * column(advantages) * log_probs


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """`-A log_prob`: the policy gradient for responses of the current policy. [B, T]. Williams 1992."""
    return -column(advantages) * log_probs


def quadratic_ratio(log_ratio: Tensor, advantages: Tensor, *, strength: float) -> Tensor:
    """`-ratio A + strength / 2 (ratio - 1)^2`: a quadratic penalty on the distance to ratio 1 instead of a clip.

    The loss of Group Orthogonalized Policy Optimization, arXiv 2602.21269, as its abstract suggests it; the paper's
    strength was not available. A log-ratio above 20 is clamped and has no gradient, as in `clipped_surrogate`.
    """
    ratio = bounded_ratio(log_ratio)
    return -ratio * column(advantages) + strength / 2 * (ratio - 1).square()


def sapo(
    log_ratio: Tensor, advantages: Tensor, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05
) -> Tensor:
    """SAPO: `-4 / tau sigmoid(tau (ratio - 1)) A`: a gate that closes smoothly as the ratio leaves 1.

    With p the sigmoid, the gradient is `4 p (1 - p)` times that of `-ratio A`. Tau is `temperature_pos` where the
    advantage is positive and `temperature_neg` elsewhere. At ratio 1 the loss is `-2 A / tau`, and the gradient -A.
    arXiv 2511.20347.
    """
    advantages = column(advantages)
    temperature = _choose(advantages > 0, temperature_pos, temperature_neg, advantages)
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


def gspo_token(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Tensor:
    """GSPO-token: GSPO's clip of `s exp(log_prob - sg[log_prob])` at each token, s the sequence's ratio, detached.

    The ratio is of the sequence, [B, 1]. Its values are GSPO's. Its gradient is too if all tokens of a response have
    one advantage; they may also differ.
    Zheng et al. 2025, arXiv 2507.18071.
    """
    ratio = bounded_ratio(log_ratio.detach()) * (log_probs - log_probs.detach()).exp()
    advantages = column(advantages)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def vespo(
    log_ratio: Tensor,
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """VESPO: `-w^k exp(lambda (1 - w)) A log_prob`, with w the product of a response's ratios, without gradient.

    The factor is 1 at w = 1 and falls to 0 for small and large w. k and lambda are `_neg` where the advantage is
    negative. Log-ratios, [B, T], are clamped at plus and minus 20.
    arXiv 2602.10693.
    """
    advantages = column(advantages)
    log_w = masked_sum(log_ratio.detach().clamp(-MAX_EXPONENT, MAX_EXPONENT), mask, dim=-1).unsqueeze(-1)
    log_w = log_w.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    k = _choose(advantages >= 0, k_pos, k_neg, advantages)
    decay = _choose(advantages >= 0, lambda_pos, lambda_neg, advantages)
    return -(k * log_w + decay * (1 - log_w.exp())).exp() * advantages * log_probs


def dppo_tv(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    ratio_cap: float = 10.0,
) -> Tensor:
    """DPPO, total variation: `-min(p / q, ratio_cap) A log_prob`, and 0 where `|p - q|` is above delta.

    p is a token's probability and q that of the policy that sampled it, as its sampler recorded it if it did. Only
    tokens that have moved in the direction that their advantage favours become 0. p / q has no gradient. The limit is
    `delta_low` where the advantage is negative, and `delta_high` where it is positive.
    Qi et al. 2026, arXiv 2602.04879.
    """
    divergence = (log_probs.detach().exp() - behaviour_log_probs.exp()).abs()
    return _dppo(divergence, log_probs, behaviour_log_probs, advantages, delta_low, delta_high, ratio_cap)


def dppo_kl(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    *,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    ratio_cap: float = 10.0,
) -> Tensor:
    """DPPO, KL: `dppo_tv` with `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` in place of `|p - q|`.

    This is the KL divergence between distributions over two events: this token, and any other. arXiv 2602.04879.
    """
    # A probability that rounds to 1 has a finite logarithm of the rest.
    p, q = (values.detach().exp().clamp(max=1 - 1e-7) for values in (log_probs, behaviour_log_probs))
    divergence = q * (behaviour_log_probs - log_probs.detach()) + (1 - q) * ((1 - q) / (1 - p)).log()
    return _dppo(divergence, log_probs, behaviour_log_probs, advantages, delta_low, delta_high, ratio_cap)


def _dppo(divergence, log_probs, behaviour_log_probs, advantages, delta_low, delta_high, ratio_cap) -> Tensor:
    advantages = column(advantages)
    change = log_probs.detach() - behaviour_log_probs
    limit = _choose(advantages > 0, delta_high, delta_low, advantages)
    dropped = (advantages * change > 0) & (divergence > limit)
    weights = bounded_ratio(change).clamp(max=ratio_cap).masked_fill(dropped, 0)
    return -weights * advantages * log_probs


def clip_cov(
    log_ratio: Tensor,
    advantages: Tensor,
    covariance: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Clip-Cov: PPO's clip, and 0 for a few random tokens of high covariance, which lower the entropy most.

    Of N tokens, `max(1, share N)` are drawn among those that the clip leaves alone and whose covariance lies between
    the bounds. They are drawn with torch's random numbers, so that a run's seed gives the same tokens again. The
    covariance is that of `PolicyScores`, over these B responses. A clip of 1, as in the authors' runs, cuts little.
    Cui et al. 2025, arXiv 2505.22617.
    """
    losses = clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    unclipped = losses <= unclipped_surrogate(log_ratio, advantages)
    candidates = ((mask != 0) & (covariance > cov_low) & (covariance < cov_high) & unclipped).nonzero()
    count = max(1, int(share * (mask != 0).sum()))
    drawn = candidates[torch.randperm(len(candidates), device=candidates.device)[:count]]
    return losses.index_put(tuple(drawn.T), losses.new_zeros(()))


def kl_cov(
    log_ratio: Tensor,
    advantages: Tensor,
    covariance: Tensor,
    mask: Tensor,
    *,
    share: float = 2e-3,
    coefficient: float = 1.0,
) -> Tensor:
    """KL-Cov: `-ratio A`, and `coefficient |log_ratio|` more for the tokens of the highest covariance.

    These are `max(1, share N)` of N tokens; the paper's share is 2e-3 for a model of 7B and 2e-4 for one of 32B. While
    the policy is the one that sampled, the penalty has no gradient. The covariance is that of `PolicyScores`.
    Cui et al. 2025, arXiv 2505.22617.
    """
    count = max(1, int(share * (mask != 0).sum()))
    highest = covariance.masked_fill(mask == 0, -torch.inf).flatten().topk(min(count, mask.numel())).indices
    chosen = torch.zeros_like(covariance).flatten().index_fill(0, highest, coefficient).view_as(covariance)
    return unclipped_surrogate(log_ratio, advantages) + chosen * log_ratio.abs()


def optimal_advantage(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, advantages: Tensor, *, beta: float = 1e-3
) -> Tensor:
    """A*-PO: `(beta h - A)^2`, with h the log-ratio of a response to the reference, summed over its tokens. [B, 1].

    At its minimum, beta h is the advantage of the policy that is optimal with beta times the KL divergence. There is
    one advantage for each response, its reward less the optimal value of its prompt.
    Brantley et al. 2025, arXiv 2505.20686.
    """
    log_ratio = masked_sum(log_probs - ref_log_probs, mask, dim=-1).unsqueeze(-1)
    return (beta * log_ratio - column(advantages)).square()


# Values of the setting `surrogate`. Positional parameters are attributes of `PolicyScores`.
SURROGATES: dict[str, Callable[..., Tensor]] = {
    "clip": clipped_surrogate,
    "no_clip": unclipped_surrogate,
    "cispo": cispo,
    "reinforce": reinforce,
    "quadratic_ratio": quadratic_ratio,
    "sapo": sapo,
    "gmpo": gmpo,
    "gspo_token": gspo_token,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "optimal_advantage": optimal_advantage,
}
# The unit of the ratio of surrogates that are defined for one alone.
RATIO_OF = {
    "gspo_token": "sequence",
    **dict.fromkeys(("gmpo", "vespo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"), "token"),
}
