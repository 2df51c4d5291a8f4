"""VESPO: a smooth weight from the product of a response's ratios.

VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training, arXiv 2602.10693.

    accelerate launch recipes/online.py --algorithm recipes/own/vespo.py:vespo --reward_model REWARD_MODEL
"""

import math

import torch

from trl_ext import policy_algorithm
from trl_ext.losses import masked_sum


@policy_algorithm("vespo", aggregation="token_mean", reads_sampler=True, paper="2602.10693")
def vespo(scores, *, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0, sampler_cap=2.0):
    """`-w^k exp(lambda (1 - w)) A log_prob`, with w the product of a response's ratios, without gradient.

    k and lambda are `_neg` where the advantage is negative. w also holds the ratio of the trainer's to the sampler's
    probability of each token, at most `sampler_cap`, where the sampler recorded it. Logarithms are clamped at plus
    and minus 20.
    """
    advantages = scores.advantages
    of_sampler = (scores.old_log_probs - scores.behaviour_log_probs).clamp(-20, math.log(sampler_cap))
    log_w = masked_sum(scores.log_ratio.detach().clamp(-20, 20) + of_sampler, scores.mask, dim=-1)
    log_w = log_w.unsqueeze(-1).clamp(-20, 20)
    k = torch.full_like(advantages, k_neg).masked_fill(advantages >= 0, k_pos)
    decay = torch.full_like(advantages, lambda_neg).masked_fill(advantages >= 0, lambda_pos)
    return -(k * log_w + decay * (1 - log_w.exp())).exp() * advantages * scores.log_probs
