"""A reward with steps of shaping behind it, in order: any reward function, reward model or ensemble."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_ext.files import brief, parse_json
from trl_ext.registry import nearest
from trl_ext.rewards.shaping_steps import STEPS, Batch, CenterReference, Step, settings_of

REFERENCE_COLUMN = "reference_response_text"


class ShapedReward:
    """A reward function whose rewards go through steps, the first one first.

    It has TRL's signature, and what it is given reaches the reward inside as it is. A response without a reward (None)
    stays one; a number that is not finite is handed on as it is, for the trainer to report; and so it is where the
    reference response to subtract has no reward, or no finite one. The name in metrics is the inner name with the
    steps behind it, `reward-model+whiten+clip`; the mean before shaping is logged under the inner name, as
    `rewards/<name>/mean`.

    A reward function sees the rows of its own process. The statistics of a batch and running ones are summed over all
    processes, by a collective operation in every call: each process must call it equally often, which TRL's rollouts
    do. A process whose inner reward raises, of responses or of references, takes part with no rows before it raises,
    so that none waits for it; calls for its single rows that follow, as a trainer makes to find the bad one, go by the
    statistics of that batch. One whose reward is interrupted, at a time limit, does not take part.

    Args:
        reward: a function with TRL's signature, a `RewardModel`, a `RewardEnsemble`, or another shaped reward.
        steps: of `trl_ext.rewards.shaping_steps`, or as settings: see `parse_shaping`.
        name: None for the one above.

    Raises:
        ValueError: no steps, settings that are none, an asynchronous reward, or references of each prompt for a
            reward that depends on a batch.
    """

    def __init__(self, reward: Callable, steps: Sequence[Step | dict[str, Any] | str], *, name: str | None = None):
        if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
            raise ValueError("reward shaping takes a reward that returns numbers, and this one is asynchronous")
        self.reward = reward
        self.steps = [step if isinstance(step, Step) else build_step(step) for step in steps]
        if not self.steps:
            raise ValueError("reward shaping needs at least one step")
        self._per_prompt = any(isinstance(step, CenterReference) and step.per_prompt for step in self.steps)
        if self._per_prompt and getattr(reward, "of_batch", False):
            raise ValueError(
                "center_reference: per_prompt scores references apart from the batch, and the reward inside depends "
                "on its batch: give its steps to this shaping, behind center_reference"
            )
        self.inner_name = getattr(reward, "__name__", type(reward).__name__)
        self.__name__ = name or "+".join([self.inner_name, *(step.kind for step in self.steps)])
        self._reference_rewards: dict[str, float] = {}
        # Numbers of all processes of a batch that failed, for the calls that follow for its rows by themselves.
        self._failed: tuple[int, list[list[list[float]]]] | None = None

    @property
    def of_batch(self) -> bool:
        """Whether a response's reward depends on which others are scored with it, or before it."""
        return any(step.of_batch for step in self.steps) or getattr(self.reward, "of_batch", False)

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate` must be called before the first score."""
        return any(isinstance(step, CenterReference) and step.needs_calibration for step in self.steps)

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Shaped rewards, by TRL's signature of a reward function."""
        given = {"prompts": prompts, "completions": completions, **kwargs}
        if log_metric is not None and _takes(self.reward, "log_metric"):
            given["log_metric"] = log_metric
        if self._failed is not None and len(completions) == 1:
            return self._single_row(given)
        self._failed = None
        try:
            raw, references = self._score(given)
        except Exception:
            self._take_part_without_rows(len(completions))
            raise
        known = raw[raw.isfinite()]
        if log_metric is not None and len(known):
            log_metric(f"rewards/{self.inner_name}/mean", known.mean().item())
        return self._finish(raw, Batch(_of_all_ranks, kwargs.get("completion_ids"), references))

    def calibrate(self, prompts: Sequence, completions: Sequence, **columns: Any) -> ShapedReward:
        """Set the value of each `center_reference` without one: the mean reward of these responses, at its place.

        Raises:
            ValueError: none of the responses has a reward.
        """
        rewards = _as_tensor(self.reward(prompts=prompts, completions=completions, **columns), len(completions))
        batch = Batch(lambda numbers: [numbers], columns.get("completion_ids"), learns=False)
        for step in self.steps:
            step.calibrate(rewards)
            if not self.needs_calibration:
                break
            rewards = step(rewards, batch)
        return self

    def state_dict(self) -> dict[str, Any]:
        """What the steps have learnt, ready for JSON; equal on all processes."""
        state: dict[str, Any] = {"steps": [{"kind": step.kind, **step.state()} for step in self.steps]}
        if isinstance(self.reward, ShapedReward):
            state["inner"] = self.reward.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`.

        Raises:
            ValueError: it is of other steps.
        """
        saved, own = ([entry["kind"] for entry in state["steps"]], [step.kind for step in self.steps])
        if saved != own or ("inner" in state) != isinstance(self.reward, ShapedReward):
            raise ValueError(f"the saved state is of the shaping {'+'.join(saved)}, and this one is {'+'.join(own)}")
        for step, entry in zip(self.steps, state["steps"], strict=True):
            step.load_state(entry)
        if "inner" in state:
            self.reward.load_state_dict(state["inner"])

    def to_dict(self) -> dict[str, Any]:
        """Name, reward and steps with their settings, for a JSON file."""
        return {"name": self.__name__, "reward": self.inner_name, "steps": [settings_of(step) for step in self.steps]}

    def _score(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Rewards before shaping, and those of the references where a step subtracts them."""
        raw = _as_tensor(self.reward(**given), len(given["completions"]))
        return raw, self._references(given) if self._per_prompt else None

    def _finish(self, raw: Tensor, batch: Batch) -> list[float | None]:
        if batch.references is not None:
            raw = torch.where(raw.isfinite() & ~batch.references.isfinite(), batch.references, raw)
        return _as_list(raw, self._shape(raw, batch))

    def _shape(self, rewards: Tensor, batch: Batch) -> Tensor:
        for step in self.steps:
            rewards = step(rewards, batch)
        return rewards

    def _take_part_without_rows(self, count: int) -> None:
        gathered: list[list[list[float]]] = []

        def remember(numbers: list[float]) -> list[list[float]]:
            gathered.append(_of_all_ranks(numbers))
            return gathered[-1]

        self._shape(torch.empty(0), Batch(remember, [], torch.empty(0)))
        self._failed = count, gathered

    def _single_row(self, given: dict[str, Any]) -> list[float | None]:
        """One row of a batch that failed, by the batch's statistics and without a collective operation."""
        left, gathered = self._failed
        self._failed = (left - 1, gathered) if left > 1 else None
        raw, references = self._score(given)
        remembered = iter(gathered)
        ids = given.get("completion_ids")
        return self._finish(raw, Batch(lambda numbers: next(remembered), ids, references, learns=False))

    def _references(self, given: dict[str, Any]) -> Tensor:
        """Rewards of the reference response to each prompt, each scored once."""
        texts = given.get(REFERENCE_COLUMN)
        if texts is None:
            raise ValueError(f"center_reference: per_prompt needs the column {REFERENCE_COLUMN} in the prompts")
        keys = [json.dumps([prompt, text]) for prompt, text in zip(given["prompts"], texts, strict=True)]
        missing = {key: index for index, key in enumerate(keys) if key not in self._reference_rewards}
        if missing:
            rows = list(missing.values())
            messages = not isinstance(given["prompts"][0], str)
            found = self.reward(
                prompts=[given["prompts"][row] for row in rows],
                completions=[[{"role": "assistant", "content": texts[r]}] if messages else texts[r] for r in rows],
            )
            rewards = _as_tensor(found, len(rows)).tolist()
            self._reference_rewards.update(zip(missing, rewards, strict=True))
        return torch.tensor([self._reference_rewards[key] for key in keys], dtype=torch.float64)


