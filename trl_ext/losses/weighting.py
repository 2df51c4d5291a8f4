"""Weights per pair that compose with any preference loss. Pure functions on `PreferenceScores`; no gradient flows.

For a loss that pairs responses differently, as AOT does, the weight is that of the chosen response's pair.
"""

from __future__ import annotations

from torch import Tensor

from trl_ext.losses.preference import PreferenceScores
from trl_ext.registry import preference_weighting


@preference_weighting("wpo", needs_policy_weights=True)
def wpo(scores: PreferenceScores, *, max_weight: float | None = 1.0) -> Tensor:
    """WPO: weight a pair by how likely the current policy is to have produced its two responses. [B].

    The product of the two responses' `policy_weight`, each `exp(mean_t(log p(y_t) - log sum_v p(v)^2))`, clamped at
    `max_weight` as the authors do (None for no clamp, TRL's form). Zhou et al. 2024, arXiv 2406.11827, equation 2.
    """
    if scores.chosen_policy_weight is None or scores.rejected_policy_weight is None:
        raise ValueError("wpo reads chosen_policy_weight and rejected_policy_weight, and there are none")
    weights = (scores.chosen_policy_weight * scores.rejected_policy_weight).detach()
    return weights if max_weight is None else weights.clamp(max=max_weight)


@preference_weighting("confidence", normalize=True, column_option="column")
def confidence(
    scores: PreferenceScores, *, column: str = "avg_confidence", power: float = 1.0, floor: float = 0.3
) -> Tensor:
    """Weight a pair by how sure its label is: `max(floor, column ** power)`. [B].

    The trainer divides by the mean over the optimizer batch, so that the weights do not change the learning rate.

    Raises:
        ValueError: the column is missing or negative, or the floor is negative.
    """
    if column not in scores.columns:
        raise ValueError(f"the confidence weighting reads the column {column!r}, which the dataset does not have")
    if floor < 0:
        raise ValueError(f"floor must not be negative, got {floor}")
    values = scores.columns[column].detach()
    if not bool(values.isfinite().all()):
        raise ValueError(f"the column {column!r} holds values that are not finite and cannot weight a loss")
    if bool((values < 0).any()):
        raise ValueError(f"the column {column!r} holds negative values and cannot weight a loss")
    return values.pow(power).clamp(min=floor)
