"""LUSPO: GSPO with each response's loss times its length, so that every token has the same weight.

Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR, arXiv
2602.05261. The clip is the one that TRL reads in section 5.1.

    accelerate launch recipes/online.py --algorithm recipes/own/luspo.py:luspo --reward_model REWARD_MODEL
"""

from trl_ext import policy_algorithm
from trl_ext.losses import clipped_surrogate


@policy_algorithm("luspo", ratio="sequence", aggregation="sum", paper="2602.05261")
def luspo(scores, *, clip_low=2e-3, clip_high=2.5e-3):
    """`-min(s A, clip(s) A)` at each token of a response, with s the ratio of the whole sequence. [B, 1]."""
    return clipped_surrogate(scores.log_ratio, scores.advantages, clip_low=clip_low, clip_high=clip_high)
