"""Reward shaping: any reward function, reward model or ensemble, followed by a sequence of steps.

A step maps this process's rewards of one batch, [N], to rewards of the same shape. NaN marks a response without a
reward; it stays NaN and enters no statistic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from trl_ext.files import brief, parse_json
from trl_ext.names import nearest
from trl_ext.rewards.ensemble import as_tensor

EPSILON = 1e-8
# Settings are checked when a step is created: bools and infinities are not accepted as numbers.
settings = dataclass(config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


class Moments(NamedTuple):
    """Statistics of a batch's rewards over all processes. Without rewards, lowest is inf and highest is -inf."""

    count: float
    total: float
    squares: float
    lowest: float
    highest: float


@dataclasses.dataclass
class Batch:
    """What a step may know of a batch.

    Attributes:
        completion_ids: the responses as token ids; None if the caller does not give them.
        learns: whether running statistics include this batch. If not, every process holds the whole batch, and its
            statistics are not summed over processes.
    """

    completion_ids: Sequence[Sequence[int]] | None = None
    learns: bool = True

    def moments(self, rewards: Tensor) -> Moments:
        known = rewards[rewards.isfinite()].double()
        own = [float(len(known)), known.sum().item(), known.square().sum().item()]
        own += [known.min().item(), known.max().item()] if len(known) else [math.inf, -math.inf]
        *sums, lowest, highest = zip(*(_of_all_ranks(own) if self.learns else [own]), strict=True)
        return Moments(*map(math.fsum, sums), min(lowest), max(highest))


class Step:
    """A shaping step; its fields are its settings.

    Attributes:
        kind: its name in settings and metrics.
        of_batch: whether a response's reward depends on other responses scored with it.
    """

    kind: ClassVar[str]
    of_batch: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def state(self) -> dict[str, float]:
        """What the step has learned: the fields that are not settings and have a value."""
        learned = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.init}
        return {name: value for name, value in learned.items() if value is not None}


@settings
class Center(Step):
    """Subtracts the running mean of all rewards so far, this batch included."""

    kind = "center"
    of_batch = True
    count: float = field(default=0.0, init=False)
    mean: float = field(default=0.0, init=False)

    def __call__(self, rewards, batch):
        found = batch.moments(rewards)
        if batch.learns and found.count:
            self.mean += (found.total / found.count - self.mean) * found.count / (self.count + found.count)
            self.count += found.count
        return rewards - self.mean


@settings
class CenterReference(Step):
    """Subtracts the mean reward of reference responses (Eisenstein et al. 2023, arXiv 2312.09244).

    `ShapedReward.calibrate` computes the mean.
    """

    kind = "center_reference"
    value: float | None = field(default=None, init=False)

    def __call__(self, rewards, batch):
        if self.value is None:
            raise ValueError("center_reference has no value: calibrate it on reference responses")
        return rewards - self.value


@settings
class Whiten(Step):
    """`(r - mean) / (std + 1e-8)` over the batch of all processes; 0 for a batch without spread.

    Attributes:
        ddof: 0 for the population's standard deviation, 1 for the sample's.
    """

    kind = "whiten"
    of_batch = True
    ddof: Literal[0, 1]

    def __call__(self, rewards, batch):
        found = batch.moments(rewards)
        if not found.lowest < found.highest:
            # With rounding, the mean of equal rewards can differ from them.
            return rewards - rewards
        mean = found.total / found.count
        # Square the deviations: for large rewards with small differences, sums of squares lose precision.
        squares = batch.moments(rewards - mean).squares
        return (rewards - mean) / (math.sqrt(squares / (found.count - self.ddof)) + EPSILON)


@settings
class Clip(Step):
    """Clips rewards to [-limit, limit] (Ziegler et al. 2019, arXiv 1909.08593)."""

    kind = "clip"
    limit: Annotated[float, Field(gt=0)]

    def __call__(self, rewards, batch):
        return rewards.clamp(-self.limit, self.limit)


@settings
class LengthPenalty(Step):
    """Subtracts `per_token` for each token beyond the first `free` ones; a negative value rewards length."""

    kind = "length_penalty"
    per_token: float
    free: Annotated[int, Field(ge=0)] = 0

    def __call__(self, rewards, batch):
        if batch.completion_ids is None:
            raise ValueError("reward shaping: length_penalty counts tokens, and the caller gives no completion_ids")
        lengths = torch.tensor([len(ids) for ids in batch.completion_ids], dtype=torch.float64)
        return rewards - self.per_token * (lengths - self.free).clamp(min=0)


STEPS: dict[str, type[Step]] = {step.kind: step for step in Step.__subclasses__()}


