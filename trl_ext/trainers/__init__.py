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


def _pairs(prefixes: tuple[str, ...]) -> list[str]:
    return [f"{prefix}{kind}" for prefix in prefixes for kind in ("Config", "Trainer")]


_NAMES_BY_MODULE = {
    "trl_ext.trainers.preference.config": ["PreferenceConfig"],
    "trl_ext.trainers.preference.trainer": ["PreferenceTrainer"],
    "trl_ext.trainers.preference.methods": _pairs(PREFERENCE_METHODS),
    "trl_ext.trainers.kto": ["KTOConfig", "KTOTrainer"],
    "trl_ext.trainers.reward.config": ["RewardConfig"],
    "trl_ext.trainers.reward.trainer": ["RewardTrainer"],
    "trl_ext.trainers.reward.process": ["ProcessReward", "process_row"],
    "trl_ext.trainers.sft": ["SFTConfig", "SFTTrainer"],
    "trl_ext.trainers.expert_iteration": ["ExpertIterationConfig", "ExpertIterationTrainer"],
    "trl_ext.trainers.policy.config": ["PolicyConfig"],
    "trl_ext.trainers.policy.trainer": ["PolicyTrainer"],
    "trl_ext.trainers.policy.methods": _pairs(POLICY_METHODS),
    "trl_ext.trainers.ppo.config": ["PPOConfig"],
    "trl_ext.trainers.ppo.trainer": ["PPOTrainer"],
    "trl_ext.trainers.online_preference.config": ["OnlinePreferenceConfig"],
    "trl_ext.trainers.online_preference.trainer": ["OnlinePreferenceTrainer"],
    "trl_ext.trainers.distillation.config": ["DistillationConfig"],
    "trl_ext.trainers.distillation.trainer": ["DistillationTrainer"],
    "trl_ext.trainers.evolution.config": ["EvolutionConfig"],
    "trl_ext.trainers.evolution.trainer": ["EvolutionTrainer"],
    # Callbacks that record a run.
    "trl_ext.trainers.callbacks": ["MetricsFileCallback", "read_metrics"],
    "trl_ext.trainers.policies": ["remember_base"],
    "trl_ext.trainers.policy.reward_functions": ["reward_columns"],
}
MODULE_OF_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = list(MODULE_OF_NAME)
__getattr__, __dir__ = lazy_names(__name__, MODULE_OF_NAME)
