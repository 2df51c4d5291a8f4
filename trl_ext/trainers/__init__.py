"""TRL trainers, each connected to a row of the tables of losses by overriding two methods.

Names load on first use, so that one trainer does not import the others.
"""

from trl_ext.names import lazy_names

# Each loss or algorithm listed here has a {prefix}Config and a {prefix}Trainer, made from its row.
PREFERENCE_METHODS = (
    *("DPO", "IPO", "AOT", "AOTPaired", "CDPO", "RobustDPO", "Hinge", "APOZero"),
    *("APODown", "SimPO", "RePO", "CPO", "ORPO", "DPOP", "SPPO", "NCA"),
)
POLICY_METHODS = ("GRPO", "DrGRPO", "GSPO", "RLOO", "ReMax")


def _pairs(prefixes: tuple[str, ...]) -> str:
    return " ".join(f"{prefix}{kind}" for prefix in prefixes for kind in ("Config", "Trainer"))


__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".preference.config": "PreferenceConfig",
        ".preference.trainer": "PreferenceTrainer",
        ".preference.methods": _pairs(PREFERENCE_METHODS),
        ".kto": "KTOConfig KTOTrainer",
        ".reward": "RewardConfig RewardTrainer",
        ".sft": "SFTConfig SFTTrainer",
        ".expert_iteration": "ExpertIterationConfig ExpertIterationTrainer",
        ".policy.config": "PolicyConfig",
        ".policy.trainer": "PolicyTrainer",
        ".policy.methods": _pairs(POLICY_METHODS),
        ".ppo.config": "PPOConfig",
        ".ppo.trainer": "PPOTrainer",
        ".online_preference.config": "OnlinePreferenceConfig",
        ".online_preference.trainer": "OnlinePreferenceTrainer",
        # Callbacks that record a run.
        ".callbacks": "MetricsFileCallback read_metrics",
        ".policies": "remember_base",
        ".policy.reward_functions": "reward_columns",
    },
)