def innermost(reward: Any) -> Any:
    """The reward inside of any shaping; what is not shaped itself."""
    while isinstance(reward, ShapedReward):
        reward = reward.reward
    return reward


def parse_shaping(text: str) -> list[Step]:
    """The steps that a JSON text names, in order.

    Each is a name, as `"sigmoid"`, or an object with `kind` and settings, as `{"kind": "clip", "limit": 5}`.

    Raises:
        ValueError: it is not a list of steps; the message names the step and the setting.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f'reward_shaping: {error}; give a list such as ["center", {{"kind": "clip", "limit": 5}}]'
        ) from None
    if not isinstance(found, list) or not found:
        raise ValueError(f"reward_shaping must be a list of steps, got {brief(text)}")
    return [build_step(entry, number) for number, entry in enumerate(found, start=1)]


def build_step(entry: Any, number: int | None = None) -> Step:
    """A step from its name or its settings; `number` is its place, for messages.

    Raises:
        ValueError: an unknown kind or setting, a setting that is missing, or a value out of range.
    """
    where = "reward_shaping" if number is None else f"reward_shaping, step {number}"
    entry = {"kind": entry} if isinstance(entry, str) else entry
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in STEPS:
        known = ", ".join(STEPS)
        raise ValueError(f"{where}: unknown kind {brief(repr(kind))}{nearest(str(kind), [*STEPS])} Known: {known}")
    fields = {field.name: field for field in dataclasses.fields(STEPS[kind]) if field.init}
    given = {name: value for name, value in entry.items() if name != "kind"}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(f"{where}: {kind} has no {brief(name)!r}: it takes {', '.join(fields) or 'no settings'}")
        _check_type(where, kind, name, value, str(fields[name].type))
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given]
    if required:
        raise ValueError(f"{where}: {kind} needs {', '.join(required)}")
    try:
        return STEPS[kind](**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_type(where: str, kind: str, name: str, value: Any, wanted: str) -> None:
    if value is None and "None" in wanted:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if wanted.startswith("bool"):
        fits, what = isinstance(value, bool), "true or false"
    elif wanted.startswith("int"):
        fits, what = is_number and isinstance(value, int), "a whole number"
    else:
        fits, what = is_number, "a number"
    if not fits:
        raise ValueError(f"{where}: {kind}: {name} must be {what}, got {brief(repr(value))}")


def _of_all_ranks(numbers: list[float]) -> list[list[float]]:
    """The numbers of each process of the run, in the order of their ranks, so that sums have the same bits on all."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [numbers]
    from accelerate.utils import gather_object

    return gather_object([numbers])


def _takes(function: Callable, name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _as_tensor(rewards: Sequence[float | None], count: int) -> Tensor:
    values = [math.nan if value is None else float(value) for value in rewards]
    if len(values) != count:
        raise ValueError(f"the reward returned {len(values)} values for {count} completions")
    # A None and a NaN that the function gave must be told apart afterwards: a fault is infinite from here on.
    return torch.tensor(
        [math.inf if v != v and r is not None else v for v, r in zip(values, rewards, strict=True)],
        dtype=torch.float64,
    )


def _as_list(raw: Tensor, shaped: Tensor) -> list[float | None]:
    """None where there was no reward, and what was not finite as it was: no step may make a number of it."""
    pairs = zip(raw.tolist(), shaped.tolist(), strict=True)
    return [None if math.isnan(given) else given if math.isinf(given) else value for given, value in pairs]
