"""Training objectives for RL-for-LLM courses and small labs, as plug-ins to Hugging Face TRL.

Names load when they are first used: `import trl_ext` imports neither torch nor trl.
"""

from trl_ext.names import lazy_names

__version__ = "0.1.0"

# What scripts for TRL import beside its trainers, so that the library's name is all that changes in them.
_OF_TRL = "TrlParser ModelConfig ScriptArguments DatasetMixtureConfig get_dataset get_peft_config "
_OF_TRL += "get_quantization_config"
# Each of these has a configuration and a trainer, such as `DPOConfig` and `DPOTrainer`.
_METHODS = (
    *("Preference", "DPO", "IPO", "AOT", "AOTPaired", "CDPO", "RobustDPO", "Hinge", "APOZero", "APODown"),
    *("SimPO", "RePO", "CPO", "ORPO", "DPOP", "SPPO", "NCA", "KTO", "Reward", "SFT", "ExpertIteration"),
    *("Policy", "GRPO", "DrGRPO", "GSPO", "RLOO", "ReMax", "PPO", "OnlinePreference"),
)

_NAMES, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".registry": "preference_loss preference_weighting",
        ".algorithms": "policy_algorithm",
        ".data": "load_benchmark",
        ".models": "share_prefixes",
        ".rollouts": "fast_rollouts",
        ".rewards": "RewardEnsemble RewardModel",
        "trl": _OF_TRL,
        ".trainers": " ".join(f"{name}{kind}" for name in _METHODS for kind in ("Config", "Trainer")),
    },
)
__all__ = ["__version__", *(name for name in _NAMES if name not in _OF_TRL.split())]
