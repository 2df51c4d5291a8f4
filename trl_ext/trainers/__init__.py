"""TRL trainers with the losses and algorithms of this library, and the callbacks that record a run."""

# ruff: noqa: F401

from trl_ext.trainers.callbacks import MetricsFileCallback, read_metrics
from trl_ext.trainers.expert_iteration import ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.trainers.kto import KTOConfig, KTOTrainer
from trl_ext.trainers.online_preference.config import OnlinePreferenceConfig
from trl_ext.trainers.online_preference.trainer import OnlinePreferenceTrainer
from trl_ext.trainers.policies import remember_base
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.policy.methods import (
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
from trl_ext.trainers.policy.reward_functions import reward_columns
from trl_ext.trainers.policy.trainer import PolicyTrainer
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.trainer import PPOTrainer
from trl_ext.trainers.preference.config import PreferenceConfig
from trl_ext.trainers.preference.methods import (
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
from trl_ext.trainers.preference.trainer import PreferenceTrainer
from trl_ext.trainers.reward import RewardConfig, RewardTrainer
from trl_ext.trainers.sft import SFTConfig, SFTTrainer
