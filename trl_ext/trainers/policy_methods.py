"""Named pairs of configuration and trainer, one for each common online algorithm: `PolicyTrainer` with its name."""

from __future__ import annotations

from dataclasses import dataclass

from trl_ext.trainers.policy import PolicyTrainer
from trl_ext.trainers.policy_config import PolicyConfig


@dataclass
class GRPOConfig(PolicyConfig):
    """Group relative policy optimisation."""

    _method = "grpo"
    algorithm: str = "grpo"


class GRPOTrainer(PolicyTrainer):
    """Group relative policy optimisation, by default with the population's standard deviation."""

    _config_class = GRPOConfig
    _name = "GRPO"
    _paper = {
        "title": "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "id": "2402.03300",
    }


@dataclass
class DrGRPOConfig(PolicyConfig):
    """GRPO done right: no standard deviation, and a constant in place of each response's length."""

    _method = "dr_grpo"
    algorithm: str = "dr_grpo"


class DrGRPOTrainer(PolicyTrainer):
    """GRPO without its two biases: of the standard deviation and of the response's length."""

    _config_class = DrGRPOConfig
    _name = "Dr. GRPO"
    _paper = {"title": "Understanding R1-Zero-Like Training: A Critical Perspective", "id": "2503.20783"}


@dataclass
class GSPOConfig(PolicyConfig):
    """Group sequence policy optimisation: one ratio per response, clipped once."""

    _method = "gspo"
    algorithm: str = "gspo"


class GSPOTrainer(PolicyTrainer):
    """Group sequence policy optimisation."""

    _config_class = GSPOConfig
    _name = "GSPO"
    _paper = {"title": "Group Sequence Policy Optimization", "id": "2507.18071"}


@dataclass
class RLOOConfig(PolicyConfig):
    """REINFORCE with a leave-one-out baseline, and the KL divergence in the reward."""

    _method = "rloo"
    algorithm: str = "rloo"


class RLOOTrainer(PolicyTrainer):
    """REINFORCE leave-one-out."""

    _config_class = RLOOConfig
    _tag_names = ["trl", "rloo", "trl_ext", "policy-optimization"]
    _name = "RLOO"
    _paper = {
        "title": "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "id": "2402.14740",
    }


@dataclass
class ReMaxConfig(PolicyConfig):
    """REINFORCE with the reward of the greedy response as its baseline."""

    _method = "remax"
    algorithm: str = "remax"


class ReMaxTrainer(PolicyTrainer):
    """REINFORCE with a greedy baseline: one more, greedy, response to each prompt of a rollout."""

    _config_class = ReMaxConfig
    _name = "ReMax"
    _paper = {
        "title": "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning "
        "Large Language Models",
        "id": "2310.10505",
    }
