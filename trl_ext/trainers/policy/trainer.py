"""`PolicyTrainer`: TRL's `GRPOTrainer` with its own advantages and its own loss.

It overrides two methods, its seams. `_generate_and_score_completions` lets TRL generate, score and log, and then
inserts the advantages of the named algorithm. `_compute_loss` lets TRL run the forward pass and log its metrics, and
replaces the loss.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, ClassVar

import torch
from accelerate.utils import gather
from datasets import Dataset
from torch import Tensor
from trl import GRPOTrainer as TRLGRPOTrainer

from trl_ext.data.conversation import text_ids
from trl_ext.losses import PolicyScores
from trl_ext.models.batches import temporarily
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.reward_guard import RewardGuard
from trl_ext.resilience.training import ResilientTraining
from trl_ext.rewards import ShapedReward
from trl_ext.rollouts.generation import warn_of_ignored_settings
from trl_ext.rollouts.stopping import check_stop
from trl_ext.trainers.context import PROMPTS, check_generations, check_inputs, check_template, quiet_about_length
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.metrics import RolloutMetrics
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.packing import can_regroup, keeps_groups, pack_trainer, regroup
from trl_ext.trainers.policies import check_base_of_adapter, reference_in_memory
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.policy.generation import PolicyGeneration, greedy_rewards
from trl_ext.trainers.policy.resampling import check_data, sample_rollout
from trl_ext.trainers.policy.reward_functions import (
    as_reward_functions,
    check_arguments,
    length_penalty,
    named_and_guarded,
    place_reward_models,
    reward_models,
)
from trl_ext.trainers.policy.rollout_metrics import log_advantages, log_clipped, log_reward_errors, log_rollout
from trl_ext.trainers.policy.scoring import count_from_the_first_token


class PolicyTrainer(PolicyGeneration, ResilientTraining, WritesModelCard, RolloutMetrics, TRLGRPOTrainer):
    """Trains a policy on its own samples with any algorithm: `PolicyConfig(algorithm=...)`.

    Accepts the arguments of `trl.GRPOTrainer`, with a `PolicyConfig`, and keeps its features: generation with
    transformers or vLLM, tools, adapters, checkpoints, metrics, distributed training. It differs in six ways.
    Advantages and loss are the algorithm's. Prompts are cut at the beginning to `max_prompt_tokens`. A response also
    ends at a text in `stop`, which it keeps. Reward functions receive `finished`, which marks the responses that
    ended, and may be `trl_ext.rewards.RewardModel`s, whose adapters share the policy's backbone if possible. A token
    mean divides by the tokens of the whole optimizer batch. Updates that are not finite are skipped.

    Logged in addition to TRL's metrics: `reward_min`, `reward_max`, `advantages/mean`, `/std`, `/min` and `/max`,
    `shaped_reward` (after penalties) where it differs from `reward`, `unscorable`, `distinct_2` and `collapsed` of the
    rollout, `skipped_updates`, `log_ratio/clamped` (share of tokens with a log-ratio beyond 20, where the loss has no
    gradient), and for a greedy baseline `greedy/reward` and `greedy/mean_length`. `kl` is the mean of k3 per token.
    With `resample_groups`, `resampling/rounds`, `/prompts` and `/responses` (all that the rollout took) and
    `/replaced` and `/dead` (shares of its groups).

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
    _counts_of_rollouts = ("_seen_signal", "rollouts", "further_rollouts", "shaping_state")
    carried_over = (*ResilientTraining.carried_over, *_counts_of_rollouts)

    def __init__(self, model, reward_funcs=None, args: PolicyConfig | None = None, **kwargs: Any):
        args = configuration(self, args, self._config_class)
        model = check_inputs(model, kwargs, PROMPTS)
        self.algorithm = args.build_algorithm()
        functions = as_reward_functions(reward_funcs, args.packing)
        if not functions and not kwargs.get("environment_factory"):
            raise ValueError(
                "no reward function: name a reward model or give a function as reward_funcs, or an "
                "environment_factory whose environments have get_reward"
            )
        several = [name for name in ("tools", "environment_factory", "rollout_func") if kwargs.get(name)]
        if several and self.algorithm.reads("greedy_rewards"):
            raise ValueError(f"a greedy baseline does not go with {several[0]}: its greedy responses are single turns")
        dataset = kwargs.get("train_dataset")
        self._check_prompts(dataset, args)
        if isinstance(dataset, Dataset) and len(dataset) and not kwargs.get("rollout_func"):
            # A transform may add columns.
            check_arguments(functions, list(dataset[0]))
        check_data(args, kwargs)
        self._reward_models = reward_models(functions)
        self.reward_guard = RewardGuard(args.reward_errors, args.reward_timeout)
        # The latest rollout's rewards, which responses ended, and their lengths; and the latest forward pass.
        self._rollout: tuple[Tensor, list[bool], list[int]] | None = None
        self._forward: tuple | None = None
        self._window_tokens: Tensor | None = None
        self._seen_signal = False
        # Those that were sampled only to replace groups of others are counted apart.
        self.rollouts = self.further_rollouts = 0
        self.plain_reward_functions, guarded = named_and_guarded(functions, self.reward_guard)
        with reference_in_memory(TRLGRPOTrainer, model):
            super().__init__(model, guarded, args, **kwargs)
        if self.beta and self.ref_model is None:
            check_base_of_adapter(self.model)
        check_template(self._tokenizer, self.train_dataset)
        if args.max_prompt_tokens is not None:
            quiet_about_length(self._tokenizer)
        # TRL has appended the rewards of environments.
        self.reward_funcs[len(functions) :] = map(self.reward_guard.wrap, self.reward_funcs[len(functions) :])
        limits = {"max_completion_length": args.max_completion_length, "max_prompt_tokens": args.max_prompt_tokens}
        prompts = self.train_dataset["prompt"] if isinstance(self.train_dataset, Dataset) else []
        check_generations(self.model, self.processing_class, prompts, limits)
        check_stop(args.stop or (), self._tokenizer)
        sampling = {
            name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        }
        warn_of_ignored_settings(self.model, sampling | (args.generation_kwargs or {}))
        if args.unlike_trl:
            warn_once_per_run(args.unlike_trl)
        self._fit_trl_to_objective()
        self.packing = pack_trainer(self)
        models = [model for model in (self.model, self.ref_model) if model is not None]
        count_from_the_first_token(*map(self.accelerator.unwrap_model, models))
        place_reward_models(self, self._reward_models)

    # ---- Settings of TRL ----

    def _fit_trl_to_objective(self) -> None:
        """Choose settings that make TRL's metrics describe this algorithm; TRL's loss is discarded."""
        objective = self.algorithm
        self.loss_type = "cispo" if objective.surrogate == "cispo" else "grpo"
        self.scale_rewards = "group"
        self.importance_sampling_level = "sequence" if objective.ratio == "sequence" else "token"
        clips = objective.epsilon is not None
        self.epsilon_low = objective.epsilon if clips else float("inf")
        self.epsilon_high = objective.epsilon_high if clips else float("inf")
        if objective.surrogate == "cispo":
            self.epsilon_high = objective.ratio_cap

    def _check_prompts(self, dataset, args: PolicyConfig) -> None:
        needed = -(-args.generation_batch_size // args.num_generations)
        if isinstance(dataset, Dataset) and len(dataset) < needed:
            raise ValueError(
                f"the training data has {len(dataset)} prompts, and a rollout of generation_batch_size "
                f"{args.generation_batch_size} responses, {args.num_generations} to each prompt, takes "
                f"{needed}: give more prompts, or a smaller generation_batch_size and per_device_train_batch_size"
            )

    def _tokenize_prompts(self, prompts: list):
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        if isinstance(prompts[0], str):
            prompt_ids = [text_ids(self._tokenizer, prompt) for prompt in prompts]
        limit = self.args.max_prompt_tokens
        return [ids if limit is None else ids[-limit:] for ids in prompt_ids], images, multimodal_fields

    # ---- From rewards to advantages ----

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        finished = [self.has_ended(ids) for ids in completion_ids_list]
        inputs = [{**row, "finished": ended} for row, ended in zip(inputs, finished, strict=True)]
        self.reward_guard.begin()
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._watch_modules(rewards, len(prompts))
        # A response on which one function failed has no reward; a sum would count the missing part as 0.
        faulty = self.reward_guard.failed | self.reward_guard.not_finite
        flags = torch.tensor([index in faulty for index in range(len(prompts))], device=rewards.device)
        rewards = rewards.masked_fill(gather(flags).unsqueeze(1), float("nan"))
        self._rollout = rewards, finished, [len(ids) for ids in completion_ids_list]
        return rewards

    def _watch_modules(self, rewards: Tensor, count: int) -> None:
        """Record rows for which a module, which TRL scores itself, returned a number that is not finite."""
        modules = [isinstance(function, torch.nn.Module) for function in self.reward_funcs]
        first = self.accelerator.process_index * count
        own = rewards[first : first + count, torch.tensor(modules, device=rewards.device)]
        self.reward_guard.not_finite.update((~own.isfinite()).any(dim=1).nonzero().flatten().tolist())

    def total_rewards(self, inputs, prompts, completions, completion_ids) -> Tensor:
        """Score responses: the weighted sum of the reward functions, less the penalties on length.

        The arguments are of this process's responses; the rewards, [N], are over all processes and NaN where no
        function could score.
        """
        rewards = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        return self._weighted_sum(rewards) - length_penalty(self)

    def _weighted_sum(self, rewards: Tensor) -> Tensor:
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return total.masked_fill(rewards.isnan().all(dim=1), float("nan"))

    @property
    def group_size(self) -> int:
        """Responses to each prompt, in training or in evaluation."""
        return self.num_generations if self.model.training else self.num_generations_eval

    def _generate_and_score_completions(self, inputs):
        output = sample_rollout(self, super()._generate_and_score_completions, inputs)
        mode, group_size = "train" if self.model.training else "eval", self.group_size
        bad = [index in self.reward_guard.not_finite for index in range(len(inputs))]
        rewards = self._weighted_sum(self._rollout[0])
        penalties = length_penalty(self)
        if self.algorithm.kl_in == "reward" and self.beta != 0.0:
            penalties = penalties + gather(self._kl_penalty(output))
        shaped = rewards - penalties
        log_rollout(self, mode, rewards, shaped, self._rollout[1], output)
        if group_size == 1:
            # TRL's share of groups with equal rewards is meaningless for groups of one.
            self._metrics[mode].pop("frac_reward_zero_std", None)
        mask = self._token_mask(output)
        known = {"lengths": gather(mask.sum(dim=1)), "components": self._rollout[0], "weights": self.reward_weights}
        errors = len(self.reward_guard.failed)
        if self.algorithm.reads("greedy_rewards"):
            known["greedy_rewards"], bad_greedy = greedy_rewards(self, inputs, group_size, mode)
            bad = [own or bad_greedy[index // group_size] for index, own in enumerate(bad)]
            errors += len(self.reward_guard.failed)
        log_reward_errors(self, mode, errors)
        advantages = self.algorithm.advantages(shaped, group_size, **known)
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = advantages[first : first + len(inputs)]
        output["bad_reward"] = torch.tensor(bad, device=advantages.device)
        output["group"] = (first + torch.arange(len(inputs), device=advantages.device)) // group_size
        log_advantages(self, mode, advantages)
        if mode == "train":
            self.rollouts += 1
            self._seen_signal = self._seen_signal or bool(advantages.any())
        return output

    @torch.no_grad()
    def _kl_penalty(self, output: dict) -> Tensor:
        """The KL penalty subtracted from the reward of each of this process's responses. [n]."""
        log_probs = output.get("old_per_token_logps")
        if log_probs is None and "pixel_values" in output:
            raise ValueError("the KL term in the reward is for text: use kl_in loss with images")
        if log_probs is None:
            log_probs = self.rollout_log_probs(output)
        return self.algorithm.reward_penalty(log_probs, output["ref_per_token_logps"], self._token_mask(output))

    def rollout_log_probs(self, output: dict) -> Tensor:
        """Log-probabilities of a rollout's responses under the policy. [n, T]."""
        args = self.args
        log_probs, _, _ = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
            torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
            output["completion_ids"].size(1),
            batch_size=args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size,
        )
        return log_probs

    # ---- From log-probabilities to the loss ----

    def _prepare_inputs(self, generation_batch):
        earlier = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        # TRL has just split a new rollout into its micro-batches.
        is_new = self.model.training and self._buffered_inputs is not earlier
        if is_new and keeps_groups(self) and can_regroup(self._buffered_inputs):
            self._buffered_inputs = regroup(self._buffered_inputs, "group")
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        if self.model.training and self._needs_token_count:
            inputs = {**inputs, "mean_tokens": self._mean_tokens_of_window(inputs)}
        return inputs

    @property
    def _needs_token_count(self) -> bool:
        return "token_mean" in (self.algorithm.aggregation, self.algorithm.kl_aggregation)

    def _mean_tokens_of_window(self, inputs: dict) -> Tensor:
        """Tokens per micro-batch, averaged over the micro-batches and processes of this optimizer step."""
        accumulation, per_rollout = self.current_gradient_accumulation_steps, self.args.steps_per_generation
        index = self._step % per_rollout
        if per_rollout % accumulation:
            # A step that spans several rollouts begins before the later ones exist, so use this rollout's average.
            return (inputs["num_items_in_batch"] / (self.accelerator.num_processes * per_rollout)).clamp(min=1)
        if index % accumulation == 0 or self._window_tokens is None:
            start = index - index % accumulation
            window = self._buffered_inputs[start : start + accumulation]
            tokens = sum(self._token_mask(batch).sum() for batch in window).float()
            total = self.accelerator.reduce(tokens, reduction="sum")
            self._window_tokens = (total / (self.accelerator.num_processes * accumulation)).clamp(min=1)
        return self._window_tokens

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self._forward = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self._forward

    def _compute_loss(self, model, inputs):
        training = self.model.training
        entropy_coefficient = self._entropy_coefficient()
        # TRL's `kl` metric without the importance ratio that its loss applies.
        with temporarily(self.args, use_bias_correction_kl=False):
            super()._compute_loss(model, inputs)
        log_probs, entropies, auxiliary_loss = self._forward
        self._forward = None
        mask, advantages = self._token_mask(inputs), inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        old_log_probs = inputs.get("old_per_token_logps")
        scores = PolicyScores(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old_log_probs is None else old_log_probs,
            mask=mask,
            advantages=advantages,
            ratio=self.algorithm.ratio,
            sampler_log_probs=inputs.get("sampling_per_token_logps"),
            ref_log_probs=inputs.get("ref_per_token_logps"),
        )
        mode = "train" if training else "eval"
        entropy_mask, kept = None, self.top_entropy_quantile
        if kept < 1:
            entropy_mask = self.get_high_entropy_mask(entropies, mask, 1 - kept)
        loss, metrics = self.algorithm.loss(
            scores,
            weights=self._surrogate_weights(inputs, scores, entropy_mask),
            token_count=inputs.get("mean_tokens"),
            constant=self.max_completion_length,
        )
        log_clipped(self, metrics["log_ratio/clamped"], mask, mode)
        if self._entropy_bonus_enabled:
            # Replace the value that TRL has logged for its own loss.
            self._metrics[mode]["policy_loss"][-1] = gather(loss.detach()).nanmean().item()
        if entropy_coefficient:
            counted = mask if entropy_mask is None else mask * entropy_mask
            loss = loss - entropy_coefficient * (entropies * counted).sum() / counted.sum().clamp(min=1)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * auxiliary_loss
        if not training:
            return loss
        self.update_guard.observe_reward("bad_reward" in inputs and bool(inputs["bad_reward"].any()))
        return loss / self.current_gradient_accumulation_steps

    def _surrogate_weights(self, inputs: dict, scores: PolicyScores, entropy_mask: Tensor | None) -> Tensor | None:
        """Factors of the surrogate: TRL's masks of tokens and sequences, and its importance ratio of vLLM."""
        factors = [] if entropy_mask is None else [entropy_mask]
        if self.off_policy_mask_threshold is not None:
            factors.append(
                self.get_off_policy_mask(
                    advantages=scores.advantages,
                    per_token_logps=scores.log_probs,
                    sampling_per_token_logps=inputs.get("sampling_per_token_logps", scores.old_log_probs),
                    mask=scores.mask,
                    off_policy_threshold=self.off_policy_mask_threshold,
                )
            )
        if self.use_vllm and self.vllm_importance_sampling_correction and not self.algorithm.reads_sampler:
            factors.append(inputs["importance_sampling_ratio"])
        return functools.reduce(operator.mul, factors) if factors else None

    def _entropy_coefficient(self) -> float:
        """The coefficient of this step's entropy bonus; TRL's own loss may change it for the next step."""
        if not self._entropy_bonus_enabled:
            return 0.0
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    # ---- Checkpoints ----

    @property
    def shaping_state(self) -> list[dict[str, Any]]:
        """The states of the shaped reward functions, in order; equal on all processes."""
        return [function.state_dict() for function in self._shaped_rewards()]

    @shaping_state.setter
    def shaping_state(self, states: list[dict[str, Any]]) -> None:
        for function, state in zip(self._shaped_rewards(), states, strict=True):
            function.load_state_dict(state)

    def _shaped_rewards(self) -> list[ShapedReward]:
        return [f for f in self.plain_reward_functions.values() if isinstance(f, ShapedReward)]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # TRL samples at a fixed interval of micro-batches. The checkpoint does not store their count, since a resumed
        # run may use micro-batches of another size: the count follows from the data that the epoch has used.
        if kwargs["epoch"] == kwargs["epochs_trained"]:
            per_rollout = self.args.steps_per_generation * self.num_iterations
            self._step = kwargs["steps_trained_in_current_epoch"] % per_rollout
            self._buffered_inputs = None
            if self._step:
                warn_once_per_run(
                    f"step {self.state.global_step} lies within a rollout, which is not part of a checkpoint: what is "
                    "left of it is sampled anew"
                )
        super()._run_epoch(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any):
        result = super().train(*args, **kwargs)
        if self._step and not self._seen_signal:
            warn_once_per_run(f"nothing was learned from rewards: {self._without_signal}")
        return result
