"""Reward ensembles: aggregation over members, and the calibration that makes their scores comparable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Aggregate = Literal["mean", "min", "mean_minus_std", "uwo", "quantile"]
AGGREGATES: tuple[str, ...] = get_args(Aggregate)
DEFAULT_COEFFICIENTS = {"mean_minus_std": 1.0, "uwo": 0.5}


def combine(
    scores: Tensor,
    aggregate: Aggregate = "mean",
    *,
    coefficient: float | None = None,
    quantile: float = 0.25,
    ddof: int = 0,
) -> Tensor:
    """Combine the scores of K members into one reward per completion.

    `mean`; `min`, the worst case; `uwo`, uncertainty-weighted: mean minus coefficient times *variance*;
    `mean_minus_std`, a lower confidence bound: mean minus coefficient times standard deviation; `quantile` over the
    members, linearly interpolated. Coste et al. 2023, arXiv 2310.02743, section 3, defines the mean, the worst case
    and the uncertainty-weighted form; its code uses the sample variance in PPO and the population's in best-of-n.

    Args:
        scores: members' scores, [K, N]; a NaN makes its completion's reward NaN.
        aggregate: as above.
        coefficient: at least 0; the default is 0.5 for `uwo` and 1 for `mean_minus_std`. Other aggregates use none.
        quantile: in [0, 1].
        ddof: 0 for the variance of the population of members, 1 for the sample's.

    Returns:
        Rewards, [N].

    Raises:
        ValueError: a shape, a name or a value is invalid.
    """
    if scores.ndim != 2 or not len(scores):
        raise ValueError(f"scores must have the shape [members, completions], got {list(scores.shape)}")
    coefficient = _coefficient(aggregate, coefficient, quantile, ddof, len(scores))
    if aggregate == "mean":
        return scores.mean(dim=0)
    if aggregate == "min":
        return scores.min(dim=0).values
    if aggregate == "quantile":
        return scores.quantile(quantile, dim=0)
    variance = scores.var(dim=0, correction=ddof)
    return scores.mean(dim=0) - coefficient * (variance if aggregate == "uwo" else variance.sqrt())


def _coefficient(aggregate: str, given: float | None, quantile: float, ddof: int, members: int) -> float | None:
    """Check the settings of an aggregate, and return the coefficient to use."""
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)}, got {aggregate!r}")
    default = DEFAULT_COEFFICIENTS.get(aggregate)
    if given is not None and (default is None or not 0 <= given < math.inf):
        raise ValueError(f"coefficient must be at least 0, and is read by mean_minus_std and uwo alone, got {given}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie in [0, 1], got {quantile}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (population) or 1 (sample), got {ddof}")
    if default is not None and members <= ddof:
        raise ValueError(f"{aggregate} with ddof={ddof} needs at least {ddof + 1} members, got {members}")
    return default if given is None else given


class RewardEnsemble:
    """A reward function for TRL's trainers that aggregates several rewards.

    Different reward models share neither a zero nor a scale, so call `calibrate` before taking their minimum, mean or
    spread. If any member cannot score a completion (None), its reward is None. If a member returns a number that is
    not finite, the reward is NaN, which the trainer reports.

    Args:
        members: `RewardModel`s, or any synchronous functions with TRL's reward signature.
        aggregate, coefficient, quantile, ddof: as for `combine`.

    Attributes:
        members: as above.
        names: the members' names, numbered where they collide.
        shifts, scales: for each member, the value subtracted from its scores and the divisor applied afterwards.

    Raises:
        ValueError: no members, or settings as for `combine`.
    """

    def __init__(
        self,
        members: Sequence[Callable[..., Sequence[float | None]]],
        *,
        aggregate: Aggregate = "mean",
        coefficient: float | None = None,
        quantile: float = 0.25,
        ddof: int = 0,
    ):
        self.members = list(members)
        if not self.members:
            raise ValueError("an ensemble needs at least one member")
        self.coefficient = _coefficient(aggregate, coefficient, quantile, ddof, len(self.members))
        self.aggregate, self.quantile, self.ddof = aggregate, quantile, ddof
        self.names = _member_names(self.members)
        self.shifts = [0.0] * len(self.members)
        self.scales = [1.0] * len(self.members)
        self.calibrated_on = 0
        self.__name__ = "ensemble"

    def calibrate(
        self, prompts: Sequence, completions: Sequence, finished: Sequence[bool] | None = None, **columns: Any
    ) -> RewardEnsemble:
        """Shift and scale every member to mean 0 and population standard deviation 1 on these completions.

        Replaces any earlier calibration. `columns` are passed on to the members.

        Raises:
            ValueError: a member cannot score a completion, or scores all alike.
        """
        raw = self._raw_scores(prompts, completions, finished, **columns).double()
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

    def member_scores(
        self, prompts: Sequence, completions: Sequence, finished: Sequence[bool] | None = None, **kwargs: Any
    ) -> Tensor:
        """Calibrated scores of the members, float32, [K, N]; NaN for no score, infinite for a non-finite score."""
        raw = self._raw_scores(prompts, completions, finished, **kwargs).double()
        shifts, scales = (torch.tensor(values).double()[:, None] for values in (self.shifts, self.scales))
        return ((raw - shifts) / scales).float()

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        finished: Sequence[bool] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """TRL's reward signature; all arguments are passed on to the members.

        Logs each member's scores as the column `reward/<name>` and their mean as `rewards/<name>/mean`, calibrated
        if the ensemble is. Logs the standard deviation over members, averaged over completions, as `ensemble_std`;
        its growth during training is the first sign of over-optimisation.
        """
        hooks = {"log_extra": log_extra, "log_metric": log_metric}
        kwargs |= {name: hook for name, hook in hooks.items() if hook is not None}
        scores = self.member_scores(prompts, completions, finished, **kwargs)
        for name, values in zip(self.names, scores, strict=True):
            known = values[values.isfinite()]
            if log_extra is not None:
                log_extra(f"reward/{name}", _none_for_nan(values))
            if log_metric is not None and len(known):
                log_metric(f"rewards/{name}/mean", known.mean().item())
        complete = scores[:, scores.isfinite().all(dim=0)]
        if log_metric is not None and complete.numel():
            deviations = complete.std(dim=0, correction=min(self.ddof, len(scores) - 1))
            log_metric("ensemble_std", deviations.mean().item())
        settings = {"coefficient": self.coefficient, "quantile": self.quantile, "ddof": self.ddof}
        rewards = _none_for_nan(combine(scores, self.aggregate, **settings))
        return [math.nan if fault else reward for reward, fault in zip(rewards, scores.isinf().any(0), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Settings, members and calibration, for a JSON file."""
        members = [
            {
                "name": name,
                "source": str(getattr(member, "folder", type(member).__name__)),
                "shift": shift,
                "scale": scale,
            }
            for name, member, shift, scale in zip(self.names, self.members, self.shifts, self.scales, strict=True)
        ]
        settings = {name: getattr(self, name) for name in ("aggregate", "coefficient", "quantile", "ddof")}
        return {**settings, "calibrated_on": self.calibrated_on, "members": members}

    def _raw_scores(self, prompts, completions, finished, **kwargs) -> Tensor:
        # Reward functions written for TRL do not expect the flags, so they are passed only if given.
        if finished is not None:
            kwargs["finished"] = finished
        rows = []
        for name, member in zip(self.names, self.members, strict=True):
            values = member(prompts=prompts, completions=completions, **kwargs)
            rows.append(as_tensor(values, len(completions), f"member {name}"))
        return torch.stack(rows).float()


def _member_names(members: Sequence) -> list[str]:
    """The members' names; from the second on, equal ones are numbered, around names that are taken."""
    own = [getattr(member, "__name__", type(member).__name__) for member in members]
    names: list[str] = []
    for name in own:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        names.append(name if name not in names else next(free for free in numbered if free not in (*own, *names)))
    return names


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
