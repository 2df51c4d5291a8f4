"""Losses of reward models: from the scores of two responses to one loss per pair."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    centering: float = 0.0,
) -> Tensor:
    """Negative log-likelihood that the chosen response wins under the Bradley-Terry model. [B].

    With `d = chosen - rejected - margin` and `l(u) = -log sigmoid(u)`:
    `(1 - e) l(d) + e l(-d) + centering (chosen + rejected)^2`.

    Args:
        chosen, rejected: scores of the two responses, [B].
        margin: the required lead of the chosen response, [B] or a number (Llama 2, arXiv 2307.09288, equation 2).
        label_smoothing: `e`, the probability that a label is wrong, in [0, 0.5).
        centering: pulls the sum of the two scores to zero, since only their difference is identified; 0.01 in
            Eisenstein et al. 2023, arXiv 2312.09244.

    Raises:
        ValueError: shapes that differ, or an option out of range.

    Ouyang et al. 2022, arXiv 2203.02155, equation 1.
    """
    if chosen.shape != rejected.shape:
        raise ValueError(
            f"bradley_terry compares scores pair by pair, got shapes {list(chosen.shape)} for chosen and "
            f"{list(rejected.shape)} for rejected"
        )
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}: it is a label's error rate")
    if not 0 <= centering < math.inf:
        raise ValueError(f"centering must be a number from 0 up, got {centering}")
    logits = chosen - rejected
    if margin is not None:
        logits = logits - margin
    losses = -logsigmoid(logits)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * logsigmoid(-logits)
    if centering:
        losses = losses + centering * (chosen + rejected).square()
    return losses
