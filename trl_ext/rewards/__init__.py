"""Rewards: who scores a completion. Saved reward models, and ensembles of them or of any reward functions."""

from __future__ import annotations

import importlib

# These import torch, so they load when they are first used.
_MODULE_OF_NAME = {
    "RewardEnsemble": "trl_ext.rewards.ensemble",
    "RewardModel": "trl_ext.rewards.reward_model",
    "combine": "trl_ext.rewards.ensemble",
    "share_or_load": "trl_ext.rewards.sharing",
}

__all__ = [*_MODULE_OF_NAME]


def __getattr__(name: str):
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'trl_ext.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
