"""A*-PO: regression on the reward less the optimal value of the prompt, with one response to each prompt.

Brantley et al. 2025, Accelerating RL for LLM Reasoning with Optimal Advantage Regression, arXiv 2505.20686.

    accelerate launch recipes/online.py --algorithm recipes/own/a_star_po.py:a_star_po --reward_function mine.py:exact

The data need a column `optimal_value`: `soft_value` of the rewards of 8 responses of the reference to each prompt,
sampled once before training. The authors leave out prompts whose responses are all wrong. `mine.py` holds
`exact = less_optimal_value(your_reward_function)`.
"""

import functools

import torch

from trl_ext import policy_algorithm
from trl_ext.losses import masked_sum


@policy_algorithm("a_star_po", advantage="no_baseline", ratio="none", beta=1e-3, group_size=1, paper="2505.20686")
def a_star_po(scores, *, beta):
    """`(beta h - A)^2`, with h the log-ratio of a response to the reference, and A its reward less the value."""
    log_ratio = masked_sum(scores.log_probs - scores.ref_log_probs, scores.mask, dim=-1).unsqueeze(-1)
    return (beta * log_ratio - scores.advantages).square()


def soft_value(rewards, group_size, beta=0.5):
    """The optimal value of each prompt, `beta log mean exp(r / beta)`, from rewards [N] of the reference. [N / G]."""
    groups = torch.as_tensor(rewards, dtype=torch.float64).view(-1, group_size)
    known = groups.isfinite()
    total = (groups / beta).masked_fill(~known, -torch.inf).logsumexp(dim=1)
    return beta * (total - known.sum(dim=1).double().log())


def less_optimal_value(reward):
    """The reward function, less the column `optimal_value`; None where either is missing."""

    @functools.wraps(reward)
    def difference(optimal_value, **columns):
        pairs = zip(reward(**columns), optimal_value, strict=True)
        return [None if r is None or value is None else r - value for r, value in pairs]

    return difference
