"""`OnlinePreferenceConfig`: TRL's `GRPOConfig` with a named preference loss, and settings for pairs and replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl_ext.algorithms import SETTINGS, Algorithm
from trl_ext.losses.objective import PreferenceObjective
from trl_ext.names import check_choice
from trl_ext.rollouts.pairing import PAIR_CHOICES
from trl_ext.rollouts.replay import WEIGHT_CHOICES
from trl_ext.trainers.defaults import check_at_least, parse_json_option
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.trl_settings import refuse_given

# Policy-gradient settings that a preference loss does not read: setting -> why.
_NOT_READ = {
    **dict.fromkeys(
        (*SETTINGS, "scale_rewards", "importance_sampling_level", "delta", "use_bias_correction_kl"),
        "a preference loss does not read it",
    ),
    **dict.fromkeys(("surrogate", "loss_type"), "name the loss with `loss`"),
    "algorithm_kwargs": "options of the loss go into loss_kwargs",
    "off_policy_mask_threshold": "limit staleness with replay_max_age",
    **dict.fromkeys(
        ("entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"), "train an algorithm of PolicyConfig for it"
    ),
    "resample_groups": "prompts whose responses tie make no pair and take no part in the mean",
    "multi_objective_aggregation": "combine rewards with `trl_ext.rewards.RewardEnsemble`",
    "mask_truncated_completions": "use missing_eos_penalty, which lets finished responses win",
}
# Here beta belongs to the preference loss.
del _NOT_READ["beta"]


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
    loss: str = field(
        default="dpo", metadata={"help": "Preference loss: a registered name, or your own as file.py:function."}
    )
    loss_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the loss beside beta, as JSON: '{\"label_smoothing\": 0.2}'."}
    )
    num_generations: int | None = field(
        default=4, metadata={"help": "Responses to a prompt, of which pairs are made."}
    )
    pairs: str = field(
        default="best_worst",
        metadata={"help": "best_worst: the best against the worst response to a prompt. all: every two of them."},
    )
    tie_tolerance: float = field(
        default=0.0, metadata={"help": "Rewards that differ by no more than this are a tie, which is dropped."}
    )
    keep_groups: str = field(
        default="on",
        metadata={"help": "on: the pairs of a prompt stay in one micro-batch, which encodes each response once."},
    )
    replay_capacity: int = field(default=0, metadata={"help": "Recent pairs that are kept; 0 for no replay."})
    replay_fraction: float = field(
        default=0.5, metadata={"help": "Share of replayed pairs among those of a rollout, below 1."}
    )
    replay_max_age: int = field(
        default=4, metadata={"help": "Optimizer updates after which a pair is no longer replayed."}
    )
    replay_weights: str = field(
        default="none",
        metadata={
            "help": "Importance weights of pairs that an earlier policy sampled: none; sequence, the ratio of the "
            "pair's probabilities; length_normalized, its geometric mean over tokens. The loss is then sum(w l) / "
            "sum(w) over the optimizer batch. That costs another forward pass with accumulated micro-batches, and one "
            "with a temperature other than 1, at which the weights are and the loss is not."
        },
    )
    replay_weight_cap: float = field(default=2.0, metadata={"help": "The largest importance weight."})

    def __post_init__(self):
        refuse_given(self, _NOT_READ)
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
                f"the loss {self.loss!r} reads the column {preference.columns[0]!r}, and pairs that are sampled in "
                "training have no dataset columns: use another loss, or PreferenceTrainer on a dataset of pairs"
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
                f"an optimizer step takes its pairs from one rollout, and gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} does not divide the {self.steps_per_generation} micro-batches of "
                "a rollout (steps_per_generation): change one of the two"
            )
        if not self.replay_capacity:
            of_replay = ("replay_fraction", "replay_max_age", "replay_weights", "replay_weight_cap")
            refuse_given(self, dict.fromkeys(of_replay, "it needs a replay: set replay_capacity, or leave it out"))
            return
        if not 0 < self.replay_fraction < 1:
            raise ValueError(
                f"replay_fraction must lie between 0 and 1, got {self.replay_fraction}; for no replay, set "
                "replay_capacity 0"
            )
        if self.replay_weights == "none":
            refuse_given(self, {"replay_weight_cap": "replay_weights none has no weights to cap"})
        if self.replay_max_age < self.updates_per_rollout:
            raise ValueError(
                f"replay_max_age {self.replay_max_age} leaves nothing to replay: at the next rollout, pairs are "
                f"{self.updates_per_rollout} updates old; set it to that at least"
            )
        refuse_given(self, {"sync_ref_model": "pairs of a replay keep the log-probabilities of one fixed reference"})
