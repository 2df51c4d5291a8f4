"""`GRPOTrainer`, `GRPOConfig` and the other pairs: `PolicyTrainer` with one algorithm each."""

from __future__ import annotations

from dataclasses import dataclass

from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.policy.trainer import PolicyTrainer


@dataclass
class GRPOConfig(PolicyConfig):
    """Configuration of `GRPOTrainer`."""

    _method = "grpo"
    algorithm: str = "grpo"


class GRPOTrainer(PolicyTrainer):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv 2402.03300)."""

    _name = "GRPO"
    _config_class = GRPOConfig


@dataclass
class DrGRPOConfig(PolicyConfig):
    """Configuration of `DrGRPOTrainer`."""

    _method = "dr_grpo"
    algorithm: str = "dr_grpo"


class DrGRPOTrainer(PolicyTrainer):
    """GRPO without normalization by standard deviation and length (Liu et al. 2025, arXiv 2503.20783)."""

    _name = "DrGRPO"
    _config_class = DrGRPOConfig


@dataclass
class GSPOConfig(PolicyConfig):
    """Configuration of `GSPOTrainer`."""

    _method = "gspo"
    algorithm: str = "gspo"


class GSPOTrainer(PolicyTrainer):
    """Group Sequence Policy Optimization (Zheng et al. 2025, arXiv 2507.18071)."""

    _name = "GSPO"
    _config_class = GSPOConfig


@dataclass
class RLOOConfig(PolicyConfig):
    """Configuration of `RLOOTrainer`."""

    _method = "rloo"
    algorithm: str = "rloo"


class RLOOTrainer(PolicyTrainer):
    """REINFORCE Leave-One-Out (Ahmadian et al. 2024, arXiv 2402.14740)."""

    _name = "RLOO"
    _config_class = RLOOConfig
    # TRL's own trainer of this name has this tag.
    _tag_names = ["rloo" if tag == "grpo" else tag for tag in PolicyTrainer._tag_names]


@dataclass
class ReMaxConfig(PolicyConfig):
    """Configuration of `ReMaxTrainer`."""

    _method = "remax"
    algorithm: str = "remax"


class ReMaxTrainer(PolicyTrainer):
    """REINFORCE with the greedy response as baseline (Li et al. 2023, arXiv 2310.10505)."""

    _name = "ReMax"
    _config_class = ReMaxConfig
