"""`PPOConfig`: a `PolicyConfig` whose advantages come from a value function."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from trl_ext.advantages import no_baseline
from trl_ext.losses import clipped_surrogate
from trl_ext.registry import Algorithm
from trl_ext.trainers.defaults import check_at_least, check_choice
from trl_ext.trainers.policy.config import RESAMPLING, PolicyConfig
from trl_ext.trainers.trl_settings import refuse_given

VALUE_MODELS = ("shared", "adapter", "separate")
# Largest change of the KL coefficient per horizon of responses.
LARGEST_ERROR = 0.2


def gae(rewards: Tensor, group_size: int) -> Tensor:
    """The rewards of whole responses, [N], used until the trainer has computed each token's advantage."""
    return no_baseline(rewards, group_size)


# Not a row of the table, since `PolicyTrainer` has no value function and could not use it.
PPO = Algorithm(
    "ppo",
    clipped_surrogate,
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
    fixed={
        "ratio": (("token",), "PPO's ratio is that of each token"),
        "surrogate": (("clip",), "PPO clips its ratio"),
    },
)


# Settings of `PolicyConfig` that PPO does not use: setting -> why.
_NOT_USED = {
    **dict.fromkeys(
        ("advantage", "std_ddof", "advantage_eps", "scale_rewards", "multi_objective_aggregation"),
        "PPO's advantages are those of its value function; use whiten_advantages, gamma and lam",
    ),
    **dict.fromkeys(RESAMPLING, "a value function learns from groups of equal rewards too: leave it out"),
    "use_vllm": "the value head would be sent to vLLM with the policy's weights",
    "torch_compile": "the value head reads the hidden states inside the forward pass",
    "off_policy_mask_threshold": "it masks whole responses by one advantage, and here each token has its own",
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
    num_iterations: int = field(
        default=4, metadata={"help": "Passes over a rollout; each takes the same minibatches in the same order."}
    )
    value_model: str = field(
        default="shared",
        metadata={
            "help": "shared: a linear head on the policy's last hidden states. adapter: the same on those of a LoRA "
            "adapter of its own, beside the policy's. separate: a model of its own, value_model_name_or_path."
        },
    )
    value_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "For separate: a reward model (whose head is where the value head starts), or a language model."
        },
    )
    value_coefficient: float = field(default=0.1, metadata={"help": "Of the value loss."})
    value_clip: float | None = field(
        default=0.2, metadata={"help": "How far a value may move from that of the rollout. None for no clip."}
    )
    value_learning_rate: float | None = field(
        default=None, metadata={"help": "Of the value function's own parameters. Default: learning_rate."}
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per token."})
    lam: float = field(
        default=0.95, metadata={"help": "Of generalized advantage estimation: 1 for whole returns, 0 for one step."}
    )
    value_lam: float | None = field(
        default=None,
        metadata={"help": "Of the returns that values are fitted to (decoupled GAE; VAPO: 1). Default: lam."},
    )
    length_adaptive_lam: float | None = field(
        default=None,
        metadata={
            "help": "Alpha of VAPO, which has 0.05: the lambda of the advantages of a response of L tokens is "
            "1 - 1 / (alpha L), and 0 where that is negative. Default: lam for every response."
        },
    )
    value_pretraining_steps: int = field(
        default=0,
        metadata={
            "help": "Updates that fit the value function alone, at the beginning, to samples of the unchanged policy. "
            "A shared value model then trains its head only."
        },
    )
    likelihood_coefficient: float = field(
        default=0.0,
        metadata={
            "help": "Of VAPO's likelihood loss, which has 0.1: minus the mean log-probability of the tokens of "
            "responses that were right, by a raw reward of likelihood_reward or more."
        },
    )
    likelihood_reward: float = field(default=1.0, metadata={"help": "The lowest reward of a right response."})
    whiten_rewards: bool = field(
        default=False,
        metadata={
            "help": "Whiten the rewards of tokens in the rollout and add their mean back: (r - m) / s + m, by which a "
            "token without a reward has m (1 - 1 / s), a penalty on length where m > 0 and s < 1."
        },
    )
    whiten_advantages: bool = field(
        default=True, metadata={"help": "Give the advantages of a rollout's tokens mean 0 and standard deviation 1."}
    )
    kl_target: float | None = field(
        default=None,
        metadata={"help": "Adapt beta so that the divergence per response comes near this. None for a fixed beta."},
    )
    kl_horizon: int = field(default=10_000, metadata={"help": "Responses over which beta adapts."})

    def __post_init__(self):
        self._check_value_model()
        from_0 = ("value_coefficient", "value_learning_rate", "likelihood_coefficient", "value_pretraining_steps")
        check_at_least(self, {"kl_horizon": 1, **dict.fromkeys(from_0, 0)})
        for name in ("gamma", "lam", "value_lam"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for name in ("value_clip", "kl_target", "length_adaptive_lam"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}; leave it None for none")
        self._check_vapo()
        refuse_given(self, _NOT_USED)
        if self.ddp_find_unused_parameters:
            raise ValueError(
                "ddp_find_unused_parameters does not go with PPO: parameters that both losses reach would be marked "
                "ready twice; leave it out"
            )
        # transformers would enable it for a model with adapters.
        self.ddp_find_unused_parameters = False
        super().__post_init__()
        if self.kl_target is not None and not self.beta:
            raise ValueError(f"kl_target {self.kl_target} has no coefficient to adapt: give a beta above 0")
        if self.kl_target is None and self.kl_horizon != type(self).kl_horizon:
            raise ValueError(
                f"kl_horizon {self.kl_horizon} is of kl_target, which is not set: set it, or leave it out"
            )
        if self.kl_target is not None and LARGEST_ERROR * self.generation_batch_size >= self.kl_horizon:
            raise ValueError(
                f"kl_horizon {self.kl_horizon} is too short for a rollout of generation_batch_size "
                f"{self.generation_batch_size} responses, which could take beta to 0 or below it: set it to "
                f"{math.floor(LARGEST_ERROR * self.generation_batch_size) + 1} at least"
            )

    def _check_value_model(self) -> None:
        check_choice("value_model", self.value_model, VALUE_MODELS)
        given = self.value_model_name_or_path
        if self.value_model == "separate" and not given:
            raise ValueError(
                "value_model separate needs value_model_name_or_path: a reward model's folder, or a language model"
            )
        if self.value_model != "separate" and given:
            raise ValueError(
                f"value_model {self.value_model} and value_model_name_or_path {given} contradict each other: a value "
                "head on the policy's own base cannot have another base; use value_model separate"
            )

    def _check_vapo(self) -> None:
        if not self.likelihood_coefficient and self.likelihood_reward != type(self).likelihood_reward:
            raise ValueError(
                "likelihood_reward is of the likelihood loss: set likelihood_coefficient, or leave it out"
            )
        if self.length_adaptive_lam is not None and self.lam != type(self).lam:
            raise ValueError(
                f"lam {self.lam} and length_adaptive_lam {self.length_adaptive_lam} contradict each other: both are "
                "the lambda of the advantages; leave one out"
            )
        if self.value_pretraining_steps and self.weight_decay:
            raise ValueError(
                f"value_pretraining_steps leaves the policy as it is, and weight_decay {self.weight_decay} would not: "
                "set weight_decay 0"
            )
        if 0 < self.max_steps <= self.value_pretraining_steps:
            raise ValueError(
                f"value_pretraining_steps {self.value_pretraining_steps} leaves nothing of max_steps {self.max_steps} "
                "for the policy: give fewer, or more steps"
            )
