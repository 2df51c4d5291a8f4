"""Reward functions: saved reward models, ensembles of any reward functions, and verified answers."""

from __future__ import annotations

from trl_ext.names import lazy_names

# Reward models import torch, so names are loaded on first use.
_MODULE_OF_NAME = {
    "RewardEnsemble": "trl_ext.rewards.ensemble",
    "RewardModel": "trl_ext.rewards.reward_model",
    "ShapedReward": "trl_ext.rewards.shaping",
    "VerifiedReward": "trl_ext.rewards.verified",
    "combine": "trl_ext.rewards.ensemble",
    "countdown_reward": "trl_ext.rewards.verified",
    "gsm8k_reward": "trl_ext.rewards.verified",
    "gsm8k_truth": "trl_ext.rewards.parsers",
    "is_correct": "trl_ext.rewards.answers",
    "parse_gsm8k_response": "trl_ext.rewards.parsers",
    "parse_mmlu_response": "trl_ext.rewards.parsers",
    "parse_shaping": "trl_ext.rewards.shaping",
    "question_only_reward": "trl_ext.rewards.verified",
    "r1_zero_reward": "trl_ext.rewards.verified",
    "share_or_load": "trl_ext.rewards.sharing",
    "verified_reward": "trl_ext.rewards.verified",
}

__all__ = [*_MODULE_OF_NAME]
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF_NAME)
