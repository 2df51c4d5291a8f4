"""What a recipe of a specification can name: losses by its kind, figures of its results, settings of its trainer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from trl_ext.assignment.catalog import task
from trl_ext.registry import nearest

# The kind in the catalogue of the loss that a recipe of each kind trains on.
LOSS_KINDS = {"preference": "preference loss", "reward": "reward model's loss", "policy": "whole loss"}
LOOPS = ("policy_loop", "sft_loop")
_BOTH_LOOPS = ("models.tokenize_prompt_and_output", "models.response_log_probs")
# What a loop's training calls, of the catalogue.
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
# Figures of results.json that a threshold can be on, by kind of recipe.
MEASURES = {"preference": _POLICY, "policy": _POLICY, "reward": ["accuracy"], **dict.fromkeys(LOOPS, _LOOP)}


def used_functions(recipe: Any, library: Mapping[str, str]) -> list[str]:
    """The assignment's functions that a recipe trains on; `library` gives the name in the catalogue of each."""
    if recipe.kind in LOOPS:
        return [name for name, known in library.items() if known in USED_BY_LOOPS[recipe.kind]]
    return [name for name in (recipe.loss, recipe.advantage) if name]


def check_recipe(recipe: Any, library: Mapping[str, str]) -> None:
    """See that the loss and the advantage of a recipe are what its kind trains on.

    Raises:
        ValueError: they are not, or are missing.
    """
    if recipe.kind == "sft_loop":
        return
    if not recipe.loss:
        raise ValueError(f"a recipe of the kind {recipe.kind!r} needs a loss")
    if recipe.kind == "policy_loop":
        from trl_ext.course import LOSS_TYPES

        if recipe.loss not in LOSS_TYPES:
            known = list(LOSS_TYPES)
            raise ValueError(f"no loss_type {recipe.loss!r}{nearest(recipe.loss, known)} Known: {', '.join(known)}")
        return
    wanted = [(recipe.loss, LOSS_KINDS[recipe.kind]), *([(recipe.advantage, "advantage")] if recipe.advantage else [])]
    for name, kind in wanted:
        if name not in library:
            raise ValueError(f"no function {name!r}{nearest(name, list(library))}")
        own = task(library[name]).kind
        if own != kind:
            raise ValueError(f"{name!r} is of the kind {own!r}, and a {kind} is needed")


def check_measure(measure: str, kind: str) -> None:
    """See that a run of a kind has a figure.

    Raises:
        ValueError: it has none of that name.
    """
    known = MEASURES[kind]
    if measure not in known and not re.fullmatch(r"score\.by_kind\.\w+\.policy", measure):
        raise ValueError(f"measure: no figure {measure!r}{nearest(measure, known)} Known: {', '.join(known)}")


def check_settings(recipes: Mapping[str, Any]) -> None:
    """See that each recipe's settings are its trainer's; this imports the trainers.

    Raises:
        ValueError: one is not.
    """
    for name, recipe in recipes.items():
        known = _settings_of(recipe.kind) if recipe.settings else []
        for setting in recipe.settings:
            if setting not in known:
                raise ValueError(f"recipes.{name}.settings: no setting {setting!r}{nearest(setting, known)}")


def _settings_of(kind: str) -> list[str]:
    if kind in LOOPS:
        from trl_ext.assignment.loops import LoopSettings

        return [each.name for each in dataclasses.fields(LoopSettings)]
    import trl_ext

    config = {"preference": "PreferenceConfig", "reward": "RewardConfig", "policy": "PolicyConfig"}[kind]
    return [each.name for each in dataclasses.fields(getattr(trl_ext, config))]
