"""Training objectives for RL-for-LLM courses and small labs, as plug-ins to Hugging Face TRL.

Names load when they are first used: `import trl_ext` imports neither torch nor trl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "trl_ext.registry": ["preference_loss", "preference_weighting", "policy_algorithm"],
    "trl_ext.data": ["load_benchmark"],
    "trl_ext.models": ["share_prefixes"],
    "trl_ext.rewards": ["RewardEnsemble", "RewardModel"],
    "trl_ext.trainers": [
        "PreferenceConfig",
        "PreferenceTrainer",
        "DPOConfig",
        "DPOTrainer",
        "IPOConfig",
        "IPOTrainer",
        "AOTConfig",
        "AOTTrainer",
        "AOTPairedConfig",
        "AOTPairedTrainer",
        "CDPOConfig",
        "CDPOTrainer",
        "RobustDPOConfig",
        "RobustDPOTrainer",
        "HingeConfig",
        "HingeTrainer",
        "APOZeroConfig",
        "APOZeroTrainer",
        "APODownConfig",
        "APODownTrainer",
        "SimPOConfig",
        "SimPOTrainer",
        "RePOConfig",
        "RePOTrainer",
        "CPOConfig",
        "CPOTrainer",
        "ORPOConfig",
        "ORPOTrainer",
        "DPOPConfig",
        "DPOPTrainer",
        "SPPOConfig",
        "SPPOTrainer",
        "NCAConfig",
        "NCATrainer",
        "RewardConfig",
        "RewardTrainer",
        "SFTConfig",
        "SFTTrainer",
        "ExpertIterationConfig",
        "ExpertIterationTrainer",
        "PolicyConfig",
        "PolicyTrainer",
        "GRPOConfig",
        "GRPOTrainer",
        "DrGRPOConfig",
        "DrGRPOTrainer",
        "GSPOConfig",
        "GSPOTrainer",
        "RLOOConfig",
        "RLOOTrainer",
        "ReMaxConfig",
        "ReMaxTrainer",
        "OnlinePreferenceConfig",
        "OnlinePreferenceTrainer",
        "KTOConfig",
        "KTOTrainer",
        "PPOConfig",
        "PPOTrainer",
    ],
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = ["__version__", *_MODULE_OF_NAME]

if TYPE_CHECKING:
    from trl_ext.data import load_benchmark  # noqa: F401
    from trl_ext.models import share_prefixes  # noqa: F401
    from trl_ext.registry import policy_algorithm, preference_loss, preference_weighting  # noqa: F401
    from trl_ext.trainers import *  # noqa: F403


def __getattr__(name: str):
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'trl_ext' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
