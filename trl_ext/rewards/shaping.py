"""Reward shaping: any reward function, reward model or ensemble, followed by a sequence of steps.

A step maps this process's rewards of one batch, [N], to rewards of the same shape. NaN marks a response without a
reward; it stays NaN and enters no statistic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_ext.files import parse_json
from trl_ext.names import nearest
from trl_ext.rewards.ensemble import as_tensor

EPSILON = 1e-8


@dataclass
class Batch:
    """What a step may know of a batch.

    Attributes:
        completion_ids: the responses as token ids; None if the caller does not give them.
        learns: whether running statistics include this batch. If not, every process holds the whole batch.
    """

    completion_ids: Sequence[Sequence[int]] | None = None
    learns: bool = True

    def known(self, rewards: Tensor) -> Tensor:
        """The finite rewards of all processes, in rank order, so that statistics are identical on all of them."""
        own = rewards[rewards.isfinite()].tolist()
        found = itertools.chain.from_iterable(_of_all_ranks(own)) if self.learns else own
        return torch.tensor([*found], dtype=torch.float64)


class Step:
    """A shaping step: a dataclass whose fields are its settings and, with `init=False`, what it has learned.

    `of_batch` says whether a response's reward depends on other responses scored with it or before it.
    """

    kind: ClassVar[str]
    of_batch: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


@dataclass
class Center(Step):
    """Subtracts the running mean of all rewards so far, this batch included."""

    kind = "center"
    of_batch = True
    count: float = field(default=0.0, init=False)
    mean: float = field(default=0.0, init=False)

    def __call__(self, rewards, batch):
        known = batch.known(rewards)
        if batch.learns and len(known):
            self.mean += (known.mean().item() - self.mean) * len(known) / (self.count + len(known))
            self.count += len(known)
        return rewards - self.mean


@dataclass
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


@dataclass
class Whiten(Step):
    """`(r - mean) / (std + 1e-8)` over the batch of all processes; 0 for a batch without spread.

    Attributes:
        ddof: 0 for the population's standard deviation, 1 for the sample's.
    """

    kind = "whiten"
    of_batch = True
    ddof: int

    def __post_init__(self):
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof must be 0 or 1, got {self.ddof!r}")

    def __call__(self, rewards, batch):
        known = batch.known(rewards)
        if not len(known) or known.min() == known.max():
            # With rounding, the mean of equal rewards can differ from them.
            return rewards - rewards
        return (rewards - known.mean()) / (known.std(correction=self.ddof) + EPSILON)


@dataclass
class Clip(Step):
    """Clips rewards to [-limit, limit] (Ziegler et al. 2019, arXiv 1909.08593)."""

    kind = "clip"
    limit: float

    def __post_init__(self):
        if not self.limit > 0:
            raise ValueError(f"limit must be positive, got {self.limit}")

    def __call__(self, rewards, batch):
        return rewards.clamp(-self.limit, self.limit)


@dataclass
class LengthPenalty(Step):
    """Subtracts `per_token` for each token beyond the first `free` ones; a negative value rewards length."""

    kind = "length_penalty"
    per_token: float
    free: int = 0

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
    """

    def __init__(self, reward: Callable, steps: Sequence[Step | dict[str, Any] | str]):
        self.reward = reward
        self.steps = [step if isinstance(step, Step) else build_step(step) for step in steps]
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
        **columns: Any,
    ) -> list[float | None]:
        """Shaped rewards; TRL's reward signature."""
        hooks = {} if log_metric is None else {"log_metric": log_metric}
        try:
            raw = self._score(prompts, completions, **hooks, **columns)
        except Exception:
            self._shape(torch.empty(0), Batch([]))
            raise
        known = raw[raw.isfinite()]
        if log_metric is not None and len(known):
            log_metric(f"rewards/{self.inner_name}/mean", known.mean().item())
        shaped = self._shape(raw, Batch(columns.get("completion_ids")))
        # None for missing rewards, and the original values that were not finite: no step may hide them.
        pairs = zip(raw.tolist(), shaped.tolist(), strict=True)
        return [None if math.isnan(given) else given if math.isinf(given) else value for given, value in pairs]

    def calibrate(self, prompts: Sequence, completions: Sequence, **columns: Any) -> ShapedReward:
        """Set the value of each `center_reference` to the mean reward of these responses before that step."""
        rewards, batch = self._score(prompts, completions, **columns), Batch(columns.get("completion_ids"), False)
        for step in self.steps:
            if isinstance(step, CenterReference):
                step.value = rewards[rewards.isfinite()].mean().item()
            rewards = step(rewards, batch)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Name, reward and steps with their settings and state, ready for JSON; equal on all processes."""
        steps = [{"kind": step.kind, **asdict(step)} for step in self.steps]
        return {"name": self.__name__, "reward": self.inner_name, "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what the steps of a `state_dict` have learned, but not their settings.

        Raises:
            ValueError: the state belongs to other steps.
        """
        saved, own = ("+".join(entry["kind"] for entry in one["steps"]) for one in (state, self.state_dict()))
        if saved != own:
            raise ValueError(f"the saved state is of the shaping {saved}, and this one is {own}")
        for step, entry in zip(self.steps, state["steps"], strict=True):
            for one in fields(step):
                if not one.init:
                    setattr(step, one.name, entry[one.name])

    def _score(self, prompts: Sequence, completions: Sequence, **columns: Any) -> Tensor:
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
        if not isinstance(found, list) or not found:
            raise ValueError('give a list of steps, such as ["center", {"kind": "clip", "limit": 5}]')
        return [build_step(entry) for entry in found]
    except ValueError as error:
        raise ValueError(f"reward_shaping: {error}") from None


def build_step(entry: dict[str, Any] | str) -> Step:
    """Build a step from its name or its settings."""
    settings = {"kind": entry} if isinstance(entry, str) else dict(entry)
    kind = settings.pop("kind", None)
    if kind not in STEPS:
        raise ValueError(f"unknown kind {kind!r}{nearest(str(kind), [*STEPS])} Known: {', '.join(STEPS)}")
    try:
        return STEPS[kind](**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind}: {error}") from None


def _of_all_ranks(rewards: list[float]) -> list[list[float]]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [rewards]
    from accelerate.utils import gather_object

    return gather_object([rewards])
