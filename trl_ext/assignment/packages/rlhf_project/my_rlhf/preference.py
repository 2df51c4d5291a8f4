"""Offline preference losses and a reward model's loss: one value for each pair.

`scores` has tensors of shape [B]: `chosen` and `rejected`, the summed log-probabilities of the responses under the
policy; `ref_chosen` and `ref_rejected`, those under the reference; `chosen_length` and `rejected_length`, in tokens.
Properties: `chosen_log_ratio` is `chosen - ref_chosen`, `rejected_log_ratio` likewise, and `margin` their difference.
Hint: torch.nn.functional.logsigmoid is exact where log(sigmoid(x)) is not.
"""

import torch
import torch.nn.functional as F


def dpo(scores, *, beta=0.1):
    """DPO: `-log sigmoid(beta margin)`. [B]. Rafailov et al. 2023, arXiv 2305.18290, equation 7."""
    ### BEGIN SOLUTION
    return F.softplus(-beta * scores.margin)
    ### END SOLUTION


def ipo(scores, *, beta=0.1, length_normalized=False):
    """IPO: `(margin - 1 / (2 beta))^2`, on request of log-ratios divided by their lengths. [B]. arXiv 2310.12036."""
    ### BEGIN SOLUTION
    chosen, rejected = scores.chosen_log_ratio, scores.rejected_log_ratio
    if length_normalized:
        chosen, rejected = chosen / scores.chosen_length, rejected / scores.rejected_length
    return (chosen - rejected - 0.5 / beta) ** 2
    ### END SOLUTION


def aot(scores, *, beta=0.01):
    """Unpaired AOT: `-log sigmoid(beta d)`, d = chosen - rejected log-ratio of equal rank. [B]. arXiv 2406.05882.

    Each are sorted over the batch. Training needs entry i to be the loss of chosen response i; the tests do not.
    """
    ### BEGIN SOLUTION
    rejected, _ = torch.sort(scores.rejected_log_ratio)
    ranks = scores.chosen_log_ratio.argsort().argsort()
    return -F.logsigmoid(beta * (scores.chosen_log_ratio - rejected[ranks]))
    ### END SOLUTION


def bradley_terry(chosen, rejected, *, margin=None):
    """`-log sigmoid(chosen - rejected - margin)`. Scores and margin are [B]. Bradley and Terry; arXiv 2203.02155."""
    ### BEGIN SOLUTION
    return F.softplus(-(chosen - rejected - (0 if margin is None else margin)))
    ### END SOLUTION
