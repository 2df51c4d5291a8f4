"""Combines a preference loss, its options and its weightings into a loss per pair.

A weighting is a weight per pair, without gradient, that composes with any preference loss. For a loss that pairs
responses differently, as AOT does, the weight is that of the chosen response's pair.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trl_ext.losses.preference import PreferenceScores
from trl_ext.names import nearest
from trl_ext.registry import PreferenceWeighting, preference_losses, preference_weighting, preference_weightings


class PreferenceObjective:
    """A registered loss with its options, multiplied by any number of registered weightings.

    Args:
        loss: a registered name, or `file.py:function`.
        beta: strength of the preference signal; None for the loss's own default (0.1 if it has none).
        loss_options: the loss's keyword options, such as `{"label_smoothing": 0.1}`.
        weightings: names of registered weightings.
        weighting_options: keyword options, each passed to the weightings that have it.
        columns: dataset columns to pass to the loss, in addition to those that it declares.

    Attributes:
        needs_reference, batch_coupled: see `trl_ext.registry.preference_loss`.
        needs_policy_weights: whether a weighting reads the policy weights of the responses.
        normalizes: whether a weighting is divided by its mean over the optimizer batch.
        columns: dataset columns passed to the loss and the weightings.

    Raises:
        ValueError: an unknown name or option, or a beta that is not positive; the message says which and what to do.
    """

    def __init__(
        self,
        loss: str,
        *,
        beta: float | None = None,
        loss_options: dict[str, Any] | None = None,
        weightings: Sequence[str] = (),
        weighting_options: dict[str, Any] | None = None,
        columns: Sequence[str] = (),
    ):
        self.loss = preference_losses.find(loss)
        self.loss_options = dict(loss_options or {})
        self.loss.check_options(self.loss_options)
        self.beta = self.loss.default_beta or 0.1 if beta is None else beta
        if not 0 < self.beta < float("inf"):
            raise ValueError(
                f"beta must be positive, got {beta}: at 0 the loss would not depend on the policy, and a negative one "
                "would prefer the rejected responses"
            )
        self.weightings = _with_options(weightings, dict(weighting_options or {}))
        self.needs_reference, self.batch_coupled = self.loss.needs_reference, self.loss.batch_coupled
        self.needs_policy_weights = any(weighting.needs_policy_weights for weighting, _ in self.weightings)
        self.normalizes = any(weighting.normalize for weighting, _ in self.weightings)
        of_weightings = [options["column"] for _, options in self.weightings if "column" in options]
        self.columns = tuple(dict.fromkeys([*self.loss.columns, *of_weightings, *columns]))

    def raw_weights(self, scores: PreferenceScores) -> Tensor:
        """Product of the weights to be divided by their mean over the optimizer batch. [B]."""
        weights = torch.ones_like(scores.chosen)
        # Their mean must be known before the batch is trained on, so they read the columns alone.
        columns = PreferenceScores(None, None, columns=scores.columns)
        for weighting, options in self.weightings:
            if weighting.normalize:
                weights = weights * weighting.function(columns, **options)
        return weights

    def __call__(self, scores: PreferenceScores, *, mean_raw_weight: Tensor | float | None = None) -> Tensor:
        """Weighted losses of the batch, shape [B]; their mean over the optimizer batch is the loss to minimise.

        Args:
            scores: the scores of B pairs.
            mean_raw_weight: mean of `raw_weights` over the optimizer batch; None if `scores` is that whole batch.

        Raises:
            ValueError: the loss does not return one value per pair.
        """
        beta = {"beta": self.beta} if self.loss.takes_beta else {}
        try:
            losses = self.loss.function(scores, **beta, **self.loss_options)
        except KeyError as error:
            raise ValueError(
                f"the preference loss {self.loss.name!r} reads the column {error.args[0]!r}: "
                f"register it with columns=({error.args[0]!r},), or name the column in loss_columns"
            ) from error
        if not isinstance(losses, Tensor) or losses.shape != scores.chosen.shape:
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ValueError(
                f"the preference loss {self.loss.name!r} returned {got} for {len(scores.chosen)} pairs; it must "
                "return one value per pair, without reducing them"
            )
        for weighting, options in self.weightings:
            if not weighting.normalize:
                losses = losses * weighting.function(scores, **options)
        if self.normalizes:
            weights = self.raw_weights(scores)
            mean = weights.mean() if mean_raw_weight is None else mean_raw_weight
            mean = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
            # If all weights are zero, the loss is zero.
            losses = losses * weights / mean.clamp(min=torch.finfo(weights.dtype).tiny)
        return losses

    def describe(self) -> str:
        """One line that names the loss, its beta and its options, for logs and reports."""
        defaults = {n: v for n, v in self.loss.options.items() if v is not inspect.Parameter.empty}
        options = {**({"beta": self.beta} if self.loss.takes_beta else {}), **defaults, **self.loss_options}
        parts = [f"{name} {value}" for name, value in options.items() if value is not None]
        for weighting, options in self.weightings:
            settings = (f"{name} {value}" for name, value in options.items())
            parts.append(" ".join(["weighted by", weighting.name, *settings]))
        return f"{self.loss.name} ({', '.join(parts)})" if parts else self.loss.name


def _with_options(names: Sequence[str], options: dict[str, Any]) -> list[tuple[PreferenceWeighting, dict[str, Any]]]:
    """The weightings, each with all of its options."""
    entries = [preference_weightings.find(name) for name in names]
    if len(set(names)) < len(names):
        repeated = max(names, key=list(names).count)
        raise ValueError(f"the weighting {repeated!r} is named twice, which would square it")
    known = sorted({option for entry in entries for option in entry.options})
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "no weighting is on"
            raise ValueError(f"unknown weighting option {option!r}: {takes}{nearest(option, known)}")
    resolved = []
    for entry in entries:
        own = {name: options[name] for name in entry.options if name in options}
        entry.check_options(own)
        resolved.append((entry, {**entry.options, **own}))
    return resolved


@preference_weighting("wpo", needs_policy_weights=True)
def wpo(scores: PreferenceScores, *, max_weight: float | None = 1.0) -> Tensor:
    """WPO: weight a pair by how likely the current policy is to have produced its two responses. [B].

    The product of the two responses' `policy_weight`, each `exp(mean_t(log p(y_t) - log sum_v p(v)^2))`, clamped at
    `max_weight` as the authors do (None for no clamp, TRL's form). Zhou et al. 2024, arXiv 2406.11827, equation 2.
    """
    if scores.chosen_policy_weight is None or scores.rejected_policy_weight is None:
        raise ValueError("wpo reads chosen_policy_weight and rejected_policy_weight, and there are none")
    weights = (scores.chosen_policy_weight * scores.rejected_policy_weight).detach()
    if max_weight is not None and not max_weight > 0:
        raise ValueError(f"max_weight must be positive, got {max_weight}; None does not clamp")
    return weights if max_weight is None else weights.clamp(max=max_weight)


@preference_weighting("confidence", normalize=True)
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
    if not floor >= 0:
        raise ValueError(f"floor must not be negative, got {floor}")
    values = scores.columns[column].detach()
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError(
            f"the column {column!r} holds values that are negative or not finite: they cannot weight a loss"
        )
    return values.pow(power).clamp(min=floor)
