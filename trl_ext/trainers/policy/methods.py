"""`GRPOTrainer`, `GRPOConfig` and the other named pairs: `PolicyTrainer` with one algorithm each."""

from trl_ext.algorithms import algorithms
from trl_ext.trainers import POLICY_METHODS
from trl_ext.trainers.named import named_pairs
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.policy.trainer import PolicyTrainer

globals().update(named_pairs(algorithms, POLICY_METHODS, PolicyConfig, PolicyTrainer, __name__, "algorithm"))
# TRL's own trainer of this name has this tag.
globals()["RLOOTrainer"]._tag_names = ["rloo" if tag == "grpo" else tag for tag in PolicyTrainer._tag_names]
