"""DPPO: a token that has moved too far from the policy that sampled it gets no gradient.

Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.

    accelerate launch recipes/online.py --algorithm recipes/own/dppo.py:dppo_tv --reward_model REWARD_MODEL
    accelerate launch recipes/online.py --algorithm recipes/own/dppo.py:dppo_kl --reward_model REWARD_MODEL

p is a token's probability and q that of the policy that sampled it, as its sampler recorded it if it did. The
advantage, the reduction, the group and the bounds are those of the authors' example in verl.
"""

import torch

from trl_ext import policy_algorithm

SETTINGS = {"advantage": "group_centered", "aggregation": "constant", "group_size": 16, "paper": "2602.04879"}


@policy_algorithm("dppo_tv", reads_sampler=True, **SETTINGS)
def dppo_tv(scores, *, delta_low=0.15, delta_high=0.15, ratio_cap=10.0):
    """`-min(p / q, ratio_cap) A log p`, and 0 where `|p - q|` is above delta and A pushes the token further."""
    distance = (scores.log_probs.detach().exp() - scores.behaviour_log_probs.exp()).abs()
    return weighted(scores, distance, delta_low, delta_high, ratio_cap)


@policy_algorithm("dppo_kl", reads_sampler=True, **SETTINGS)
def dppo_kl(scores, *, delta_low=0.05, delta_high=0.05, ratio_cap=10.0):
    """The same with `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`: this token, or any other."""
    new, old = scores.log_probs.detach(), scores.behaviour_log_probs
    # A probability that rounds to 1 has a finite logarithm of the rest.
    p, q = (values.exp().clamp(max=1 - 1e-7) for values in (new, old))
    return weighted(scores, q * (old - new) + (1 - q) * ((1 - q) / (1 - p)).log(), delta_low, delta_high, ratio_cap)


def weighted(scores, distance, delta_low, delta_high, ratio_cap):
    change = scores.log_probs.detach() - scores.behaviour_log_probs
    limit = torch.full_like(scores.advantages, delta_low).masked_fill(scores.advantages > 0, delta_high)
    dropped = (scores.advantages * change > 0) & (distance > limit)
    weights = change.clamp(max=20).exp().clamp(max=ratio_cap).masked_fill(dropped, 0)
    return -weights * scores.advantages * scores.log_probs
