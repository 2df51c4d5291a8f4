"""`PPOTrainer`: `PolicyTrainer` with a value function that estimates an advantage for every token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate.utils import gather, is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from trl_ext.advantages import clip_advantages, gae
from trl_ext.losses import aggregate, clipped_value_loss, explained_variance, kl_estimate, whiten
from trl_ext.losses.value import is_value_clipped, moments
from trl_ext.trainers.policy.reward_functions import length_penalty
from trl_ext.trainers.policy.rollout_metrics import log_advantages
from trl_ext.trainers.policy.trainer import PolicyTrainer
from trl_ext.trainers.ppo.config import LARGEST_ERROR, PPOConfig
from trl_ext.trainers.ppo.value_head import VALUE_MODELS


class PPOTrainer(PolicyTrainer):
    """Proximal policy optimisation with a value function and generalized advantage estimation.

    Accepts the arguments of `PolicyTrainer`, with a `PPOConfig`. A response's score is the reward of its last token,
    even if the response was truncated: there is no bootstrap at `max_completion_length`. With `kl_in="reward"`, beta
    times a token's k1 is subtracted from that token's reward. Values, returns and advantages are computed once per
    rollout, and returns before advantages are whitened. A response that could not be scored is excluded from whitening
    and from the loss, which averages over the tokens of the others.

    Logged in addition to the metrics of `PolicyTrainer` (whose `advantages/` describe each response's mean):
    `policy_loss`, `value_loss`, `value_clip_ratio` (share of tokens whose value is clipped), `approx_kl` (k3 of the
    rollout's policy against the current one, per token), and for each rollout `value/mean`, `returns/mean`,
    `explained_variance`, and with a reference `kl_coef` and `kl/sequence` (the sum of k1 over a response). With
    `num_generations` 1 there is no `frac_reward_zero_std`.

    A checkpoint stores the value function in `value_head.safetensors`. Its model files contain only the policy.

    Raises:
        ValueError: as `PolicyTrainer` does, and for a value function that the policy or the engine does not support.
    """

    _tag_names = ["trl", "ppo", "trl_ext", "policy-optimization"]
    _name = "PPO"
    _paper = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}
    _config_class = PPOConfig
    # An adaptive coefficient continues from its last value.
    carried_over = (*PolicyTrainer.carried_over, "algorithm.beta")
    _own_means = ("value_loss", "value_clip_ratio", "approx_kl")

    def __init__(self, model, reward_funcs=None, args: PPOConfig | None = None, **kwargs: Any):
        self.value_model = None
        # The latest forward pass of the policy: its log-probabilities, and the values of the same tokens.
        self._estimates: tuple[Tensor, Tensor] | None = None
        super().__init__(model, reward_funcs, args, **kwargs)
        if self.is_fsdp_enabled:
            raise ValueError("PPO's value function has not been tried under FSDP: use DDP or DeepSpeed")
        self.value_model = VALUE_MODELS[self.args.value_model](self)
        self._sum_up = partial(self.accelerator.reduce, reduction="sum")

    # ---- Values ----

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        *args: Any,
        batch_size: int | None = None,
        **kwargs: Any,
    ):
        def forward():
            return super(PPOTrainer, self)._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, batch_size=batch_size, **kwargs
            )

        if self._is_reference_pass(model):
            return forward()
        with self.value_model.reading():
            result = forward()
        values = self.value_model.values(input_ids, attention_mask, logits_to_keep, batch_size)
        self._estimates = result[0], values
        return result

    def _is_reference_pass(self, model) -> bool:
        """Whether the pass is for the reference: another model, or the policy without its adapter."""
        if model is self.ref_model:
            return self.ref_model is not None
        policy = self.value_model.policy
        if not is_peft_model(policy):
            return False
        layer = next(module for module in policy.modules() if isinstance(module, BaseTunerLayer))
        return layer.disable_adapters or policy.active_adapters == ["ref"]

    @torch.no_grad()
    def _add_old_values(self, output: dict) -> None:
        """Add the values of the rollout to it, and its log-probabilities if TRL left them out."""
        if "old_values" in output:
            return
        if "pixel_values" in output:
            raise ValueError("PPO's value function is for text: use GRPO with images")
        if output.get("old_per_token_logps") is None:
            with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                output["old_per_token_logps"] = self.rollout_log_probs(output)
        output["old_values"] = self._estimates[1].masked_fill(self._token_mask(output) == 0, 0)

    # ---- From rewards to advantages ----

    def _kl_penalty(self, output: dict) -> Tensor:
        self._add_old_values(output)
        return super()._kl_penalty(output)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self._add_old_values(output)
        self._estimates = None
        mode = "train" if self.model.training else "eval"
        first = self.accelerator.process_index * len(inputs)
        scores = (self._weighted_sum(self._rollout[0]) - length_penalty(self))[first : first + len(inputs)]
        scored = scores.isfinite()
        mask, values = self._token_mask(output), output["old_values"]
        counted = mask * scored[:, None]
        rewards = token_rewards(scores.masked_fill(~scored, 0), self._token_penalties(output, mask, mode), mask)
        if self.args.whiten_rewards:
            rewards = whiten(rewards, counted, shift_mean=False, reduce=self._sum_up)
        advantages, returns = gae(rewards.to(values.dtype), values, mask, self.args.gamma, self.args.lam)
        if self.args.whiten_advantages:
            advantages = whiten(advantages, counted, reduce=self._sum_up)
        if self.algorithm.advantage_clip is not None:
            advantages = clip_advantages(advantages, self.algorithm.advantage_clip)
        advantages = advantages.masked_fill(counted == 0, 0)
        output |= {"advantages": advantages, "returns": returns, "value_mask": counted}
        # The divisor of a step that spans several rollouts.
        output["num_items_in_batch"] = self._sum_up(counted.sum())
        self._log_rollout_values(mode, values, returns, counted, advantages, mask)
        return output

    def _token_penalties(self, output: dict, mask: Tensor, mode: str) -> Tensor | None:
        """Beta times k1 of each token, for its reward; None if the rewards have no KL term. [B, T]."""
        if not self.algorithm.needs_reference:
            return None
        divergence = kl_estimate(output["old_per_token_logps"], output["ref_per_token_logps"], "k1")
        divergence = divergence.detach().masked_fill(mask == 0, 0)
        coefficient = self.algorithm.beta
        per_response = gather(divergence.sum(dim=1))
        self._metrics[mode]["kl_coef"].append(coefficient)
        self._metrics[mode]["kl/sequence"].append(per_response.mean().item())
        if mode == "train" and self.args.kl_target is not None:
            # Applies from the next rollout's rewards on; a KL term in the loss uses it from this rollout's updates on.
            self.algorithm.beta = adapted_coefficient(
                coefficient,
                per_response.mean().item(),
                target=self.args.kl_target,
                horizon=self.args.kl_horizon,
                count=len(per_response),
            )
        return coefficient * divergence if self.algorithm.kl_in == "reward" else None

    def _log_rollout_values(self, mode: str, values, returns, counted, advantages, mask) -> None:
        metrics = self._metrics[mode]
        for name, tensor in (("value/mean", values), ("returns/mean", returns)):
            metrics[name].append(moments(tensor, counted, self._sum_up)[1].item())
        metrics["explained_variance"].append(explained_variance(values, returns, counted, reduce=self._sum_up))
        means = gather(advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1))
        log_advantages(self, mode, means, again=True)

    # ---- From log-probabilities and values to the loss ----

    @staticmethod
    def _token_mask(inputs: dict) -> Tensor:
        """1 where the policy chose the token and its response could be scored. [B, T]."""
        return inputs["value_mask"] if "value_mask" in inputs else PolicyTrainer._token_mask(inputs)

    @property
    def _needs_token_count(self) -> bool:
        # The value loss is always a mean over tokens, whatever the policy's is.
        return True

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        (log_probs, values), self._estimates = self._estimates, None
        mode = "train" if self.model.training else "eval"
        parts = self.current_gradient_accumulation_steps if mode == "train" else 1
        counted, clip = inputs["value_mask"], self.args.value_clip
        fitted = (values.masked_fill(counted == 0, 0), inputs["old_values"], inputs["returns"])
        losses = clipped_value_loss(*fitted, clip=clip)
        value_loss = aggregate(losses, counted, "token_mean", token_count=inputs.get("mean_tokens"))
        self._log_losses(
            mode,
            {
                "value_loss": losses.detach(),
                "value_clip_ratio": torch.zeros_like(losses) if clip is None else is_value_clipped(*fitted, clip=clip),
                "approx_kl": kl_estimate(inputs["old_per_token_logps"], log_probs.detach(), "k3"),
            },
            counted,
        )
        if not self._entropy_bonus_enabled:
            self._metrics[mode]["policy_loss"].append(gather(loss.detach() * parts).nanmean().item())
        return loss + self.args.value_coefficient * value_loss / parts

    def _log_losses(self, mode: str, per_token: dict[str, Tensor], mask: Tensor) -> None:
        """Log means over the tokens of this micro-batch on all processes."""
        sums = [values.detach().float().masked_fill(mask == 0, 0).sum() for values in per_token.values()]
        *totals, count = self._sum_up(torch.stack([*sums, (mask != 0).sum().float()])).tolist()
        for name, total in zip(per_token, totals, strict=True):
            self._metrics[mode][name].append(total / max(count, 1))

    # ---- Optimizer and checkpoints ----

    def create_optimizer(self, *args: Any, **kwargs: Any):
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if not is_new or self.args.value_learning_rate is None:
            return optimizer
        own = {id(weight) for weight in self.value_model.parameters().values()}
        for group in list(optimizer.param_groups):
            moved = [weight for weight in group["params"] if id(weight) in own]
            if moved:
                group["params"] = [weight for weight in group["params"] if id(weight) not in own]
                optimizer.add_param_group({**group, "params": moved, "lr": self.args.value_learning_rate})
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        self.value_model.save(output_dir or self.args.output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model=model)
        self.value_model.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.is_deepspeed_enabled:
            self.value_model.load(self.state.best_model_checkpoint)


def token_rewards(scores: Tensor, penalties: Tensor | None, mask: Tensor) -> Tensor:
    """Each response's score on its last token, less a penalty on every token. [B, T].

    A truncated response also has its score on its last token: its value beyond that counts as 0.

    Args:
        scores: [B].
        penalties: of each token, such as beta times its estimate of the KL divergence, [B, T]; None for none.
        mask: 1 where a token counts, [B, T]; a response without any has no reward.
    """
    counts = mask != 0
    rewards = torch.zeros_like(scores[:, None].expand(mask.shape))
    if penalties is not None:
        rewards = rewards - penalties.masked_fill(~counts, 0)
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = (columns * counts).amax(dim=1, keepdim=True)
    return rewards + ((columns == last) & counts) * scores[:, None]


def adapted_coefficient(coefficient: float, divergence: float, *, target: float, horizon: int, count: int) -> float:
    """The coefficient of the KL term after a rollout.

    `coefficient (1 + clip(divergence / target - 1, -0.2, 0.2) count / horizon)`.

    Args:
        coefficient: the rollout's coefficient.
        divergence: the rollout's mean sum of k1 per response.
        target: the desired divergence.
        horizon: responses over which the coefficient changes by the clipped error.
        count: the rollout's number of responses.

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2.
    """
    error = min(max(divergence / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * count / horizon)
