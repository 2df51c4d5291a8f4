"""GDPO: each reward function is normalised by itself within the group, then their sum over the batch.

GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization, arXiv 2601.05242. Only
the advantage was compared with the authors' code; surrogate, reduction and KL term are GRPO's.

    accelerate launch recipes/online.py --advantage recipes/own/gdpo.py:gdpo --reward_function mine.py:a mine.py:b
"""

import torch

from trl_ext.advantages import group_normalized


def gdpo(rewards, group_size, components, weights):
    """`a = sum_f w_f (r_f - mean) / (std + 1e-4)` by group, then `(a - mean) / (std + 1e-4)` of the batch. [N].

    `components` are the rewards of each function, [N, F], and `weights` those of `--reward_weights`, [F]. The scale of
    a function does not matter, and one that rewards all responses of a group alike adds nothing. The deviations are
    the sample's.
    """
    columns = zip(components.unbind(1), weights.tolist(), strict=True)
    total = sum(weight * group_normalized(column, group_size, 1, 1e-4) for column, weight in columns)
    advantages = group_normalized(total.masked_fill(~rewards.isfinite(), torch.nan), len(total), 1, 1e-4)
    # A group that no function tells apart has no signal.
    return advantages.masked_fill(total == 0, 0)