class ShapedReward:
    """A reward function with TRL's signature that applies steps, in order, to the rewards of another.

    A missing reward (None) stays None, and a number that is not finite stays as it is, for the trainer to report. The
    name in metrics is the inner name followed by the steps, `reward-model+whiten+clip`; the mean before shaping is
    logged as `rewards/<inner name>/mean`.

    Statistics are summed over all processes by a collective operation in every call, so every process must call the
    reward equally often, as TRL's rollouts do. If the inner reward raises on one process, that process takes part
    with no rows and then raises, so that no other process waits.

    Args:
        reward: a function with TRL's signature, a `RewardModel` or a `RewardEnsemble`.
        steps: steps of this module, or their settings: see `parse_shaping`.

    Attributes:
        scores_groups: whether a response's reward depends on other responses scored with it or before it.

    Raises:
        ValueError: there are no steps, settings are invalid, or the reward is shaped already.
    """

    def __init__(self, reward: Callable, steps: Sequence[Step | dict[str, Any] | str]):
        if isinstance(reward, ShapedReward):
            raise ValueError("the reward is shaped already: give all steps to one ShapedReward")
        self.reward = reward
        self.steps = [step if isinstance(step, Step) else build_step(step) for step in steps]
        if not self.steps:
            raise ValueError("reward shaping needs at least one step")
        self.scores_groups = any(step.of_batch for step in self.steps)
        self.inner_name = getattr(reward, "__name__", type(reward).__name__)
        self.__name__ = "+".join([self.inner_name, *(step.kind for step in self.steps)])

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate` must be called before the first score."""
        return any(isinstance(step, CenterReference) and step.value is None for step in self.steps)

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Shaped rewards; TRL's reward signature."""
        columns = kwargs if log_metric is None else {"log_metric": log_metric, **kwargs}
        try:
            raw = self._score(prompts, completions, columns)
        except Exception:
            self._shape(torch.empty(0), Batch([]))
            raise
        known = raw[raw.isfinite()]
        if log_metric is not None and len(known):
            log_metric(f"rewards/{self.inner_name}/mean", known.mean().item())
        shaped = self._shape(raw, Batch(kwargs.get("completion_ids")))
        # None for missing rewards, and the original values that were not finite: no step may hide them.
        pairs = zip(raw.tolist(), shaped.tolist(), strict=True)
        return [None if math.isnan(given) else given if math.isinf(given) else value for given, value in pairs]

    def calibrate(self, prompts: Sequence, completions: Sequence, **columns: Any) -> ShapedReward:
        """Set the value of each `center_reference` to the mean reward of these responses before that step.

        Raises:
            ValueError: none of the responses has a reward.
        """
        rewards = self._score(prompts, completions, columns)
        batch = Batch(columns.get("completion_ids"), learns=False)
        for step in self.steps:
            if isinstance(step, CenterReference) and step.value is None:
                known = rewards[rewards.isfinite()]
                if not len(known):
                    raise ValueError("center_reference: no reference response has a reward")
                step.value = known.mean().item()
            if not self.needs_calibration:
                break
            rewards = step(rewards, batch)
        return self

    def state_dict(self) -> dict[str, Any]:
        """The state of the steps, ready for JSON; equal on all processes."""
        return {"steps": [{"kind": step.kind, **step.state()} for step in self.steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`.

        Raises:
            ValueError: the state belongs to other steps.
        """
        saved, own = [entry["kind"] for entry in state["steps"]], [step.kind for step in self.steps]
        if saved != own:
            raise ValueError(f"the saved state is of the shaping {'+'.join(saved)}, and this one is {'+'.join(own)}")
        for step, entry in zip(self.steps, state["steps"], strict=True):
            for name in entry.keys() - {"kind"}:
                setattr(step, name, float(entry[name]))

    def to_dict(self) -> dict[str, Any]:
        """Name, reward and steps with their settings and state, for a JSON file."""
        steps = [{"kind": step.kind, **dataclasses.asdict(step)} for step in self.steps]
        return {"name": self.__name__, "reward": self.inner_name, "steps": steps}

    def _score(self, prompts: Sequence, completions: Sequence, columns: dict[str, Any]) -> Tensor:
        rewards = self.reward(prompts=prompts, completions=completions, **columns)
        return as_tensor(rewards, len(completions), "the reward")

    def _shape(self, rewards: Tensor, batch: Batch) -> Tensor:
        for step in self.steps:
            rewards = step(rewards, batch)
        return rewards


def innermost(reward: Any) -> Any:
    """The reward inside any shaping; a reward without shaping is returned as it is."""
    return reward.reward if isinstance(reward, ShapedReward) else reward


def parse_shaping(text: str) -> list[Step]:
    """Build the steps listed in a JSON text, in order.

    Each step is a name, such as `"center"`, or an object with `kind` and settings, such as
    `{"kind": "clip", "limit": 5}`.

    Raises:
        ValueError: the text is not a list of steps; the message names the step and the setting.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f'reward_shaping: {error}; give a list such as ["center", {{"kind": "clip", "limit": 5}}]'
        ) from None
    if not isinstance(found, list) or not found:
        raise ValueError(f"reward_shaping must be a list of steps, got {brief(text)}")
    return [build_step(entry, f"reward_shaping, step {number}") for number, entry in enumerate(found, start=1)]


def build_step(entry: Any, where: str = "reward_shaping") -> Step:
    """Build a step from its name or its settings; `where` begins the message of a ValueError."""
    entry = {"kind": entry} if isinstance(entry, str) else entry
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in STEPS:
        known = ", ".join(STEPS)
        raise ValueError(f"{where}: unknown kind {brief(repr(kind))}{nearest(str(kind), [*STEPS])} Known: {known}")
    try:
        return STEPS[kind](**{name: value for name, value in entry.items() if name != "kind"})
    except ValidationError as error:
        # A misspelled setting comes last, and explains a missing one.
        fault = error.errors(include_url=False)[-1]
        takes = ", ".join(field.name for field in dataclasses.fields(STEPS[kind]) if field.init) or "no settings"
        raise ValueError(f"{where}: {kind}: {fault['loc'][0]}: {brief(fault['msg'])} (it takes {takes})") from None


def _of_all_ranks(numbers: list[float]) -> list[list[float]]:
    """Gather numbers from all processes in rank order, so that sums are identical on all of them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [numbers]
    from accelerate.utils import gather_object

    return gather_object([numbers])
