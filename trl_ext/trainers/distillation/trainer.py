"""`DistillationTrainer`: `PolicyTrainer` with a teacher in place of rewards."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_ext.losses import PolicyScores, aggregate
from trl_ext.losses.distillation import divergence_from_hidden_states, teacher_advantages
from trl_ext.losses.masking import masked_mean
from trl_ext.names import load_function
from trl_ext.processes import warn_once_per_run
from trl_ext.trainers.context import check_generations
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.distillation.attempts import attempts_of_rollout, takes_attempts
from trl_ext.trainers.distillation.config import WITH_SUCCESS, DistillationConfig
from trl_ext.trainers.distillation.teacher import Teacher, apply_head
from trl_ext.trainers.policies import is_zero3
from trl_ext.trainers.policy.rollout_metrics import log_advantages
from trl_ext.trainers.policy.scoring import reading_hidden_states
from trl_ext.trainers.policy.trainer import PolicyTrainer


class DistillationTrainer(PolicyTrainer):
    """Trains a policy to be like a teacher on the policy's own samples: `DistillationConfig(beta=...)`.

    Accepts the arguments of `PolicyTrainer`. Reward functions are optional, and only logged unless the teacher is
    shown attempts by their rewards. The loss of `full` is the divergence of the two next-token distributions before
    each sampled token, both at the sampling temperature, reduced by `aggregation`. With `sampled_token`, a token's
    advantage is the teacher's log-probability less the sampler's, and the surrogate of `PolicyTrainer` does the rest.
    Sampling is not differentiated, nor is the teacher.

    With `teacher_prompt` the teacher knows more than the policy: a solution, as in OPSD (arXiv 2601.18734), or a
    demonstration, as in SDFT (arXiv 2601.19897); or the attempts of a group with their rewards, as in SDPO (arXiv
    2601.20802). Responses for which it has nothing to show have no part in the loss.

    A teacher on the policy's own base, or the policy itself with another prompt, takes no memory for a second copy.
    Any other is loaded whole on each process. For `full` it scores each micro-batch when its turn comes, so that
    further iterations over a rollout score again; for `sampled_token` it scores a rollout once.

    Logged in addition to the metrics of `PolicyTrainer`: `divergence`, per token; for `sampled_token` its estimate;
    and for a teacher that sees attempts `taught`, the share of responses for which it had something to show.

    Args:
        teacher_model: a causal language model with the policy's tokenizer, or its name; None for
            `args.teacher_model_name_or_path`.

    Raises:
        TypeError: `args` is not a `DistillationConfig`.
        ValueError: no teacher, one with other tokens, a teacher's prompt that is not in the data or too long, or
            sharded parameters.
    """

    _tag_names = ["trl", "trl_ext", "distillation"]
    _name = "On-policy distillation"
    _paper: ClassVar[dict] = {
        "title": "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "id": "2306.13649",
    }
    _config_class: ClassVar[type[DistillationConfig]] = DistillationConfig
    needs_rewards = False
    _without_signal = "the teacher gave every sampled token the policy's own probability, or had nothing to show"

    def __init__(
        self, model, reward_funcs=None, args: DistillationConfig | None = None, *, teacher_model=None, **kwargs: Any
    ):
        args = configuration(self, args, self._config_class)
        teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
        if teacher_model is None and args.teacher_prompt is None:
            raise ValueError(
                "no teacher: give --teacher_model_name_or_path, or --teacher_prompt for the policy itself with more "
                "to go by"
            )
        self._teacher_prompt = _prompt_function(args.teacher_prompt, kwargs.get("train_dataset"))
        self._sees_attempts = self._teacher_prompt is not None and takes_attempts(self._teacher_prompt)
        if self._sees_attempts and not reward_funcs:
            prompt = "preset sdpo" if args.teacher_prompt == WITH_SUCCESS else f"the prompt {args.teacher_prompt}"
            raise ValueError(f"{prompt} shows attempts by their rewards: give a reward function or a reward model")
        super().__init__(model, reward_funcs or no_reward, args, **kwargs)
        if not reward_funcs:
            # Held-out responses have no reward either.
            self.plain_reward_functions.clear()
        if self.is_fsdp_enabled or is_zero3(self.accelerator):
            raise ValueError("distillation has not been tried with sharded parameters: use DDP or ZeRO-2")
        self.teacher = Teacher(self, teacher_model)
        if self._teacher_prompt is not None and not self._sees_attempts and isinstance(self.train_dataset, Dataset):
            limits = {"max_completion_length": args.max_completion_length, "teacher_prompt": None}
            prompts = map(self._teacher_prompt, self.train_dataset)
            check_generations(self.teacher.model, self.processing_class, prompts, limits)

    @property
    def beta(self) -> float:
        """TRL reads this as the coefficient of a reference, and there is none."""
        return 0.0

    @beta.setter
    def beta(self, value: float) -> None:
        pass

    @property
    def _is_full(self) -> bool:
        return self.args.divergence == "full"

    # ---- From samples to the teacher's view of them ----

    def _generate_and_score_completions(self, inputs):
        seen_signal = self._seen_signal
        output = super()._generate_and_score_completions(inputs)
        if "pixel_values" in output:
            raise ValueError("distillation is for text: these prompts have images")
        mode = "train" if self.model.training else "eval"
        # Neither a faulty reward nor a signal in rewards concerns the update itself.
        output["bad_reward"].zero_()
        metrics = self._metrics[mode]
        if self._teacher_prompt is not None:
            output |= self._teacher_prompts(inputs, output, mode)
        if self._is_full:
            self._seen_signal = seen_signal or metrics.get("taught", [1])[-1] > 0
            output["advantages"] = torch.zeros_like(output["advantages"])
            for name in [name for name in metrics if name.startswith("advantages/")]:
                del metrics[name]
            return output
        mask = self._token_mask(output)
        sampler, taught = self._sampler_log_probs(output), self.teacher.log_probs(output)
        self._log_divergence(mode, sampler - taught, mask)
        advantages = teacher_advantages(sampler, taught, mask, discount=self.args.discount)
        clip = self.objective.advantage_clip
        output["advantages"] = advantages if clip is None else advantages.clamp(-clip, clip)
        means = self.accelerator.gather(masked_mean(output["advantages"], mask, dim=1).nan_to_num())
        log_advantages(self, mode, means, again=True)
        self._seen_signal = seen_signal or bool(means.any())
        return output

    def _teacher_prompts(self, rows: list[dict], output: dict, mode: str) -> dict[str, Tensor]:
        """Prompts of the teacher as token ids, whole whatever max_prompt_tokens, padded on the left, [n, P].

        With attempts also `taught`, [n]: 0 for responses for which there is nothing to show.
        """
        if self._sees_attempts:
            attempts = attempts_of_rollout(self, output)
            prompts = [self._teacher_prompt(row, own) for row, own in zip(rows, attempts, strict=True)]
        else:
            prompts = [self._teacher_prompt(row) for row in rows]
        known = [prompt if prompt is not None else row["prompt"] for prompt, row in zip(prompts, rows, strict=True)]
        # Past `PolicyTrainer`, which would cut off what the teacher is to know.
        ids, _, _ = super(PolicyTrainer, self)._tokenize_prompts(known)
        fits = [self._fits(len(row)) for row in ids]
        ids = [torch.tensor(row, device=self.accelerator.device) for row in ids]
        padding = {"batch_first": True, "padding_side": "left"}
        found = {
            "teacher_prompt_ids": pad_sequence(ids, padding_value=self._tokenizer.pad_token_id, **padding),
            "teacher_prompt_mask": pad_sequence([torch.ones_like(row) for row in ids], **padding),
        }
        if self._sees_attempts:
            taught = [prompt is not None and fit for prompt, fit in zip(prompts, fits, strict=True)]
            found["taught"] = torch.tensor(taught, device=ids[0].device).long()
            self._metrics[mode]["taught"].append(self.accelerator.gather(found["taught"]).float().mean().item())
            own = self._token_mask({**output, **found}).sum()
            found["num_items_in_batch"] = self.accelerator.gather(own).sum()
        return found

    def _fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt of attempts leaves a response its place in the teacher's context."""
        context = getattr(self.teacher.model.config.get_text_config(), "max_position_embeddings", None)
        needed = prompt_tokens + self.max_completion_length
        if not self._sees_attempts or context is None or needed <= context:
            return True
        warn_once_per_run(
            f"a teacher's prompt and a response would take {needed} tokens, and its context holds {context}: such "
            "responses are not taught; lower max_completion_length, or show less"
        )
        return False

    @staticmethod
    def _token_mask(inputs: dict) -> Tensor:
        """1 for tokens that the policy chose and that the teacher judges. [B, T]."""
        mask = PolicyTrainer._token_mask(inputs)
        return mask * inputs["taught"].unsqueeze(1) if "taught" in inputs else mask

    @torch.no_grad()
    def _sampler_log_probs(self, output: dict) -> Tensor:
        """Log-probabilities of the sampled tokens as the sampler recorded them, and else as the policy's. [n, T]."""
        old, mask = output.get("old_per_token_logps"), self._token_mask(output)
        recorded = output.get("sampling_per_token_logps")
        if old is None and (recorded is None or recorded[mask.bool()].isnan().any()):
            old = self.rollout_log_probs(output)
        old = recorded if old is None else old
        return PolicyScores(old, old, mask, output["advantages"], sampler_log_probs=recorded).behaviour_log_probs

    # ---- From the two distributions to the loss ----

    def _compute_loss(self, model, inputs):
        if not self._is_full:
            return super()._compute_loss(model, inputs)
        # Before the policy's own pass, so that no other adapter is active between that and its backward pass.
        taught = self.teacher.hidden_states(inputs)
        policy = self.accelerator.unwrap_model(self.model)
        with reading_hidden_states(policy) as read:
            # The surrogate is 0, since advantages are. What else TRL adds stays: an entropy bonus, a router's loss.
            loss = super()._compute_loss(model, inputs)
        if not (self._entropy_bonus_enabled or self.aux_loss_enabled):
            # Saves a backward pass through the head.
            loss = loss.detach()
        mask = self._token_mask(inputs).bool()
        with self.accelerator.autocast():
            divergences = divergence_from_hidden_states(
                read(mask.shape[1])[mask],
                taught[mask],
                lambda hidden: apply_head(policy, hidden),
                self.teacher.head,
                beta=self.args.beta,
                top_k=self.args.divergence_top_k,
                temperature=self.temperature,
            )
        divergences = torch.zeros_like(mask, dtype=divergences.dtype).masked_scatter(mask, divergences)
        training = self.model.training
        self._log_divergence("train" if training else "eval", divergences.detach(), mask)
        divergence = aggregate(
            divergences,
            mask,
            self.objective.aggregation,
            constant=self.objective.loss_constant or self.max_completion_length,
            token_count=inputs.get("mean_tokens"),
        )
        return loss + (divergence / self.current_gradient_accumulation_steps if training else divergence)

    @property
    def _own_means(self) -> tuple[str, ...]:
        # `sampled_token` logs its divergence once for a rollout.
        return ("divergence",) if self._is_full else ()

    def _log_divergence(self, mode: str, values: Tensor, mask: Tensor) -> None:
        sums = torch.stack([values.masked_fill(mask == 0, 0).sum(), (mask != 0).sum()])
        total, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._metrics[mode]["divergence"].append(total / max(tokens, 1))


def no_reward(completions, **_) -> list[float]:
    """0 for each response, where the teacher is all there is to learn from."""
    return [0.0] * len(completions)


def _prompt_function(name: str | None, dataset):
    """The function from a row to the teacher's prompt that a setting names; None for the policy's own prompt."""
    if name is None:
        return None
    if ":" in name:
        return load_function(name, "teacher prompt")
    columns = dataset.column_names if isinstance(dataset, Dataset) else None
    if columns is not None and name not in columns:
        raise ValueError(
            f"teacher_prompt {name!r} is no column of the training data, which has {', '.join(columns)}: name one, or "
            "your own file.py:function(row)"
        )
    return lambda row: row[name]
