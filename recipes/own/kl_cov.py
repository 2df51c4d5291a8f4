"""KL-Cov: a penalty on the log-ratio of the tokens of the highest covariance, which lower the entropy most.

Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.

    accelerate launch recipes/online.py --algorithm recipes/own/kl_cov.py:kl_cov --reward_model REWARD_MODEL

The means of the covariance, and the number of penalised tokens, are those of a micro-batch: the update depends on
`per_device_train_batch_size`.
"""

import torch

from trl_ext import policy_algorithm
from trl_ext.losses import masked_mean, unclipped_surrogate


@policy_algorithm("kl_cov", aggregation="token_mean", paper="2505.22617")
def kl_cov(scores, *, share=2e-3, coefficient=1.0):
    """`-ratio A`, and `coefficient |log_ratio|` more for the `max(1, share N)` tokens of the highest covariance.

    The paper's share is 2e-3 for a model of 7B and 2e-4 for one of 32B. While the policy is the one that sampled, the
    penalty has no gradient.
    """
    log_probs, mask = scores.log_probs.detach(), scores.mask
    advantages = scores.advantages.expand_as(log_probs)
    covariance = (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))
    count = min(max(1, int(share * (mask != 0).sum())), mask.numel())
    highest = covariance.masked_fill(mask == 0, -torch.inf).flatten().topk(count).indices
    penalty = torch.zeros_like(log_probs).flatten().index_fill(0, highest, coefficient).view_as(log_probs)
    return unclipped_surrogate(scores.log_ratio, advantages) + penalty * scores.log_ratio.abs()
