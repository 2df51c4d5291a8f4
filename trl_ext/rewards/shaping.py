"""Reward shaping: any reward function, reward model or ensemble, followed by steps that centre or clip its rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from trl_ext.files import parse_json
from trl_ext.names import nearest
from trl_ext.rewards.ensemble import as_tensor

STEPS = ("center_reference", "clip")


class ShapedReward:
    """A reward function with TRL's signature that applies steps, in order, to the rewards of another.

    `center_reference` subtracts the mean reward of reference responses, which `calibrate` computes (Eisenstein et al.
    2023, arXiv 2312.09244). `{"kind": "clip", "limit": L}` clips to [-L, L] (Ziegler et al. 2019, arXiv 1909.08593).

    A missing reward (None) stays None, and a number that is not finite stays as it is, for the trainer to report. The
    name in metrics is the inner name followed by the steps, `reward-model+center_reference+clip`; the mean before
    shaping is logged as `rewards/<inner name>/mean`.

    Args:
        reward: a function with TRL's signature, a `RewardModel` or a `RewardEnsemble`.
        steps: names of steps, or objects with `kind` and settings; ValueError if one is not known.
    """

    def __init__(self, reward: Callable, steps: Sequence[dict[str, Any] | str]):
        self.reward = reward
        self.steps = [_read_step(step) for step in steps]
        self.inner_name = getattr(reward, "__name__", type(reward).__name__)
        self.__name__ = "+".join([self.inner_name, *(step["kind"] for step in self.steps)])

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate` must be called before the first score."""
        return any(step.get("value", 0.0) is None for step in self.steps)

    def __call__(self, prompts: Sequence, completions: Sequence, **columns: Any) -> list[float | None]:
        """Shaped rewards; TRL's reward signature."""
        if self.needs_calibration:
            raise ValueError("center_reference has no value: calibrate it on reference responses")
        rewards = self._score(prompts, completions, columns)
        known, log_metric = rewards[rewards.isfinite()], columns.get("log_metric")
        if log_metric is not None and len(known):
            log_metric(f"rewards/{self.inner_name}/mean", known.mean().item())
        return [None if math.isnan(reward) else _shaped(reward, self.steps) for reward in rewards.tolist()]

    def calibrate(self, prompts: Sequence, completions: Sequence, **columns: Any) -> ShapedReward:
        """Set the value of each `center_reference` to the mean reward of these responses before that step."""
        rewards = self._score(prompts, completions, columns)
        known = rewards[rewards.isfinite()]
        for index, step in enumerate(self.steps):
            if step["kind"] == "center_reference":
                before = [_shaped(reward, self.steps[:index]) for reward in known.tolist()]
                step["value"] = known.new_tensor(before).mean().item()
        return self

    def _score(self, prompts: Sequence, completions: Sequence, columns: dict[str, Any]) -> Tensor:
        rewards = self.reward(prompts=prompts, completions=completions, **columns)
        return as_tensor(rewards, len(completions), "the reward")

    def to_dict(self) -> dict[str, Any]:
        """Name, reward and steps with their settings and values, for a JSON file."""
        return {"name": self.__name__, "reward": self.inner_name, "steps": self.steps}


def innermost(reward: Any) -> Any:
    """The reward inside any shaping; a reward without shaping is returned as it is."""
    return reward.reward if isinstance(reward, ShapedReward) else reward


def parse_shaping(text: str) -> list[dict[str, Any] | str]:
    """The steps of a `ShapedReward` that a JSON text lists; ValueError names a wrong step and its setting."""
    try:
        found = parse_json(text)
        if not isinstance(found, list) or not found:
            raise ValueError('give a list of steps, such as ["center_reference", {"kind": "clip", "limit": 5}]')
        for entry in found:
            _read_step(entry)
        return found
    except ValueError as error:
        raise ValueError(f"reward_shaping: {error}") from None


def _read_step(entry: Any) -> dict[str, Any]:
    step = dict(entry) if isinstance(entry, dict) else {"kind": entry}
    kind, limit = step.get("kind"), step.get("limit")
    if step == {"kind": "center_reference"}:
        return {**step, "value": None}
    if kind == "clip" and step.keys() == {"kind", "limit"} and isinstance(limit, (int, float)) and limit > 0:
        return step
    if kind in STEPS:
        raise ValueError(f"{kind}: clip has one setting, a positive limit, and center_reference has none: {entry}")
    raise ValueError(f"unknown kind {kind!r}{nearest(str(kind), [*STEPS])} Known: {', '.join(STEPS)}")


def _shaped(reward: float, steps: Sequence[dict[str, Any]]) -> float:
    # A fault stays to be seen.
    for step in steps if math.isfinite(reward) else ():
        is_clip = step["kind"] == "clip"
        reward = min(max(reward, -step["limit"]), step["limit"]) if is_clip else reward - step["value"]
    return reward
