"""TRL trainers, each connected to a row of the tables of losses by two narrow seams."""

from trl_ext.trainers.callbacks import GenerationTableCallback, MetricsFileCallback, read_metrics
from trl_ext.trainers.expert_iteration import ExpertIterationTrainer
from trl_ext.trainers.expert_iteration_config import ExpertIterationConfig
from trl_ext.trainers.generation_evaluation import GenerationEvaluation, GenerationSettings
from trl_ext.trainers.kto import KTOConfig, KTOTrainer
from trl_ext.trainers.online_preference import OnlinePreferenceTrainer
from trl_ext.trainers.online_preference_config import OnlinePreferenceConfig
from trl_ext.trainers.policies import remember_base
from trl_ext.trainers.policy import PolicyTrainer
from trl_ext.trainers.policy_config import PolicyConfig
from trl_ext.trainers.policy_methods import (
    DrGRPOConfig,
    DrGRPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    GSPOConfig,
    GSPOTrainer,
    ReMaxConfig,
    ReMaxTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl_ext.trainers.ppo import PPOTrainer
from trl_ext.trainers.ppo_config import PPOConfig
from trl_ext.trainers.preference import PreferenceTrainer
from trl_ext.trainers.preference_config import PreferenceConfig
from trl_ext.trainers.preference_methods import (
    AOTConfig,
    AOTPairedConfig,
    AOTPairedTrainer,
    AOTTrainer,
    APODownConfig,
    APODownTrainer,
    APOZeroConfig,
    APOZeroTrainer,
    CDPOConfig,
    CDPOTrainer,
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOPConfig,
    DPOPTrainer,
    DPOTrainer,
    HingeConfig,
    HingeTrainer,
    IPOConfig,
    IPOTrainer,
    NCAConfig,
    NCATrainer,
    ORPOConfig,
    ORPOTrainer,
    RePOConfig,
    RePOTrainer,
    RobustDPOConfig,
    RobustDPOTrainer,
    SimPOConfig,
    SimPOTrainer,
    SPPOConfig,
    SPPOTrainer,
)
from trl_ext.trainers.reward import RewardTrainer
from trl_ext.trainers.reward_config import RewardConfig
from trl_ext.trainers.reward_functions import reward_columns
from trl_ext.trainers.sft import SFTTrainer
from trl_ext.trainers.sft_config import SFTConfig

__all__ = [
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
    "PPOConfig",
    "PPOTrainer",
    "AOTConfig",
    "AOTPairedConfig",
    "AOTPairedTrainer",
    "AOTTrainer",
    "APODownConfig",
    "APODownTrainer",
    "APOZeroConfig",
    "APOZeroTrainer",
    "CDPOConfig",
    "CDPOTrainer",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOPConfig",
    "DPOPTrainer",
    "DPOTrainer",
    "ExpertIterationConfig",
    "ExpertIterationTrainer",
    "HingeConfig",
    "HingeTrainer",
    "IPOConfig",
    "IPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "NCAConfig",
    "NCATrainer",
    "OnlinePreferenceConfig",
    "OnlinePreferenceTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "PreferenceConfig",
    "PreferenceTrainer",
    "RePOConfig",
    "RePOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "RobustDPOConfig",
    "RobustDPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "SPPOConfig",
    "SPPOTrainer",
    "SimPOConfig",
    "SimPOTrainer",
    # What a training is watched with.
    "GenerationEvaluation",
    "GenerationSettings",
    "GenerationTableCallback",
    "MetricsFileCallback",
    "read_metrics",
    "remember_base",
    "reward_columns",
]
