"""`PPOConfig`: a `PolicyConfig` whose advantages come from a value function."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from trl_ext.advantages import gae
from trl_ext.algorithms import Algorithm
from trl_ext.names import check_choice
from trl_ext.trainers.defaults import check_at_least
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.trl_settings import refuse_given

VALUE_MODELS = ("shared", "separate")
# Largest change of the KL coefficient per horizon of responses.
LARGEST_ERROR = 0.2


# Not a row of the table, since `PolicyTrainer` has no value function and could not use it.
PPO = Algorithm(
    "ppo",
    summary="Advantages of a value function, clipped token ratio",
    paper="1707.06347",
    advantage=gae,
    surrogate="clip",
    epsilon=0.2,
    aggregation="token_mean",
    beta=0.05,
    kl_estimator="k1",
    kl_in="reward",
    group_size=1,
    defined_by=("ratio", "surrogate"),
)


# Settings of `PolicyConfig` that PPO does not use: setting -> why.
_NOT_USED = {
    **dict.fromkeys(
        ("advantage", "std_ddof", "advantage_eps", "scale_rewards", "multi_objective_aggregation"),
        "PPO's advantages are those of its value function; use whiten_advantages, gamma and lam",
    ),
    "resample_groups": "a value function learns from groups of equal rewards too",
    **dict.fromkeys(("use_vllm", "torch_compile"), "the value head is in the policy's own pass"),
    "ddp_find_unused_parameters": "parameters that both losses reach would be marked ready twice",
    "off_policy_mask_threshold": "it masks responses by one advantage, and here each token has its own",
}


@dataclass
class PPOConfig(PolicyConfig):
    """Proximal policy optimisation with a value function: the fields of `PolicyConfig`, and those below.

    Raises:
        ValueError: as `PolicyConfig` does, and for settings that a value function does not support; the message names
            the flags and what to use instead.
    """

    _method = "ppo"
    _row = PPO

    algorithm: str = "ppo"
    num_iterations: int = HfArg(
        default=4, help="Passes over a rollout; each takes the same minibatches in the same order."
    )
    value_model: str = HfArg(
        default="shared",
        help="shared: a linear head on the policy's last hidden states. separate: a model of its own, "
        "value_model_name_or_path.",
    )
    value_model_name_or_path: str | None = HfArg(
        default=None,
        help="For separate: a reward model (whose head is where the value head starts), or a language model.",
    )
    value_coefficient: float = HfArg(default=0.1, help="Of the value loss.")
    value_clip: float | None = HfArg(
        default=0.2, help="How far a value may move from that of the rollout. None for no clip."
    )
    value_learning_rate: float | None = HfArg(
        default=None, help="Of the value function's own parameters. Default: learning_rate."
    )
    gamma: float = HfArg(default=1.0, help="Discount per token.")
    lam: float = HfArg(default=0.95, help="Of generalized advantage estimation: 1 for whole returns, 0 for one step.")
    whiten_advantages: bool = HfArg(
        default=True, help="Give the advantages of a rollout's tokens mean 0 and standard deviation 1."
    )
    kl_target: float | None = HfArg(
        default=None, help="Adapt beta so that the divergence per response comes near this. None for a fixed beta."
    )
    kl_horizon: int = HfArg(default=10_000, help="Responses over which beta adapts.")

    def __post_init__(self):
        check_choice("value_model", self.value_model, VALUE_MODELS)
        if (self.value_model == "separate") != bool(self.value_model_name_or_path):
            raise ValueError("value_model separate and value_model_name_or_path need each other: give both or neither")
        least = {"kl_horizon": 1, "value_coefficient": 0, "value_learning_rate": 0}
        check_at_least(self, least, positive=("value_clip", "kl_target"), shares=("gamma", "lam"))
        refuse_given(self, _NOT_USED)
        # transformers would enable it for a model with adapters.
        self.ddp_find_unused_parameters = False
        super().__post_init__()
        if self.kl_target is None:
            refuse_given(self, {"kl_horizon": "it is of kl_target, which is not set"})
        elif not self.beta:
            raise ValueError(f"kl_target {self.kl_target} has no coefficient to adapt: give a beta above 0")
        elif LARGEST_ERROR * self.generation_batch_size >= self.kl_horizon:
            raise ValueError(
                f"kl_horizon must be above {LARGEST_ERROR * self.generation_batch_size:g}, got {self.kl_horizon}: one "
                "rollout could take beta to 0 or below it"
            )
