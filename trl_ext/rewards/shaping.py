"""Reward shaping: any reward function, reward model or ensemble, followed by a sequence of steps."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from trl_ext.files import brief, parse_json
from trl_ext.registry import nearest
from trl_ext.rewards.ensemble import as_tensor
from trl_ext.rewards.shaping_steps import STEPS, Batch, CenterReference, Step, settings_of

REFERENCE_COLUMN = "reference_response_text"


class ShapedReward:
    """A reward function that applies shaping steps, in order, to the rewards of another.

    It has TRL's signature and passes its arguments unchanged to the inner reward. A missing reward (None) stays None,
    and a number that is not finite stays as it is, for the trainer to report. The same holds if the reference response
    to subtract has no reward or no finite one. The name in metrics is the inner name followed by the steps,
    `reward-model+whiten+clip`; the mean before shaping is logged under the inner name, as `rewards/<name>/mean`.

    A reward function sees only the rows of its own process. Batch and running statistics are summed over all processes
    by a collective operation in every call, so every process must call the reward equally often, as TRL's rollouts do.
    If the inner reward raises on one process, that process takes part with no rows and then raises, so that no other
    process waits.

    Args:
        reward: a function with TRL's signature, a `RewardModel` or a `RewardEnsemble`.
        steps: steps of `trl_ext.rewards.shaping_steps`, or their settings: see `parse_shaping`.

    Attributes:
        unshaped: the inner rewards of the latest call, [N], NaN where there is none; None after a call that failed.

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
        self._per_prompt = any(isinstance(step, CenterReference) and step.per_prompt for step in self.steps)
        self.inner_name = getattr(reward, "__name__", type(reward).__name__)
        self.__name__ = "+".join([self.inner_name, *(step.kind for step in self.steps)])
        self._reference_rewards: dict[str, float] = {}
        self.unshaped: Tensor | None = None

    @property
    def of_batch(self) -> bool:
        """Whether a response's reward depends on other responses scored with it or before it."""
        return any(step.of_batch for step in self.steps)

    @property
    def scores_groups(self) -> bool:
        """The same, as trainers ask it: they do not score the rows of a failed batch one by one."""
        return self.of_batch

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
        """Shaped rewards; TRL's reward signature."""
        given = {"prompts": prompts, "completions": completions, **kwargs}
        if log_metric is not None:
            given["log_metric"] = log_metric
        self.unshaped = None
        try:
            raw = as_tensor(self.reward(**given), len(completions), "the reward")
            references = self._references(given) if self._per_prompt else None
        except Exception:
            self._shape(torch.empty(0), Batch(_of_all_ranks, [], torch.empty(0)))
            raise
        self.unshaped = raw
        known = raw[raw.isfinite()]
        if log_metric is not None and len(known):
            log_metric(f"rewards/{self.inner_name}/mean", known.mean().item())
        if references is not None:
            raw = torch.where(raw.isfinite() & ~references.isfinite(), references, raw)
        return _as_list(raw, self._shape(raw, Batch(_of_all_ranks, kwargs.get("completion_ids"), references)))

    def calibrate(self, prompts: Sequence, completions: Sequence, **columns: Any) -> ShapedReward:
        """Set the value of each `center_reference` without one to the mean reward of these responses before that step.

        Raises:
            ValueError: none of the responses has a reward.
        """
        rewards = as_tensor(
            self.reward(prompts=prompts, completions=completions, **columns), len(completions), "the reward"
        )
        batch = Batch(lambda numbers: [numbers], columns.get("completion_ids"), learns=False)
        for step in self.steps:
            step.calibrate(rewards)
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
        saved, own = ([entry["kind"] for entry in state["steps"]], [step.kind for step in self.steps])
        if saved != own:
            raise ValueError(f"the saved state is of the shaping {'+'.join(saved)}, and this one is {'+'.join(own)}")
        for step, entry in zip(self.steps, state["steps"], strict=True):
            step.load_state(entry)

    def to_dict(self) -> dict[str, Any]:
        """Name, reward and steps with their settings, for a JSON file."""
        return {"name": self.__name__, "reward": self.inner_name, "steps": [settings_of(step) for step in self.steps]}

    def _shape(self, rewards: Tensor, batch: Batch) -> Tensor:
        for step in self.steps:
            rewards = step(rewards, batch)
        return rewards

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
            rewards = as_tensor(found, len(rows), "the reward").tolist()
            self._reference_rewards.update(zip(missing, rewards, strict=True))
        return torch.tensor([self._reference_rewards[key] for key in keys], dtype=torch.float64)


def innermost(reward: Any) -> Any:
    """The reward inside any shaping; a reward without shaping is returned as it is."""
    return reward.reward if isinstance(reward, ShapedReward) else reward


def parse_shaping(text: str) -> list[Step]:
    """Build the steps listed in a JSON text, in order.

    Each step is a name, such as `"sigmoid"`, or an object with `kind` and settings, such as
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
    return [build_step(entry, number) for number, entry in enumerate(found, start=1)]


def build_step(entry: Any, number: int | None = None) -> Step:
    """Build a step from its name or its settings; `number` is its position, for messages.

    Raises:
        ValueError: a kind or setting is unknown, a setting is missing, or a value is out of range.
    """
    where = "reward_shaping" if number is None else f"reward_shaping, step {number}"
    entry = {"kind": entry} if isinstance(entry, str) else entry
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in STEPS:
        known = ", ".join(STEPS)
        raise ValueError(f"{where}: unknown kind {brief(repr(kind))}{nearest(str(kind), [*STEPS])} Known: {known}")
    try:
        return STEPS[kind](**{name: value for name, value in entry.items() if name != "kind"})
    except ValidationError as error:
        # Report a misspelled setting first, because it explains a missing one.
        fault = max(error.errors(include_url=False), key=lambda fault: fault["type"] == "unexpected_keyword_argument")
        setting = "".join(f"{name}: " for name in fault["loc"][:1])
        takes = ", ".join(field.name for field in dataclasses.fields(STEPS[kind]) if field.init) or "no settings"
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {kind}: {brief(setting + message, 160)} (it takes {takes})") from None


def _of_all_ranks(numbers: list[float]) -> list[list[float]]:
    """Gather numbers from all processes in rank order, so that sums are identical on all of them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [numbers]
    from accelerate.utils import gather_object

    return gather_object([numbers])


def _as_list(raw: Tensor, shaped: Tensor) -> list[float | None]:
    """Restore None for missing rewards and the original values that were not finite: no step may hide them."""
    pairs = zip(raw.tolist(), shaped.tolist(), strict=True)
    return [None if math.isnan(given) else given if math.isinf(given) else value for given, value in pairs]
