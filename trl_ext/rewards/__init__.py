"""Reward functions: saved reward models, ensembles of any reward functions, shaping, and verified answers."""

from trl_ext.rewards.answers import is_correct
from trl_ext.rewards.ensemble import RewardEnsemble, combine
from trl_ext.rewards.parsers import parse_gsm8k_response, parse_mmlu_response
from trl_ext.rewards.reward_model import RewardModel, share_or_load
from trl_ext.rewards.shaping import ShapedReward, parse_shaping
from trl_ext.rewards.verified import (
    VerifiedReward,
    countdown_reward,
    gsm8k_reward,
    question_only_reward,
    r1_zero_reward,
)

__all__ = [
    "RewardEnsemble",
    "RewardModel",
    "ShapedReward",
    "VerifiedReward",
    "combine",
    "countdown_reward",
    "gsm8k_reward",
    "is_correct",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "parse_shaping",
    "question_only_reward",
    "r1_zero_reward",
    "share_or_load",
]
