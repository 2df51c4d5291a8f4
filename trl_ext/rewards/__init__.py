"""Reward functions: saved reward models, ensembles of any reward functions, and verified answers."""

from __future__ import annotations

from trl_ext.names import lazy_names

# Reward models import torch, so modules are imported when their names are used.
__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".answers": "is_correct",
        ".ensemble": "RewardEnsemble combine",
        ".parsers": "parse_gsm8k_response parse_mmlu_response",
        ".reward_model": "RewardModel share_or_load",
        ".shaping": "ShapedReward parse_shaping",
        ".verified": "VerifiedReward verified_reward countdown_reward gsm8k_reward question_only_reward "
        "r1_zero_reward",
    },
)
