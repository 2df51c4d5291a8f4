"""A training run of a specification: its functions, its settings, and the figures available for thresholds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from trl_ext.assignment.catalog.catalog import task
from trl_ext.course import LOSS_TYPES
from trl_ext.registry import nearest

# Recipe kind -> catalogue kind of the loss that it trains on.
LOSS_KINDS = {"preference": "preference loss", "reward": "reward model's loss", "policy": "whole loss"}
CONFIGS = {"preference": "PreferenceConfig", "reward": "RewardConfig", "policy": "PolicyConfig"}
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
_POLICY = [
    *(f"win_rate.{rule}.{figure}" for rule in ("half", "agreed") for figure in ("rate", "low", "high")),
    "score.policy",
    *(f"score.gain.{figure}" for figure in ("mean", "low", "high")),
]
# The figures of results.json that thresholds can use, by kind of recipe.
MEASURES = {
    "preference": _POLICY,
    "policy": _POLICY,
    "reward": ["accuracy"],
    **dict.fromkeys(USED_BY_LOOPS, ["accuracy.after", "accuracy.before"]),
}


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
    if recipe.kind in USED_BY_LOOPS:
        return [name for name, known in library.items() if known in USED_BY_LOOPS[recipe.kind]]
    return [name for name in (recipe.loss, recipe.advantage) if name]


def check_recipe(name: str, recipe: RecipeSpec, library: Mapping[str, str]) -> None:
    """Check that the loss and the advantage of a recipe are valid for its kind.

    Raises:
        ValueError: one is invalid or missing.
    """
    if recipe.kind == "policy_loop":
        check_known(f"recipes.{name}: no loss_type", recipe.loss, LOSS_TYPES)
    if recipe.kind in USED_BY_LOOPS:
        return
    wanted = {recipe.loss: LOSS_KINDS[recipe.kind]} | ({recipe.advantage: "advantage"} if recipe.advantage else {})
    for function, kind in wanted.items():
        check_known(f"recipes.{name}: no function", function, library)
        own = task(library[function]).kind
        if own != kind:
            raise ValueError(f"recipes.{name}: {function!r} is of the kind {own!r}, and a {kind} is needed")


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Reject an unknown name; the message begins with `what` and ends with the names that are known."""
    if name not in known:
        raise ValueError(f"{what} {name!r}{nearest(name, list(known))} Known: {', '.join(known)}")


def check_settings(recipes: Mapping[str, RecipeSpec]) -> None:
    """Check that each recipe's trainer has its settings; this imports the trainers.

    Raises:
        ValueError: a setting is invalid.
    """
    import trl_ext

    for name, recipe in recipes.items():
        config = getattr(trl_ext, CONFIGS[recipe.kind]) if recipe.kind in CONFIGS else LoopSettings
        known = [each.name for each in dataclasses.fields(config)]
        for setting in recipe.settings:
            if setting not in known:
                raise ValueError(f"recipes.{name}.settings: no setting {setting!r}{nearest(setting, known)}")
