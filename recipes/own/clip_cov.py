"""Clip-Cov: a few random tokens of high covariance, which lower the entropy most, get no gradient.

Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.

    accelerate launch recipes/online.py --algorithm recipes/own/clip_cov.py:clip_cov --reward_model REWARD_MODEL

The means of the covariance, and the number of tokens drawn, are those of a micro-batch: the update depends on
`per_device_train_batch_size`.
"""

import torch

from trl_ext import policy_algorithm
from trl_ext.losses import clipped_surrogate, masked_mean, unclipped_surrogate


@policy_algorithm("clip_cov", aggregation="token_mean", paper="2505.22617")
def clip_cov(scores, *, clip_low=1.0, clip_high=1.0, share=2e-4, cov_low=1.0, cov_high=5.0):
    """PPO's clip, and 0 for random tokens whose covariance lies between the bounds.

    `max(1, share N)` of N tokens are drawn among those that the clip leaves alone. torch's random numbers follow the
    run's seed. A clip of 1, as in the authors' runs, clips little.
    """
    log_probs, mask = scores.log_probs.detach(), scores.mask
    advantages = scores.advantages.expand_as(log_probs)
    covariance = (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))
    losses = clipped_surrogate(scores.log_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    unclipped = losses <= unclipped_surrogate(scores.log_ratio, advantages)
    candidates = ((mask != 0) & (covariance > cov_low) & (covariance < cov_high) & unclipped).nonzero()
    count = max(1, int(share * (mask != 0).sum()))
    drawn = candidates[torch.randperm(len(candidates), device=candidates.device)[:count]]
    return losses.index_put(tuple(drawn.T), losses.new_zeros(()))
