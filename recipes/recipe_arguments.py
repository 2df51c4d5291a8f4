"""Which dataclasses the flags of each recipe that trains fill in, for those that check a command and do not run it."""

from __future__ import annotations

import importlib

# Recipe -> where its own arguments are, and its trainer's configuration: a name of trl_ext, or module:name.
_OFFLINE, _ONLINE = "offline:RecipeArguments", "online:OnlineArguments"
RECIPES = {
    "aot": (_OFFLINE, "AOTConfig"),
    "dpo": (_OFFLINE, "DPOConfig"),
    "ipo": (_OFFLINE, "IPOConfig"),
    "preference": (_OFFLINE, "PreferenceConfig"),
    "kto": (_OFFLINE, "KTOConfig"),
    "reward_model": ("reward:RewardArguments", "RewardConfig"),
    "grpo": (_ONLINE, "GRPOConfig"),
    "dr_grpo": (_ONLINE, "DrGRPOConfig"),
    "gspo": (_ONLINE, "GSPOConfig"),
    "rloo": (_ONLINE, "RLOOConfig"),
    "remax": (_ONLINE, "ReMaxConfig"),
    "policy": (_ONLINE, "PolicyConfig"),
    "ppo": (_ONLINE, "PPOConfig"),
    "online_preference": (_ONLINE, "OnlinePreferenceConfig"),
    "sft": ("sft:SFTArguments", "SFTConfig"),
    "rlhf_sft": ("rlhf_sft:DemonstrationArguments", "SFTConfig"),
    "expert_iteration": ("expert_iteration:ExpertIterationArguments", "ExpertIterationConfig"),
    "grpo_math": ("grpo_math:GRPOMathArguments", "course_terms:CourseConfig"),
}


def argument_types(recipe: str) -> tuple[type, ...] | None:
    """The dataclasses in the order in which the recipe reads them; None for a recipe that is not in the table."""
    if recipe not in RECIPES:
        return None
    own, config = (_find(name) for name in RECIPES[recipe])
    return own, _find("training:ModelArguments"), config, _find("plan:LaunchArguments")


def _find(name: str) -> type:
    module, _, attribute = name.rpartition(":")
    return getattr(importlib.import_module(module or "trl_ext"), attribute)
