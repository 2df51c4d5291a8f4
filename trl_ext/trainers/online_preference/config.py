"""`OnlinePreferenceConfig`: TRL's `GRPOConfig` with a named preference loss, and settings for pairs and replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext.algorithms import SETTINGS, Algorithm
from trl_ext.losses.objective import PreferenceObjective
from trl_ext.names import check_choice
from trl_ext.rollouts.replay import PAIR_CHOICES, WEIGHT_CHOICES
from trl_ext.trainers.defaults import check_at_least, parse_json_option
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.trl_settings import refuse_given

# Settings of a policy gradient, but `beta`, which is the loss's. A tie makes no pair; a finished response wins with
# `missing_eos_penalty`.
_NOT_READ = {*SETTINGS} - {"beta"} | {"algorithm_kwargs", "entropy_coef", "top_entropy_quantile", "resample_groups"}
_NOT_READ |= {"scale_rewards", "importance_sampling_level", "delta", "use_bias_correction_kl", "loss_type"}
_NOT_READ |= {"off_policy_mask_threshold", "multi_objective_aggregation", "mask_truncated_completions"}


class OnlinePreferenceAlgorithm(Algorithm):
    """A preference loss in place of the algorithm of `PolicyTrainer`. Its advantages only fill the logged tables.

    Attributes:
        preference: the loss.
    """

    def __init__(self, preference: PreferenceObjective, settings: dict[str, Any]):
        self.preference = preference
        self._settings = settings
        super().__init__("online_preference", advantage="group_centered", beta=preference.beta)

    @property
    def needs_reference(self) -> bool:
        return self.preference.needs_reference

    def describe(self) -> str:
        """One line for logs and reports that names the loss and how pairs are made."""
        settings = [f"{name} {value}" for name, value in self._settings.items() if value not in (None, 0, 0.0)]
        return f"online {self.preference.describe()}, {', '.join(settings)}"

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings, ready for JSON."""
        loss = {"loss": self.preference.loss.name, "beta": self.preference.beta, **self.preference.loss_options}
        return {"algorithm": "online_preference", **loss, **self._settings}


@dataclass
class OnlinePreferenceConfig(PolicyConfig):
    """Online preference optimisation: sample, rank, and train a preference loss on new and replayed pairs.

    Has the fields of `PolicyConfig` for sampling, rewards and batches, and those below. `pairs` selects which of the
    `per_device_train_batch_size` responses of a micro-batch are compared. `beta` is the loss's.

    Raises:
        ValueError: an unknown loss or option, a policy-gradient setting, fewer than two responses to a prompt, or a
            replay that can never return a pair; the message names the field and what to do.
    """

    _method = "online_preference"

    algorithm: str = "online_preference"
    loss: str = HfArg(default="dpo", help="Preference loss: a registered name, or your own as file.py:function.")
    loss_kwargs: dict[str, Any] | str | None = HfArg(
        default=None, help="Options of the loss beside beta, as JSON: '{\"label_smoothing\": 0.2}'."
    )
    num_generations: int | None = HfArg(default=4, help="Responses to a prompt, of which pairs are made.")
    pairs: str = HfArg(
        default="best_worst",
        help="best_worst: the best against the worst response to a prompt. all: every two of them.",
    )
    tie_tolerance: float = HfArg(
        default=0.0, help="Rewards that differ by no more than this are a tie, which is dropped."
    )
    keep_groups: str = HfArg(
        default="on", help="on: the pairs of a prompt stay in one micro-batch, which encodes each response once."
    )
    replay_capacity: int = HfArg(default=0, help="Recent pairs that are kept; 0 for no replay.")
    replay_fraction: float = HfArg(default=0.5, help="Share of replayed pairs among those of a rollout, below 1.")
    replay_max_age: int = HfArg(default=4, help="Optimizer updates after which a pair is no longer replayed.")
    replay_weights: str = HfArg(
        default="none",
        help="Importance weights of pairs that an earlier policy sampled: none; sequence, the ratio of the pair's "
        "probabilities; length_normalized, its geometric mean over tokens. The loss is then sum(w l) / sum(w) over "
        "the optimizer batch. That costs another forward pass with accumulated micro-batches, and one with a "
        "temperature other than 1, at which the weights are and the loss is not.",
    )
    replay_weight_cap: float = HfArg(default=2.0, help="The largest importance weight.")

    def __post_init__(self):
        refuse_given(self, dict.fromkeys(sorted(_NOT_READ), "a preference loss, `loss`, does not read it"))
        self.loss_kwargs = parse_json_option("loss_kwargs", self.loss_kwargs)
        self._check_pairs()
        # The loss would not use token ratios between vLLM and the trainer.
        self.vllm_importance_sampling_correction = False
        super().__post_init__()
        self._check_batches()

    def build_algorithm(self) -> OnlinePreferenceAlgorithm:
        """The loss with its options, in the form that `PolicyTrainer` expects."""
        preference = PreferenceObjective(self.loss, beta=self.beta, loss_options=self.loss_kwargs)
        if preference.columns:
            raise ValueError(
                f"the loss {self.loss!r} reads the column {preference.columns[0]!r}, which sampled pairs do not have: "
                "use another loss, or PreferenceTrainer"
            )
        settings = {"pairs": self.pairs, "group_size": self.num_generations, "tie_tolerance": self.tie_tolerance}
        if self.replay_capacity:
            names = ("replay_capacity", "replay_fraction", "replay_max_age", "replay_weights", "replay_weight_cap")
            settings |= {name: getattr(self, name) for name in names}
        return OnlinePreferenceAlgorithm(preference, settings)

    def _check_pairs(self) -> None:
        check_choice("pairs", self.pairs, PAIR_CHOICES)
        for name in ("num_generations", "num_generations_eval"):
            size = getattr(self, name)
            if size is not None and size < 2:
                raise ValueError(f"{name} must be at least 2, got {size}: a pair takes two responses to a prompt")
        check_at_least(self, {"tie_tolerance": 0, "replay_capacity": 0, "replay_weight_cap": 1})
        check_choice("replay_weights", self.replay_weights, WEIGHT_CHOICES)

    def _check_batches(self) -> None:
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                f"an optimizer step takes its pairs from one rollout: gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} must divide steps_per_generation {self.steps_per_generation}"
            )
        if not self.replay_capacity:
            of_replay = ("replay_fraction", "replay_max_age", "replay_weights", "replay_weight_cap")
            refuse_given(self, dict.fromkeys(of_replay, "it needs a replay: set replay_capacity, or leave it out"))
            return
        if not 0 < self.replay_fraction < 1:
            raise ValueError(f"replay_fraction must lie between 0 and 1, got {self.replay_fraction}")
        if self.replay_weights == "none":
            refuse_given(self, {"replay_weight_cap": "replay_weights none has no weights to cap"})
        if self.replay_max_age < self.updates_per_rollout:
            raise ValueError(
                f"replay_max_age {self.replay_max_age} leaves nothing to replay: at the next rollout, pairs are "
                f"{self.updates_per_rollout} updates old"
            )
        refuse_given(self, {"sync_ref_model": "pairs of a replay keep the log-probabilities of one fixed reference"})
