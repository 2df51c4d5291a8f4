"""`PolicyTrainer`: TRL's `GRPOTrainer` with its own advantages and its own loss.

A step reads from top to bottom: sample, reward, advantage, score, loss. TRL generates, calls the reward functions,
scores with the reference and logs in `_generate_and_score_completions`; the rest is here.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.utils import gather, gather_object
from datasets import Dataset
from torch import Tensor
from trl import GRPOTrainer as TRLGRPOTrainer

from trl_ext.data.conversation import text_ids, truncate_prompt
from trl_ext.losses import PolicyScores, masked_sum
from trl_ext.models.batches import temporarily
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.reward_guard import RewardGuard
from trl_ext.resilience.training import ResilientTraining
from trl_ext.rollouts.generation import without_own_settings
from trl_ext.rollouts.stopping import check_stop, cut_at_stop, end_of_stop
from trl_ext.trainers.context import PROMPTS, check_context, check_inputs, quiet_about_length, report_plain_prompts
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.metrics import StepMetrics
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import keeps_groups, pack_trainer, regroup
from trl_ext.trainers.passes import halves_of_groups, is_empty, no_loss, passes_of_groups, window_of_passes
from trl_ext.trainers.policies import check_base_of_adapter, reference_in_memory
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.policy.generation import (
    ending_at_stop,
    greedy_rewards,
    install_sampler,
    samples_the_policy,
    text_cut_at_stop,
)
from trl_ext.trainers.policy.resampling import check_resampling, sample_rollout
from trl_ext.trainers.policy.reward_functions import (
    Rewards,
    as_reward_functions,
    length_penalty,
    named_and_guarded,
    place_reward_models,
    reward_models,
)
from trl_ext.trainers.policy.rollout_metrics import log_advantages, log_ended, log_rollout
from trl_ext.trainers.policy.scoring import count_from_the_first_token
from trl_ext.trainers.token_budget import TokenBudgets, token_budget

# What TRL passes on to a model with images.
_OF_IMAGES = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles")
_OF_IMAGES += ("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")
# By name, a sum over a micro-batch and how much it sums over, or an extreme value.
Metrics = dict[str, Any]
EXTREMES = ("clip_ratio/low_min", "clip_ratio/high_max")


@dataclass
class ScoredTokens:
    """What a forward pass gives for the tokens of responses.

    Attributes:
        log_probs: of the tokens, [B, T].
        entropies: of the distributions that they are from, [B, T]; None if not asked for.
        auxiliary_loss: the load-balancing loss of a mixture of experts, a scalar; None for other models.
        values: of a value function before each token, [B, T]; None without one.
    """

    log_probs: Tensor
    entropies: Tensor | None
    auxiliary_loss: Tensor | None
    values: Tensor | None = None


def takes_several_turns(given: dict[str, Any]) -> bool:
    """Whether arguments of a trainer make responses of several turns."""
    return any(given.get(name) for name in ("tools", "environment_factory", "rollout_func"))


class PolicyTrainer(ResilientTraining, WritesModelCard, StepMetrics, TokenBudgets, TRLGRPOTrainer):
    """Trains a policy on its own samples with any algorithm: `PolicyConfig(algorithm=...)`.

    Accepts the arguments of `trl.GRPOTrainer`, with a `PolicyConfig`, and keeps its features: generation with
    transformers or vLLM, tools, adapters, checkpoints, metrics, distributed training. It differs in six ways.
    Advantages and loss are the algorithm's. Prompts longer than `max_prompt_tokens` lose their beginning. A response
    also ends at a text in `stop`, which it keeps. Reward functions receive `finished`, which marks the responses that
    ended, and may be `trl_ext.rewards.RewardModel`s, whose adapters share the policy's backbone if possible. A token
    mean divides by the tokens of the whole optimizer batch. Updates that are not finite are skipped.

    Logged in addition to TRL's metrics: `reward_min`, `reward_max`, `advantages/`, `shaped_reward` (after penalties)
    where it differs from `reward`, `unscorable`, `distinct_2` and `collapsed` of the rollout, `skipped_updates`,
    `log_ratio/clamped` (share of tokens with a log-ratio beyond 20, where the loss has no gradient), `greedy/` for a
    greedy baseline, and `resampling/` for `resample_groups`. `kl` is the mean of k3 per token.

    Attributes:
        algorithm: the algorithm with its settings resolved.
        rewards: what the reward functions gave the latest rollout.
        sampler: what samples on a CPU in place of transformers; None for vLLM, a GPU, or `fast_rollouts off`.
        rollouts, further_rollouts: counts; those sampled only to replace groups of others are counted apart.

    Raises:
        TypeError: `args` is not a `PolicyConfig`.
        ValueError: no source of rewards, token limits beyond the model's context, a stop string that is a special
            token, or an unusable reward model.
    """

    _tag_names = [*TRLGRPOTrainer._tag_names, "trl_ext", "policy-optimization"]
    _name = "Policy optimization"
    _paper: ClassVar[dict] = {}
    _config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    _without_signal = "every advantage was 0, as where all responses to a prompt are rewarded alike or not at all"
    _counts_of_rollouts = ("_seen_signal", "rollouts", "further_rollouts")
    carried_over = (*ResilientTraining.carried_over, *_counts_of_rollouts)

    def __init__(self, model, reward_funcs=None, args: PolicyConfig | None = None, **kwargs: Any):
        args = configuration(self, args, self._config_class)
        model = check_inputs(model, kwargs, PROMPTS)
        self.algorithm = args.build_algorithm()
        functions = as_reward_functions(reward_funcs, args.packing)
        self._check_arguments(functions, args, kwargs)
        self._reward_models = reward_models(functions)
        self.reward_guard = RewardGuard(args.reward_errors, args.reward_timeout)
        self.rewards: Rewards | None = None
        self.rollouts = self.further_rollouts = 0
        self._seen_signal = False
        # Of each micro-batch of the latest rollout, over all processes.
        self._tokens: Tensor | None = None
        self.plain_reward_functions, guarded = named_and_guarded(functions, self.reward_guard)
        # TRL keeps a reference for any beta but 0.
        beta = args.beta if self.algorithm.needs_reference else 0.0
        with reference_in_memory(TRLGRPOTrainer, model), temporarily(args, beta=beta):
            super().__init__(model, guarded, args, **kwargs)
        # TRL has appended the rewards of environments.
        self.reward_funcs[len(functions) :] = map(self.reward_guard.wrap, self.reward_funcs[len(functions) :])
        # TRL divides its own advantages, which are replaced, by one of its deviations.
        self.scale_rewards = "group"
        self._check_model()
        self._prepare_models()

    def _prepare_models(self) -> None:
        """Change how the models score and sample, immediately after TRL has put its heads on them."""
        self.packing = pack_trainer(self)
        self.token_budget = token_budget(self, obstacle=self._split_changes_the_update())
        models = [model for model in (self.model, self.ref_model) if model is not None]
        count_from_the_first_token(*map(self.accelerator.unwrap_model, models))
        place_reward_models(self, self._reward_models)
        self.sampler = install_sampler(self)

    def _split_changes_the_update(self) -> str | None:
        """Why the division of an optimizer batch into passes changes its gradient; None if it does not."""
        if self.args.steps_per_generation % self.args.gradient_accumulation_steps:
            return "an optimizer step spans rollouts"
        if self._entropy_bonus_enabled or self.top_entropy_quantile < 1 or self.aux_loss_enabled:
            return "an entropy bonus, a quantile and a router's loss are means over a pass"
        return "your own loss may compare the responses of a pass" if self.algorithm.surrogate == "own" else None

    def _check_arguments(self, functions: list, args: PolicyConfig, given: dict[str, Any]) -> None:
        if not functions and not given.get("environment_factory"):
            raise ValueError("no reward function: give reward_funcs, or an environment_factory with get_reward")
        if self.algorithm.reads("greedy_rewards") and takes_several_turns(given):
            raise ValueError("a greedy baseline is of single turns: leave out tools, environments and rollout_func")
        dataset, needed = given.get("train_dataset"), args.generation_batch_size // args.num_generations
        if isinstance(dataset, Dataset) and len(dataset) < needed:
            raise ValueError(
                f"the training data has {len(dataset)} prompts, and a rollout takes {needed}: give more prompts, or a "
                "smaller generation_batch_size"
            )
        if args.resample_groups:
            check_resampling(given)

    def _check_model(self) -> None:
        args = self.args
        if self.beta and self.ref_model is None:
            check_base_of_adapter(self.model)
        report_plain_prompts(self._tokenizer, self.train_dataset)
        if args.max_prompt_tokens is not None:
            quiet_about_length(self._tokenizer)
        limits = {"max_completion_length": args.max_completion_length, "max_prompt_tokens": args.max_prompt_tokens}
        prompts = self.train_dataset["prompt"] if isinstance(self.train_dataset, Dataset) else []
        check_context(self.model, prompts, limits, self.processing_class)
        check_stop(args.stop or (), self._tokenizer)

    # ---- What several parts of a step read ----

    @property
    def metrics(self) -> dict[str, list[float]]:
        """What this training or this evaluation has recorded since the last log, by name."""
        return self._metrics["train" if self.model.training else "eval"]

    @property
    def group_size(self) -> int:
        """Responses to each prompt, in training or in evaluation."""
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def sampled_responses(self) -> int:
        """How many responses training has sampled so far over all processes, with those that were not trained on."""
        return (self.rollouts + self.further_rollouts) * self.args.generation_batch_size

    @property
    def rows_per_pass(self) -> int:
        """The largest number of rows in a forward pass of this process, in training or in evaluation."""
        args = self.args
        return args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size

    def own_rows(self, rows: Any) -> Any:
        """This process's part of what all processes have of equal size, one after another."""
        count = len(rows) // self.accelerator.num_processes
        first = self.accelerator.process_index * count
        return rows[first : first + count]

    # ---- Sample ----

    def _tokenize_prompts(self, prompts: list):
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        if isinstance(prompts[0], str):
            prompt_ids = [text_ids(self._tokenizer, prompt) for prompt in prompts]
        prompt_ids = [truncate_prompt(ids, self.args.max_prompt_tokens) for ids in prompt_ids]
        return prompt_ids, images, multimodal_fields

    def _generate_single_turn(self, *args, **kwargs):
        with without_own_settings(self.model), ending_at_stop(self):
            completion_ids, log_probs = super()._generate_single_turn(*args, **kwargs)
        if self.args.stop:
            # transformers pads a response that has met a stop string while others continue.
            cut = [cut_at_stop(self._tokenizer, ids, self.args.stop) for ids in completion_ids]
            completion_ids = [ids if end is None else end[0] for ids, end in zip(completion_ids, cut, strict=True)]
        if self.sampler is not None and self.sampler.log_probs is not None and samples_the_policy(self):
            log_probs = self.sampler.log_probs.tolist()
        if log_probs is not None:
            log_probs = [row[: len(ids)] for row, ids in zip(log_probs, completion_ids, strict=True)]
        return completion_ids, log_probs

    def has_ended(self, ids: list[int]) -> bool:
        """Whether a response, given as token ids, ended by itself or at a stop string, and not at the limit."""
        if ids and ids[-1] in self.eos_token_ids:
            return True
        stop = self.args.stop
        return bool(stop) and end_of_stop(self._tokenizer.decode(ids, skip_special_tokens=True), stop) is not None

    def sample(self, inputs: list[dict]) -> dict:
        """This process's part of a rollout, which TRL has scored with the reference; its rewards are in `rewards`."""
        return sample_rollout(self, super()._generate_and_score_completions, inputs)

    # ---- Reward ----

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.rewards = self.reward(inputs, prompts, completions, completion_ids_list)
        if self.args.stop:
            log_ended(self.metrics, self.rewards)
        return self.rewards.by_function

    def reward(self, inputs, prompts, completions, completion_ids) -> Rewards:
        """Call the reward functions on this process's responses."""
        device = self.accelerator.device
        finished = [self.has_ended(ids) for ids in completion_ids]
        if self.args.stop:
            completions = [text_cut_at_stop(one, self.args.stop) for one in completions]
        inputs = [{**row, "finished": ended} for row, ended in zip(inputs, finished, strict=True)]
        guard = self.reward_guard
        guard.begin()
        by_function = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        # TRL itself scores modules, which the guard does not see.
        modules = [isinstance(function, torch.nn.Module) for function in self.reward_funcs]
        scores = self.own_rows(by_function)[:, torch.tensor(modules, device=by_function.device)]
        not_finite = ~scores.isfinite().all(dim=1)
        not_finite[list(guard.not_finite)] = True
        # A response on which one function failed has no reward; a sum would count the missing part as 0.
        faulty = not_finite.clone()
        faulty[list(guard.failed)] = True
        return Rewards(
            by_function=by_function.masked_fill(gather(faulty).unsqueeze(1), float("nan")),
            finished=torch.tensor(finished, device=device),
            lengths=torch.tensor([len(ids) for ids in completion_ids], device=device),
            not_finite=not_finite,
            failed=len(guard.failed),
        )

    def weighted_sum(self, by_function: Tensor) -> Tensor:
        """The reward of each response, [N], from those by function, [N, K]; NaN where no function gave one."""
        total = (by_function * self.reward_weights.to(by_function.device)).nansum(dim=1)
        return total.masked_fill(by_function.isnan().all(dim=1), float("nan"))

    def total(self, rewards: Rewards) -> Tensor:
        """The reward of each response over all processes, less the penalties on length. [N]."""
        return self.weighted_sum(rewards.by_function) - length_penalty(self.args, rewards)

    @torch.no_grad()
    def kl_penalty(self, rollout: dict) -> Tensor:
        """The KL penalty on the reward of each of this process's responses. [n]."""
        log_probs = rollout.get("old_per_token_logps")
        if log_probs is None:
            log_probs = self.score(self.model, rollout).log_probs
        return self.algorithm.reward_penalty(log_probs, rollout["ref_per_token_logps"], self._token_mask(rollout))

    # ---- Advantage ----

    def _generate_and_score_completions(self, inputs):
        rollout = self.sample(inputs)
        rewards = self.weighted_sum(self.rewards.by_function)
        penalties = length_penalty(self.args, self.rewards)
        if self.algorithm.kl_in == "reward" and self.beta != 0.0:
            penalties = penalties + gather(self.kl_penalty(rollout))
        log_rollout(self, rewards, rewards - penalties, rollout)
        signal = self.compute_advantages(inputs, rollout, rewards - penalties)
        rollout["bad_reward"] = self.rewards.not_finite
        groups = torch.arange(len(rewards), device=rewards.device) // self.group_size
        rollout["group"] = self.own_rows(groups)
        if self.args.reward_errors == "skip":
            self.metrics["reward_errors"].append(float(sum(gather_object([self.rewards.failed]))))
        if self.model.training:
            self.rollouts += 1
            self._seen_signal = self._seen_signal or bool(signal.any())
        return rollout

    def compute_advantages(self, inputs: list[dict], rollout: dict, rewards: Tensor) -> Tensor:
        """Put this process's `advantages` into its part of a rollout.

        Args:
            inputs: this process's rows.
            rollout: what `sample` returned for them.
            rewards: of all processes after all penalties, [N].

        Returns:
            What an update learns from, over all processes; 0 everywhere if there is nothing to learn.
        """
        lengths = gather(self._token_mask(rollout).sum(dim=1))
        given = {"lengths": lengths, "components": self.rewards.by_function, "weights": self.reward_weights}
        if self.algorithm.reads("greedy_rewards"):
            given["greedy_rewards"], greedy = greedy_rewards(self, inputs)
            self.rewards.not_finite |= greedy.not_finite.repeat_interleave(self.group_size)
            self.rewards.failed += greedy.failed
        advantages = self.algorithm.advantages(rewards, self.group_size, **given)
        log_advantages(self, advantages)
        rollout["advantages"] = self.own_rows(advantages)
        return advantages

    def _prepare_inputs(self, generation_batch):
        earlier = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._buffered_inputs is not earlier:
            # TRL has just split a new rollout into its micro-batches.
            if keeps_groups(self):
                self._buffered_inputs = regroup(self._buffered_inputs)
            self._count_tokens(self._buffered_inputs)
            packed = self.token_budget is not None and self.token_budget.divides()
            if packed and "num_images" not in self._buffered_inputs[0]:
                self._divide_into_passes()
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _divide_into_passes(self) -> None:
        """Put the passes of each optimizer step in place of its micro-batches."""
        batches, size = self._buffered_inputs, self.args.gradient_accumulation_steps
        # Without dropout, a pass encodes the prompt of a group once.
        settings = {"shares": not self.packing.draws_dropout(), "pad_token_id": self._tokenizer.pad_token_id}
        self._buffered_inputs = []
        for start in range(0, len(batches), size):
            window = batches[start : start + size]
            largest = max(one["prompt_ids"].numel() + one["completion_ids"].numel() for one in window)
            passes = passes_of_groups(window, self.token_budget.of(largest), self.accelerator, **settings)
            self.token_budget.note([self.halves(one)[0] for one in passes], size)
            self._buffered_inputs += window_of_passes(passes, size)

    def halves(self, one: dict) -> tuple[int, list[dict]]:
        return halves_of_groups(one, shares=not self.packing.draws_dropout())

    @contextmanager
    def in_place_of(self, inputs, one: dict):
        # At the first pass of a rollout, TRL would sample another one.
        with temporarily(self, _prepare_inputs=lambda _: one):
            yield inputs

    def _count_tokens(self, batches: list[dict]) -> None:
        tokens = torch.stack([self._token_mask(batch).sum() for batch in batches])
        self._tokens = self.accelerator.reduce(tokens.float(), reduction="sum")

    @property
    def mean_tokens(self) -> Tensor | None:
        """Tokens of a micro-batch, a mean over those of an optimizer step on all processes; None in evaluation."""
        if not self.model.training or self._tokens is None:
            return None
        accumulation, window = self.current_gradient_accumulation_steps, self._tokens
        # A step that spans several rollouts begins before the later ones exist: it uses the average of this rollout.
        if len(self._tokens) % accumulation == 0:
            window = self._tokens.view(-1, accumulation)[self._step % len(self._tokens) // accumulation]
        return (window.sum() / (self.accelerator.num_processes * len(window))).clamp(min=1)

    @property
    def _mean_rows(self) -> int | None:
        """Responses of a micro-batch, if those of an optimizer step are in fewer passes; otherwise None."""
        return self.args.per_device_train_batch_size if self.model.training and self.token_budget is not None else None

    def micro_batches_of(self, mask: Tensor) -> Tensor:
        """How many micro-batches a pass with this mask stands for."""
        return mask.new_tensor(len(mask) / (self._mean_rows or len(mask)), dtype=torch.float32)

    # ---- Score ----

    @staticmethod
    def _token_mask(inputs: dict) -> Tensor:
        """1 where the policy chose the token: neither padding nor tool output. [B, T]."""
        mask = inputs["completion_mask"]
        return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask

    def score(self, model, inputs: dict, *, entropies: bool = False) -> ScoredTokens:
        """Forward passes over the responses of a micro-batch, or of a rollout in parts of that size."""
        found = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            # A training step takes the rows of its pass together.
            batch_size=len(inputs["completion_ids"]) if entropies else self.rows_per_pass,
            compute_entropy=entropies,
            compute_aux_loss=entropies and self.aux_loss_enabled,
            **{name: inputs[name] for name in _OF_IMAGES if name in inputs},
        )
        return ScoredTokens(*found)

    # ---- Loss ----

    def _compute_loss(self, model, inputs):
        if is_empty(inputs):
            return no_loss(self.accelerator.device)
        self.begin_pass(inputs)
        loss, metrics = self.loss(self.score(model, inputs, entropies=True), inputs)
        extremes = {name: metrics.pop(name) for name in EXTREMES if name in metrics}
        if not self.model.training:
            mask = self._token_mask(inputs)
            weight = mask.sum() if self.algorithm.aggregation == "token_mean" else mask.new_tensor(len(mask))
            # The loss without its further terms is such a mean too.
            means = {"loss": loss} | {name: metrics[name][0] for name in ("policy_loss",) if name in metrics}
            metrics |= {name: (mean * weight, weight) for name, mean in means.items()}
        self.add_metrics(metrics, extremes=extremes)
        if not self.model.training:
            return loss
        self.update_guard.observe_reward(inputs["bad_reward"].any())
        return loss / self.current_gradient_accumulation_steps

    def loss(self, scored: ScoredTokens, inputs: dict) -> tuple[Tensor, Metrics]:
        """The loss of a micro-batch, to be averaged over those of an optimizer step, and what it shows."""
        mask, old_log_probs = self._token_mask(inputs), inputs.get("old_per_token_logps")
        scores = PolicyScores(
            log_probs=scored.log_probs,
            old_log_probs=scored.log_probs.detach() if old_log_probs is None else old_log_probs,
            mask=mask,
            advantages=inputs["advantages"],
            ratio=self.algorithm.ratio,
            sampler_log_probs=inputs.get("sampling_per_token_logps"),
            ref_log_probs=inputs.get("ref_per_token_logps"),
        )
        weights, of_entropy = self._response_weights(scores, inputs), mask
        if self.top_entropy_quantile < 1:
            is_high = self.get_high_entropy_mask(scored.entropies, mask, 1 - self.top_entropy_quantile)
            weights, of_entropy = [*weights, is_high], mask * is_high
        loss, means = self.algorithm.loss(
            scores,
            weights=math.prod(weights) if weights else None,
            token_count=self.mean_tokens,
            row_count=self._mean_rows,
            constant=self.max_completion_length,
        )
        metrics = self._metrics_of_loss(means, mask)
        metrics["entropy"] = (masked_sum(scored.entropies, mask), mask.sum())
        once = self.micro_batches_of(mask)
        if self._entropy_bonus_enabled:
            metrics["policy_loss"] = (loss, once)
            loss = loss - self.entropy_coef * masked_sum(scored.entropies, of_entropy) / of_entropy.sum().clamp(min=1)
            if self.model.training and self.accelerator.sync_gradients:
                self.metrics["entropy_coef"].append(self.entropy_coef)
        if self.aux_loss_enabled:
            metrics["aux_loss"] = (scored.auxiliary_loss, once)
            loss = loss + self.router_aux_loss_coef * scored.auxiliary_loss
        return loss, metrics

    def _response_weights(self, scores: PolicyScores, inputs: dict) -> list[Tensor]:
        """Factors of the surrogate: TRL's mask of off-policy responses, and its importance ratio of vLLM."""
        weights = []
        if self.off_policy_mask_threshold is not None:
            is_kept = self.get_off_policy_mask(
                advantages=scores.advantages,
                per_token_logps=scores.log_probs,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", scores.old_log_probs),
                mask=scores.mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            weights.append(is_kept)
        if self.use_vllm and self.vllm_importance_sampling_correction and not self.algorithm.reads_sampler:
            weights.append(inputs["importance_sampling_ratio"])
        return weights

    def _metrics_of_loss(self, means: dict[str, Tensor], mask: Tensor) -> Metrics:
        """What the algorithm's loss says of a micro-batch: sums and counts, and extremes as they are."""
        of_responses, found = self.algorithm.ratio == "sequence", {}
        for name, mean in means.items():
            count = mask.new_tensor(len(mask)) if of_responses and name.startswith("clip") else mask.sum()
            found[name] = mean if name in EXTREMES else (mean * count, count)
        return found

    # ---- Checkpoints ----

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # TRL samples at a fixed interval of micro-batches. The checkpoint does not store their count, since a resumed
        # run may use micro-batches of another size: the count follows from the data that the epoch has used.
        if kwargs["epoch"] == kwargs["epochs_trained"]:
            per_rollout = self.args.steps_per_generation * self.num_iterations
            self._step = kwargs["steps_trained_in_current_epoch"] % per_rollout
            self._buffered_inputs = None
            if self._step:
                warn_once_per_run(f"step {self.state.global_step} lies within a rollout: the rest is sampled anew")
        super()._run_epoch(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any):
        result = super().train(*args, **kwargs)
        if self._step and not self._seen_signal:
            warn_once_per_run(f"nothing was learned from rewards: {self._without_signal}")
        return result
