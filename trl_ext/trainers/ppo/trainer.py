"""`PPOTrainer`: `PolicyTrainer` with a value function that estimates an advantage for every token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor

from trl_ext.advantages import clip_advantages, gae
from trl_ext.losses import aggregate, clipped_value_loss, explained_variance, kl_estimate, masked_sum, whiten
from trl_ext.losses.value import is_value_clipped, moments
from trl_ext.trainers.policy.rollout_metrics import log_advantages
from trl_ext.trainers.policy.trainer import Metrics, PolicyTrainer, ScoredTokens
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
    `policy_loss`, `value_loss`, `value_clip_ratio`, `approx_kl` (k3 of the rollout's policy against the current one,
    per token), and for each rollout `value/mean`, `returns/mean`, `explained_variance`, and with a reference `kl_coef`
    and `kl/sequence` (the sum of k1 over a response).

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

    def __init__(self, model, reward_funcs=None, args: PPOConfig | None = None, **kwargs: Any):
        super().__init__(model, reward_funcs, args, **kwargs)
        if self.is_fsdp_enabled:
            raise ValueError("PPO's value function has not been tried under FSDP: use DDP or DeepSpeed")
        self.value_model = VALUE_MODELS[self.args.value_model](self)
        if self.token_budget is not None and self.args.value_model == "separate":
            # The value model is trained in the same passes, and its rows are padded.
            self.token_budget.by_memory = self.token_budget.may_keep = False
        self._sum_up = partial(self.accelerator.reduce, reduction="sum")

    # ---- Sample, and score: the value function estimates along with the policy ----

    def sample(self, inputs: list[dict]) -> dict:
        rollout = super().sample(inputs)
        if "pixel_values" in rollout:
            raise ValueError("PPO's value function is for text: use GRPO with images")
        with torch.no_grad():
            scored = self.score(self.model, rollout)
        rollout["old_per_token_logps"] = scored.log_probs
        rollout["old_values"] = scored.values.masked_fill(self._token_mask(rollout) == 0, 0)
        return rollout

    def score(self, model, inputs: dict, *, entropies: bool = False) -> ScoredTokens:
        return self.value_model.score(partial(super().score, model, inputs, entropies=entropies), inputs)

    # ---- Advantage ----

    def compute_advantages(self, inputs: list[dict], rollout: dict, rewards: Tensor) -> Tensor:
        """Put `advantages` and `returns` of every token into a rollout, and `value_mask`, 1 where it counts."""
        args, mask, values = self.args, self._token_mask(rollout), rollout["old_values"]
        scores = self.own_rows(self.total(self.rewards))
        scored = scores.isfinite()
        counted = mask * scored[:, None]
        of_tokens = token_rewards(scores.masked_fill(~scored, 0), self._token_penalties(rollout, mask), mask)
        advantages, returns = gae(of_tokens.to(values.dtype), values, mask, args.gamma, args.lam)
        if args.whiten_advantages:
            advantages = whiten(advantages, counted, reduce=self._sum_up)
        if self.algorithm.advantage_clip is not None:
            advantages = clip_advantages(advantages, self.algorithm.advantage_clip)
        advantages = advantages.masked_fill(counted == 0, 0)
        rollout |= {"advantages": advantages, "returns": returns, "value_mask": counted}
        for name, tensor in (("value/mean", values), ("returns/mean", returns)):
            self.metrics[name].append(moments(tensor, counted, self._sum_up)[1].item())
        self.metrics["explained_variance"].append(explained_variance(values, returns, counted, reduce=self._sum_up))
        log_advantages(self, gather(advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)))
        # The value function learns from any reward.
        return rewards.nan_to_num()

    def _token_penalties(self, rollout: dict, mask: Tensor) -> Tensor | None:
        """Beta times k1 of each token, for its reward; None if the rewards have no KL term. [B, T]."""
        if not self.algorithm.needs_reference:
            return None
        divergence = kl_estimate(rollout["old_per_token_logps"], rollout["ref_per_token_logps"], "k1")
        divergence = divergence.detach().masked_fill(mask == 0, 0)
        coefficient, per_response = self.algorithm.beta, gather(divergence.sum(dim=1))
        self.metrics["kl_coef"].append(coefficient)
        self.metrics["kl/sequence"].append(per_response.mean().item())
        if self.model.training and self.args.kl_target is not None:
            # Applies from the next rollout's rewards on; a KL term in the loss uses it from this rollout's updates on.
            limits = {"target": self.args.kl_target, "horizon": self.args.kl_horizon}
            self.algorithm.beta = adapted_coefficient(
                coefficient, per_response.mean().item(), count=len(per_response), **limits
            )
        return coefficient * divergence if self.algorithm.kl_in == "reward" else None

    @staticmethod
    def _token_mask(inputs: dict) -> Tensor:
        """1 where the policy chose the token and its response could be scored. [B, T]."""
        return inputs["value_mask"] if "value_mask" in inputs else PolicyTrainer._token_mask(inputs)

    # ---- Loss ----

    def loss(self, scored: ScoredTokens, inputs: dict) -> tuple[Tensor, Metrics]:
        policy_loss, metrics = super().loss(scored, inputs)
        counted, clip = inputs["value_mask"], self.args.value_clip
        fitted = (scored.values.masked_fill(counted == 0, 0), inputs["old_values"], inputs["returns"])
        losses = clipped_value_loss(*fitted, clip=clip)
        value_loss = aggregate(losses, counted, "token_mean", token_count=self.mean_tokens)
        of_tokens = {
            "value_loss": losses,
            "value_clip_ratio": torch.zeros_like(losses) if clip is None else is_value_clipped(*fitted, clip=clip),
            "approx_kl": kl_estimate(inputs["old_per_token_logps"], scored.log_probs.detach(), "k3"),
        }
        of_tokens = {name: (masked_sum(values, counted), counted.sum()) for name, values in of_tokens.items()}
        once = self.micro_batches_of(counted)
        metrics = {"policy_loss": (policy_loss, once), **metrics, **of_tokens}
        return policy_loss + self.args.value_coefficient * value_loss, metrics

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

    def train(self, *args: Any, **kwargs: Any):
        result = super().train(*args, **kwargs)
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        if best is not None and not self.is_deepspeed_enabled:
            self.value_model.load(best)
        return result


def token_rewards(scores: Tensor, penalties: Tensor | None, mask: Tensor) -> Tensor:
    """Each response's score on its last token, truncated or not, less a penalty on every token. [B, T].

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
    """The KL term's coefficient after a rollout of `count` responses, whose mean sum of k1 is `divergence`.

    `coefficient (1 + clip(divergence / target - 1, -0.2, 0.2) count / horizon)`; Ziegler et al. 2019, arXiv
    1909.08593, section 2.2.
    """
    error = min(max(divergence / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * count / horizon)
