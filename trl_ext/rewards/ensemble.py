"""Reward ensembles: aggregation over members, and the calibration that makes their scores comparable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trl_ext.names import check_choice

Aggregate = Literal["mean", "min", "mean_minus_std", "uwo", "quantile"]
AGGREGATES: tuple[str, ...] = get_args(Aggregate)
DEFAULT_COEFFICIENTS = {"mean_minus_std": 1.0, "uwo": 0.5}


def combine(
    scores: Tensor, aggregate: Aggregate = "mean", *, coefficient: float | None = None, quantile: float = 0.25
) -> Tensor:
    """Combine the scores of K members, [K, N], into one reward per completion, [N]. NaN stays NaN.

    `mean`; `min`, the worst case; `uwo`, uncertainty-weighted: mean minus coefficient times *variance*;
    `mean_minus_std`, a lower confidence bound: mean minus coefficient times standard deviation; `quantile` over the
    members, linearly interpolated. Variance and standard deviation are those of the population of members. Coste et
    al. 2023, arXiv 2310.02743, section 3, defines the mean, the worst case and the uncertainty-weighted form.

    Args:
        coefficient: at least 0; the default is 0.5 for `uwo` and 1 for `mean_minus_std`. Other aggregates use none.
        quantile: in [0, 1].

    Raises:
        ValueError: a name or a value is invalid.
    """
    coefficient = _coefficient(aggregate, coefficient, quantile)
    if aggregate == "mean":
        return scores.mean(dim=0)
    if aggregate == "min":
        return scores.min(dim=0).values
    if aggregate == "quantile":
        return scores.quantile(quantile, dim=0)
    variance = scores.var(dim=0, correction=0)
    return scores.mean(dim=0) - coefficient * (variance if aggregate == "uwo" else variance.sqrt())


def _coefficient(aggregate: str, given: float | None, quantile: float) -> float | None:
    """Check the settings of an aggregate, and return the coefficient to use."""
    check_choice("aggregate", aggregate, AGGREGATES)
    default = DEFAULT_COEFFICIENTS.get(aggregate)
    if given is not None and (default is None or not 0 <= given < math.inf):
        raise ValueError(f"coefficient must be at least 0, and is read by mean_minus_std and uwo alone, got {given}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie in [0, 1], got {quantile}")
    return default if given is None else given


class RewardEnsemble:
    """A reward function for TRL's trainers that aggregates several rewards.

    Different reward models share neither a zero nor a scale, so call `calibrate` before taking their minimum, mean or
    spread. If any member cannot score a completion (None), its reward is None. If a member returns a number that is
    not finite, the reward is NaN, which the trainer reports.

    Args:
        members: `RewardModel`s, or any synchronous functions with TRL's reward signature.
        aggregate, coefficient, quantile: as for `combine`.

    Attributes:
        names: the members' names, numbered where they collide.
        shifts, scales: for each member, the value subtracted from its scores and the divisor applied afterwards.
    """

    def __init__(
        self,
        members: Sequence[Callable[..., Sequence[float | None]]],
        *,
        aggregate: Aggregate = "mean",
        coefficient: float | None = None,
        quantile: float = 0.25,
    ):
        self.members = list(members)
        if not self.members:
            raise ValueError("an ensemble needs at least one member")
        self.coefficient = _coefficient(aggregate, coefficient, quantile)
        self.aggregate, self.quantile = aggregate, quantile
        self.names: list[str] = []
        for member in self.members:
            name = getattr(member, "__name__", type(member).__name__)
            numbered = (f"{name}-{number}" for number in itertools.count(2))
            self.names.append(next(free for free in itertools.chain([name], numbered) if free not in self.names))
        self.shifts = [0.0] * len(self.members)
        self.scales = [1.0] * len(self.members)
        self.calibrated_on = 0
        self.__name__ = "ensemble"

    def calibrate(self, prompts: Sequence, completions: Sequence, **columns: Any) -> RewardEnsemble:
        """Shift and scale every member to mean 0 and population standard deviation 1 on these completions.

        Replaces any earlier calibration. `columns` are passed on to the members.

        Raises:
            ValueError: a member cannot score a completion, or scores all alike.
        """
        raw = self._raw_scores(prompts, completions, **columns).double()
        for name, scores in zip(self.names, raw, strict=True):
            # Scores that should be equal can differ in the last bits of float32.
            if not scores.std(correction=0) > 1e-6 * max(1.0, scores.abs().max().item()):
                raise ValueError(
                    f"member {name}: its {len(scores)} calibration scores are not finite or all alike, so it has no "
                    "scale; calibrate on other completions"
                )
        self.shifts, self.scales = raw.mean(dim=1).tolist(), raw.std(dim=1, correction=0).tolist()
        self.calibrated_on = len(completions)
        return self

    def member_scores(self, prompts: Sequence, completions: Sequence, **columns: Any) -> Tensor:
        """Calibrated scores of the members, float32, [K, N]; NaN for no score, infinite for a non-finite score."""
        shifts, scales = (torch.tensor(values).double()[:, None] for values in (self.shifts, self.scales))
        return ((self._raw_scores(prompts, completions, **columns).double() - shifts) / scales).float()

    def _raw_scores(self, prompts: Sequence, completions: Sequence, **columns: Any) -> Tensor:
        given = [member(prompts=prompts, completions=completions, **columns) for member in self.members]
        rows = [as_tensor(row, len(completions), f"member {n}") for n, row in zip(self.names, given, strict=True)]
        return torch.stack(rows).float()

    def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float | None]:
        """TRL's reward signature; all arguments are passed on to the members.

        Logs each member's scores, calibrated if the ensemble is, as the column `reward/<name>`, and their mean as
        `rewards/<name>/mean`. `ensemble_std` is the standard deviation over members, averaged over completions; its
        growth during training is the first sign of over-optimisation.
        """
        scores = self.member_scores(prompts, completions, **columns)
        log_extra, log_metric = columns.get("log_extra"), columns.get("log_metric")
        for name, values in zip(self.names, scores, strict=True):
            known = values[values.isfinite()]
            if log_extra is not None:
                log_extra(f"reward/{name}", _none_for_nan(values))
            if log_metric is not None and len(known):
                log_metric(f"rewards/{name}/mean", known.mean().item())
        complete = scores[:, scores.isfinite().all(dim=0)]
        if log_metric is not None and complete.numel():
            log_metric("ensemble_std", complete.std(dim=0, correction=0).mean().item())
        rewards = combine(scores, self.aggregate, coefficient=self.coefficient, quantile=self.quantile)
        faults = scores.isinf().any(0)
        return [math.nan if bad else one for one, bad in zip(_none_for_nan(rewards), faults, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Settings, members and calibration, for a JSON file."""
        settings = {name: getattr(self, name) for name in ("aggregate", "coefficient", "quantile", "calibrated_on")}
        members = [
            {"name": name, "source": str(getattr(member, "folder", name)), "shift": shift, "scale": scale}
            for name, member, shift, scale in zip(self.names, self.members, self.shifts, self.scales, strict=True)
        ]
        return {**settings, "members": members}


def as_tensor(rewards: Sequence[float | None], count: int, source: str) -> Tensor:
    """Rewards in float64, [N]: NaN for None, and infinity for a NaN, so that NaN means only a missing reward.

    Raises:
        ValueError: there are not `count` rewards; the message names the source.
    """
    if len(rewards) != count:
        raise ValueError(f"{source} returned {len(rewards)} rewards for {count} completions")
    values = (math.nan if reward is None else math.inf if math.isnan(reward) else reward for reward in rewards)
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _none_for_nan(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
