"""`PolicyConfig`: TRL's `GRPOConfig` with a named algorithm and device-dependent defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.hf_argparser import HfArg
from trl import GRPOConfig as TRLGRPOConfig
from trl import RLOOConfig as TRLRLOOConfig

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

# Method -> TRL's configuration of the same name, and the fields of its loss whose defaults differ, each with the
# fields here that decide the same.
_OF_GRPO = {"beta": "beta", "loss_type": "loss_type surrogate aggregation"}
_OF_GRPO |= {"scale_rewards": "scale_rewards advantage std_ddof"}
_UNLIKE_TRL = {
    "grpo": (TRLGRPOConfig, _OF_GRPO),
    "rloo": (TRLRLOOConfig, {"beta": "beta", "num_generations": "num_generations"}),
}
# TRL's settings that act inside its own loss: setting -> what to use.
_NOT_CARRIED = {
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        "VESPO is --algorithm recipes/own/vespo.py:vespo, with --algorithm_kwargs",
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
    # One line: which defaults of TRL's configuration of the same name are others; empty if there are none.
    unlike_trl = ""

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
        self._compare_defaults_with_trl()
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
        self._say_what_is_not_exact(algorithm)
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
            raise ValueError(
                f"scale_rewards 'batch' divides by the deviation of the rewards, {algorithm.name} by that of the "
                "advantages: leave scale_rewards out"
            )
        if self.delta is not None and self.delta < 1 + algorithm.epsilon_high:
            end = 1 + algorithm.epsilon_high
            raise ValueError(
                f"delta must be at least 1 + epsilon_high, {end:g}, where the clip ends, got {self.delta}"
            )
        return algorithm

    @property
    def updates_per_rollout(self) -> int:
        """The number of optimizer steps that use one rollout; the next step samples a new one."""
        micro_batches = self.steps_per_generation * self.num_iterations
        return math.lcm(micro_batches, self.gradient_accumulation_steps) // self.gradient_accumulation_steps

    def _compare_defaults_with_trl(self) -> None:
        stock, fields_of_loss = _UNLIKE_TRL.get(self._method, (None, {}))
        given = {name for name in " ".join(fields_of_loss.values()).split() if getattr(self, name) is not None}
        unset = [name for name, ours in fields_of_loss.items() if given.isdisjoint(ours.split())]
        if unset:
            name = type(self).__name__
            theirs = ", ".join(f"{field_name} {getattr(stock, field_name)}" for field_name in unset)
            self.unlike_trl = f"{name} of trl_ext has the paper's defaults; those of trl.{name} are {theirs}"

    def _check_values(self) -> None:
        least = {"num_generations": 1, "num_iterations": 1, "max_completion_length": 1}
        least |= dict.fromkeys(("reward_timeout", "missing_eos_penalty", "resample_groups", "top_k"), 0)
        check_training(self, **least)
        positive, shares = ("temperature", "repetition_penalty", "top_p"), ("overlong_share", "min_p", "top_p")
        check_at_least(self, {}, positive=positive, shares=shares)
        if self.max_completion_length is None:
            raise ValueError("max_completion_length must be at least 1, got None: it is the budget of a response")
        if not 0 <= self.min_new_tokens <= self.max_completion_length:
            raise ValueError(
                f"min_new_tokens must be from 0 to max_completion_length ({self.max_completion_length}), "
                f"got {self.min_new_tokens}"
            )
        if self.top_k == 1:
            raise ValueError("top_k 1 samples from one token, so that responses are all alike; 0 is all tokens")
        check_choice("reward_errors", self.reward_errors, ("raise", "skip"))
        check_choice("share_backbone", self.share_backbone, ("auto", "always", "never"))
        check_choice("keep_groups", self.keep_groups, ("auto", "on", "off"))
        check_choice("fast_rollouts", self.fast_rollouts, ("auto", "off"))

    def _check_group(self, algorithm: Algorithm) -> None:
        if self.num_generations == 1 and algorithm.group_relative:
            raise ValueError(
                f"the algorithm {self.algorithm!r} compares the responses to one prompt, and num_generations 1 leaves "
                "nothing to compare: use at least 2, or --algorithm remax or reinforce"
            )
        if self.resample_groups and algorithm.group_relative is False:
            raise ValueError(
                f"resample_groups replaces groups of equal rewards, and the algorithm {self.algorithm!r} learns from "
                "them too: leave it 0"
            )
        of_functions = (self.missing_eos_penalty, self.overlong_share, algorithm.kl_in == "reward")
        if algorithm.reads("components") and any(of_functions):
            raise ValueError(
                f"the advantage {algorithm.advantage} reads each reward function by itself, and no penalty on their "
                "sum: leave out missing_eos_penalty, overlong_share and kl_in reward"
            )

    def _give_generation_limits(self) -> None:
        """Pass on `min_new_tokens`, and `stop` to vLLM, under the names that transformers or vLLM uses for them."""
        given: dict[str, Any] = {}
        if self.min_new_tokens:
            given["min_tokens" if self.use_vllm else "min_new_tokens"] = self.min_new_tokens
        if self.stop:
            self.stop = list(check_stop(self.stop))
            for name in ("mask_truncated_completions", "use_transformers_continuous_batching"):
                if getattr(self, name):
                    raise ValueError(f"{name} does not go with stop: it knows of no responses that a text ends")
            if self.use_vllm:
                given |= {"stop": self.stop, "include_stop_str_in_output": True}
        self.generation_kwargs = parse_json_option("generation_kwargs", self.generation_kwargs)
        if given:
            self.generation_kwargs = (self.generation_kwargs or {}) | given

    def _post_init_of_any_group_size(self) -> None:
        """Run TRL's checks, which reject groups of 1, and suggest a batch size where none would divide."""
        group, global_batch = self.num_generations, self.per_device_train_batch_size * world_size()
        passes = self.steps_per_generation or self.gradient_accumulation_steps
        batch = self.generation_batch_size or global_batch * passes
        if batch % group or batch % global_batch:
            raise ValueError(
                f"a rollout of {batch} responses does not divide into groups of num_generations {group} and forward "
                f"passes of {global_batch} responses (per_device_train_batch_size x processes): set "
                f"generation_batch_size {_nearest_multiple(batch, math.lcm(global_batch, group))}, the nearest that "
                "does, or change per_device_train_batch_size"
            )
        if group == 1:
            if batch == 1:
                raise ValueError("a rollout of one response: set generation_batch_size to at least 2")
            self.num_generations_eval = self.num_generations_eval or 1
            # Temporary: any size that passes TRL's checks.
            self.num_generations = batch
        super().__post_init__()
        self.num_generations = group

    def _say_what_is_not_exact(self, algorithm: Algorithm) -> None:
        if algorithm.ratio == "none" and self.updates_per_rollout > 1:
            warn_once_per_run(
                f"{self.algorithm} has no importance ratio, and a rollout serves {self.updates_per_rollout} updates: "
                "all but the first are off-policy; num_iterations 1 and a generation_batch_size of one update avoid it"
            )
        means = (algorithm.aggregation, algorithm.kl_aggregation if algorithm.needs_reference else None)
        if "token_mean" in means and self.steps_per_generation % self.gradient_accumulation_steps:
            warn_once_per_run(
                "an update spans several rollouts, whose later tokens are not known when it begins: the mean over "
                "tokens weighs each rollout alike; make steps_per_generation a multiple of gradient_accumulation_steps"
            )

    def _save_between_rollouts(self) -> None:
        """Save checkpoints only at the end of a rollout, since rollouts are not saved and would be sampled again."""
        period, asked = self.updates_per_rollout, self.save_steps
        if self.save_strategy != "steps" or period == 1 or (asked >= 1 and asked % period == 0):
            return
        if asked < 1:
            raise ValueError(
                f"save_steps {asked} is a share of the run: checkpoints lie between rollouts, so give a multiple of "
                f"{period} steps"
            )
        self.save_steps = int(math.ceil(asked / period) * period)
        if self.load_best_model_at_end and self.eval_strategy == "steps" and self.save_steps % self.eval_steps:
            raise ValueError(
                f"save_steps {int(asked)} would become {self.save_steps}, where a rollout is used up, and "
                f"load_best_model_at_end needs a multiple of eval_steps {self.eval_steps}: give both as multiples of "
                f"{period}"
            )
        if self.max_steps < 0 or asked <= self.max_steps:
            warn_once_per_run(
                f"a rollout serves {period} updates and is not part of a checkpoint: saving every {self.save_steps} "
                f"steps instead of every {int(asked)}, so that a resumed run goes on exactly as it would have"
            )


def check_whole_groups(args: PolicyConfig, why: str) -> None:
    """Raise ValueError, with the reason `why`, if processes would share a prompt's responses, also in evaluation."""
    local = args.per_device_train_batch_size * args.steps_per_generation
    sizes = [(local, args.num_generations, "per_device_train_batch_size or generation_batch_size")]
    if args.eval_strategy != "no":
        group = args.num_generations_eval or args.num_generations
        sizes.append((args.per_device_eval_batch_size, group, "per_device_eval_batch_size"))
    for count, group, change in sizes:
        if count % group:
            raise ValueError(
                f"{why}, and {count} responses per process do not divide into groups of {group}: change {change}; "
                f"the nearest that does is {_nearest_multiple(count, group)}"
            )


def _nearest_multiple(number: int, of: int) -> int:
    return max(round(number / of), 1) * of
