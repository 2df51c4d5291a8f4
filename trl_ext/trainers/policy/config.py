"""`PolicyConfig`: TRL's `GRPOConfig` with a named algorithm and device-dependent defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.hf_argparser import HfArg
from trl import GRPOConfig as TRLGRPOConfig

from trl_ext.algorithms import SETTINGS, Algorithm, AlgorithmSettings, algorithms
from trl_ext.names import check_choice
from trl_ext.processes import warn_once_per_run, world_size
from trl_ext.rollouts.stopping import check_stop
from trl_ext.trainers.defaults import (
    PackedFields,
    check_at_least,
    check_training,
    parse_json_option,
    resolve_device_defaults,
)
from trl_ext.trainers.trl_settings import POLICY_SETTINGS, merge, refuse_given, translate

# TRL's settings that act inside its own loss: setting -> what to use.
_NOT_CARRIED = {
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        "VESPO is --algorithm recipes/own/vespo.py:vespo, with --algorithm_kwargs",
    ),
    **dict.fromkeys(
        ("use_adaptive_entropy", "entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"),
        "entropy_coef stays as it is given: train `trl.GRPOTrainer` to adapt it",
    ),
    "sapo_temperature_pos": "use --algorithm_kwargs '{\"temperature_pos\": 1.0}'",
    "sapo_temperature_neg": "use --algorithm_kwargs '{\"temperature_neg\": 1.05}'",
    "label_smoothing_factor": "it belongs to the loss of transformers.Trainer",
}


def _own(meaning: str) -> Any:
    return HfArg(default=None, help=f"{meaning} Default: the algorithm's own.")


def _trl_setting(name: str, stands_for: str) -> Any:
    return _own(f"TRL's name for {stands_for}: {', '.join(map(str, POLICY_SETTINGS[name]))}.")


@dataclass
class PolicyConfig(AlgorithmSettings, PackedFields, TRLGRPOConfig):
    """Configuration of `PolicyTrainer`: the fields of `trl.GRPOConfig` except its loss, the algorithm's settings
    (`AlgorithmSettings`; None keeps the algorithm's own), the fields of `PackedFields`, and those below.

    Raises:
        ValueError: an unknown algorithm, settings that contradict the algorithm's name or one another, or a batch that
            does not divide into groups; the message names the flags and what to use instead.
    """

    # The algorithm of a named configuration; None if `algorithm` may be chosen.
    _method: ClassVar[str | None] = None
    # Its row, if it is not in the table.
    _row: ClassVar[Algorithm | None] = None

    algorithm: str = HfArg(
        default="grpo",
        help="A named algorithm (python -m trl_ext.algorithms lists them), or your own as file.py:function.",
    )
    algorithm_kwargs: dict[str, Any] | str | None = HfArg(
        default=None, help="Options of your own algorithm's function, as JSON."
    )
    loss_type: str | None = _trl_setting("loss_type", "surrogate and aggregation")
    importance_sampling_level: str | None = _trl_setting("importance_sampling_level", "ratio")
    scale_rewards: str | None = _trl_setting("scale_rewards", "an advantage")
    use_bias_correction_kl: bool | None = _trl_setting("use_bias_correction_kl", "kl_ratio_correction")
    delta: float | None = _own("TRL's name for dual_clip, at least 1 + epsilon_high.")
    num_generations: int | None = _own("Group size: responses per prompt.")
    max_prompt_tokens: int | None = HfArg(default=512, help="Longer prompts lose their beginning. None for no limit.")
    min_new_tokens: int = HfArg(default=0, help="Shortest response, in tokens.")
    stop: list[str] | None = HfArg(
        default=None, help="Texts that end a response, which keeps the one it met, as </answer>."
    )
    missing_eos_penalty: float = HfArg(
        default=0.0, help="Taken off the reward of a response that was cut at max_completion_length."
    )
    reward_errors: str = HfArg(
        default="raise",
        help="When a reward function fails: raise, or skip (the call's responses get no reward; counted).",
    )
    reward_timeout: float | None = HfArg(
        default=600.0,
        help="Seconds that a call of a reward function may take before reward_errors applies; 0 for no limit. The "
        "default is well below ddp_timeout, after which other processes give up without knowing why.",
    )
    share_backbone: str = HfArg(
        default="auto",
        help="Put reward adapters on the policy's base: auto where it can be done, always or refuse, never.",
    )
    keep_groups: str = HfArg(
        default="auto",
        help="Whether a group's responses stay in one micro-batch, where packing encodes their prompt once. auto: "
        "where that leaves the update as it is, since a whole rollout goes into one optimizer step and nothing but "
        "the loss is averaged within micro-batches. on: always. off: never.",
    )
    overlong_share: float | None = _own(
        "DAPO's soft punishment: over the last share of max_completion_length, a response's reward falls by up to 1. "
        "0: none."
    )
    resample_groups: int | None = _own(
        "Dynamic sampling: replace groups whose rewards are all equal, which teach nothing, by groups of further "
        "prompts, in at most this many further rollouts. 0: off."
    )
    fast_rollouts: str = HfArg(
        default="auto",
        help="auto: on a CPU, responses are sampled several times as fast as by transformers, where the model allows "
        "it and a check at the first batch agrees. off: transformers samples.",
    )
    disable_dropout: bool = HfArg(
        default=True, help="With dropout, the ratio is not 1 before the first update: two passes draw two masks."
    )

    def __post_init__(self):
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)
        refuse_given(self, _NOT_CARRIED)
        if self._method is not None and self.algorithm != self._method:
            raise ValueError(
                f"{type(self).__name__} is the algorithm {self._method!r} and cannot be {self.algorithm!r}: "
                "use PolicyConfig, or recipes/online.py --algorithm, to choose an algorithm by name"
            )
        self.algorithm_kwargs = parse_json_option("algorithm_kwargs", self.algorithm_kwargs)
        algorithm = self.build_algorithm()
        self.beta = algorithm.beta
        if self.num_generations is None:
            self.num_generations = algorithm.group_size
        for name in ("resample_groups", "overlong_share"):
            setattr(self, name, algorithm.rollout_setting(name, getattr(self, name)))
        self._check_values()
        self._check_group(algorithm)
        self._give_generation_limits()
        resolve_device_defaults(self)
        self._post_init_of_any_group_size()
        if algorithm.reads("greedy_rewards"):
            check_whole_groups(self, "a greedy baseline needs whole groups on every process")
        if algorithm.ratio == "none" and self.updates_per_rollout > 1:
            warn_once_per_run(
                f"{self.algorithm} has no importance ratio, and a rollout serves {self.updates_per_rollout} updates: "
                "all but the first are off-policy; num_iterations 1 and a generation_batch_size of one update avoid it"
            )
        self._save_between_rollouts()

    def build_algorithm(self) -> Algorithm:
        """The algorithm with its settings resolved."""
        given = {name: getattr(self, name) for name in SETTINGS}
        translated = translate(self, POLICY_SETTINGS)
        if self.delta is not None:
            translated[f"delta {self.delta}"] = {"dual_clip": self.delta}
        if self.loss_type == "cispo" and self.epsilon_high is not None:
            # TRL passes its cap on the ratio as `epsilon_high`.
            translated[f"epsilon_high {self.epsilon_high}"] = {"ratio_cap": given.pop("epsilon_high")}
        given = merge(given, translated)
        row = self._row or algorithms.find(self.algorithm)
        try:
            algorithm = row.replace(surrogate_options=self.algorithm_kwargs, **given)
        except ValueError as error:
            # The error has our names of the settings.
            error.args = (", ".join([*translated, str(error)]),)
            raise
        if self.scale_rewards == "batch" and algorithm.advantage_options:
            raise ValueError(f"{algorithm.name} divides by the deviation of the advantages: leave scale_rewards out")
        if self.delta is not None and self.delta < (end := 1 + algorithm.epsilon_high):
            raise ValueError(f"delta must be at least 1 + epsilon_high, {end:g}, got {self.delta}")
        return algorithm

    @property
    def updates_per_rollout(self) -> int:
        """The number of optimizer steps that use one rollout; the next step samples a new one."""
        micro_batches = self.steps_per_generation * self.num_iterations
        return math.lcm(micro_batches, self.gradient_accumulation_steps) // self.gradient_accumulation_steps

    def _check_values(self) -> None:
        least = {"num_generations": 1, "num_iterations": 1, "max_completion_length": 1}
        least |= dict.fromkeys(("reward_timeout", "missing_eos_penalty", "resample_groups"), 0)
        check_training(self, **least)
        check_at_least(self, {}, positive=("temperature", "top_p"), shares=("overlong_share", "top_p"))
        limit = self.max_completion_length
        if limit is None or self.min_new_tokens > limit:
            raise ValueError(
                f"max_completion_length must be at least min_new_tokens, {self.min_new_tokens}, got {limit}"
            )
        check_choice("reward_errors", self.reward_errors, ("raise", "skip"))
        check_choice("share_backbone", self.share_backbone, ("auto", "always", "never"))
        check_choice("keep_groups", self.keep_groups, ("auto", "on", "off"))
        check_choice("fast_rollouts", self.fast_rollouts, ("auto", "off"))

    def _check_group(self, algorithm: Algorithm) -> None:
        if self.num_generations == 1 and algorithm.group_relative:
            raise ValueError(
                f"the algorithm {self.algorithm!r} compares the responses to one prompt, not num_generations 1: "
                "use at least 2, or --algorithm remax or reinforce"
            )
        if self.resample_groups and algorithm.group_relative is False:
            raise ValueError(f"algorithm {self.algorithm!r} also learns from equal rewards: leave resample_groups 0")
        if algorithm.reads("components") and (
            self.missing_eos_penalty or self.overlong_share or algorithm.kl_in == "reward"
        ):
            raise ValueError(
                f"the advantage {algorithm.advantage} reads no penalty on the sum of the reward functions: leave out "
                "missing_eos_penalty, overlong_share and kl_in reward"
            )

    def _give_generation_limits(self) -> None:
        """Pass on `min_new_tokens`, and `stop` to vLLM, under the names that transformers or vLLM uses for them."""
        given: dict[str, Any] = {}
        if self.min_new_tokens:
            given["min_tokens" if self.use_vllm else "min_new_tokens"] = self.min_new_tokens
        if self.stop:
            self.stop = list(check_stop(self.stop))
            if self.mask_truncated_completions or self.use_transformers_continuous_batching:
                raise ValueError(
                    "stop does not go with mask_truncated_completions and use_transformers_continuous_batching, which "
                    "do not know of it"
                )
            if self.use_vllm:
                given |= {"stop": self.stop, "include_stop_str_in_output": True}
        self.generation_kwargs = parse_json_option("generation_kwargs", self.generation_kwargs)
        if given:
            self.generation_kwargs = (self.generation_kwargs or {}) | given

    def _post_init_of_any_group_size(self) -> None:
        """Run TRL's checks, which reject groups of 1."""
        group = self.num_generations
        if group == 1:
            passes = self.steps_per_generation or self.gradient_accumulation_steps
            self.num_generations_eval = self.num_generations_eval or 1
            # Temporary: any size that passes TRL's checks.
            self.num_generations = self.generation_batch_size or (
                self.per_device_train_batch_size * world_size() * passes
            )
            if self.num_generations == 1:
                raise ValueError("a rollout of one response: set generation_batch_size to at least 2")
        super().__post_init__()
        self.num_generations = group

    def _save_between_rollouts(self) -> None:
        """Save checkpoints only at the end of a rollout, since rollouts are not saved and would be sampled again."""
        period, asked = self.updates_per_rollout, self.save_steps
        if self.save_strategy != "steps" or period == 1 or asked % period == 0:
            return
        if asked < 1 or self.load_best_model_at_end:
            raise ValueError(f"save_steps {asked} must be a multiple of {period}, the updates that a rollout serves")
        self.save_steps = math.ceil(asked / period) * period
        warn_once_per_run(
            f"saving every {self.save_steps} steps instead of every {asked:g}: a rollout is not part of a checkpoint"
        )


def check_whole_groups(args: PolicyConfig, why: str) -> None:
    """Raise ValueError, with the reason `why`, if processes would share a prompt's responses, also in evaluation."""
    sizes = [(args.per_device_train_batch_size * args.steps_per_generation, args.num_generations)]
    if args.eval_strategy != "no":
        sizes.append((args.per_device_eval_batch_size, args.num_generations_eval or args.num_generations))
    for count, group in sizes:
        if count % group:
            raise ValueError(
                f"{why}, and {count} responses per process do not divide into groups of {group}: change the batch size"
            )
