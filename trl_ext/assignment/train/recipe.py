"""A training run of a specification: its functions, its settings, and the figures available for thresholds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from trl_ext.assignment.catalog.catalog import task
from trl_ext.registry import nearest

# Recipe kind -> catalogue kind of the loss that it trains on.
LOSS_KINDS = {"preference": "preference loss", "reward": "reward model's loss", "policy": "whole loss"}
LOOPS = ("policy_loop", "sft_loop")
_BOTH_LOOPS = ("models.tokenize_prompt_and_output", "models.response_log_probs")
# The catalogue functions that a loop calls.
USED_BY_LOOPS = {
    "sft_loop": (*_BOTH_LOOPS, "course.sft_microbatch_step"),
    "policy_loop": (
        *_BOTH_LOOPS,
        "course.policy_microbatch_step",
        "course.compute_group_normalized_rewards",
        "rewards.parse_gsm8k_response",
    ),
}
_RATE = [f"win_rate.{rule}.{figure}" for rule in ("half", "agreed") for figure in ("rate", "low", "high")]
_POLICY = [*_RATE, "score.policy", *(f"score.gain.{figure}" for figure in ("mean", "low", "high"))]
_LOOP = ["accuracy.after", "accuracy.before"]
# The figures of results.json that thresholds can use, by kind of recipe.
MEASURES = {"preference": _POLICY, "policy": _POLICY, "reward": ["accuracy"], **dict.fromkeys(LOOPS, _LOOP)}


class RecipeSpec(BaseModel):
    """A training run on the student's functions.

    `loss` is the student's preference loss, reward model loss or whole policy loss; for a policy loop it is the
    `loss_type`. `advantage` is the student's advantage. `settings` are fields of the trainer's configuration or of
    `LoopSettings`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["preference", "reward", "policy", "policy_loop", "sft_loop"]
    loss: str = ""
    advantage: str | None = None
    settings: dict[str, Any] = {}


@dataclass
class LoopSettings:
    """Settings of a loop; each is a flag.

    Attributes:
        steps: rollouts, or batches of demonstrations.
        updates: optimizer steps on each rollout.
        batch_size: demonstrations per step.
        prompts, group_size: prompts per rollout, and responses per prompt.
        gradient_accumulation_steps: micro-batches per optimizer step.
    """

    learning_rate: float = 3e-4
    steps: int = 40
    updates: int = 1
    batch_size: int = 32
    prompts: int = 16
    group_size: int = 8
    gradient_accumulation_steps: int = 1
    normalize_by_std: bool = True
    advantage_eps: float = 1e-6
    cliprange: float = 0.2
    seed: int = 0


def used_functions(recipe: RecipeSpec, library: Mapping[str, str]) -> list[str]:
    """The assignment's functions that a recipe trains on; `library` maps each to its name in the catalogue."""
    if recipe.kind in LOOPS:
        return [name for name, known in library.items() if known in USED_BY_LOOPS[recipe.kind]]
    return [name for name in (recipe.loss, recipe.advantage) if name]


def check_recipe(recipe: RecipeSpec, library: Mapping[str, str]) -> None:
    """Check that the loss and the advantage of a recipe are valid for its kind.

    Raises:
        ValueError: one is invalid or missing.
    """
    if recipe.kind == "sft_loop":
        return
    if not recipe.loss:
        raise ValueError(f"a recipe of the kind {recipe.kind!r} needs a loss")
    if recipe.kind == "policy_loop":
        from trl_ext.course import LOSS_TYPES

        _check_known("loss_type", recipe.loss, list(LOSS_TYPES))
        return
    wanted = [(recipe.loss, LOSS_KINDS[recipe.kind]), *([(recipe.advantage, "advantage")] if recipe.advantage else [])]
    for name, kind in wanted:
        if name not in library:
            raise ValueError(f"no function {name!r}{nearest(name, list(library))}")
        own = task(library[name]).kind
        if own != kind:
            raise ValueError(f"{name!r} is of the kind {own!r}, and a {kind} is needed")


def check_measure(measure: str, kind: str) -> None:
    """Check that a run of this kind reports a figure.

    Raises:
        ValueError: it has no figure with that name.
    """
    if not re.fullmatch(r"score\.by_kind\.\w+\.policy", measure):
        _check_known("figure", measure, MEASURES[kind])


def _check_known(what: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ValueError(f"no {what} {name!r}{nearest(name, known)} Known: {', '.join(known)}")


def check_settings(recipes: Mapping[str, RecipeSpec]) -> None:
    """Check that each recipe's trainer has its settings; this imports the trainers.

    Raises:
        ValueError: a setting is invalid.
    """
    for name, recipe in recipes.items():
        known = _settings_of(recipe.kind) if recipe.settings else []
        for setting in recipe.settings:
            if setting not in known:
                raise ValueError(f"recipes.{name}.settings: no setting {setting!r}{nearest(setting, known)}")


def _settings_of(kind: str) -> list[str]:
    if kind in LOOPS:
        return [each.name for each in dataclasses.fields(LoopSettings)]
    import trl_ext

    config = {"preference": "PreferenceConfig", "reward": "RewardConfig", "policy": "PolicyConfig"}[kind]
    return [each.name for each in dataclasses.fields(getattr(trl_ext, config))]
