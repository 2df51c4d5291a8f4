"""`OnlinePreferenceTrainer`: preference losses on pairs that the policy samples during training.

`_generate_and_score_completions` samples and rewards responses as `PolicyTrainer` does, and then turns them into rows
of pairs, which TRL shuffles and splits as it does responses. `_compute_loss` computes the log-probabilities of both
responses of each pair in one forward pass and passes them to the loss.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_ext.losses import PreferenceScores
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts.replay import (
    ReplayBuffer,
    Response,
    SampledPair,
    effective_sample_size,
    importance_weights,
    replayed_count,
    select_pairs,
    weighted_mean,
)
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.metrics import pair_metrics
from trl_ext.trainers.online_preference.config import OnlinePreferenceConfig
from trl_ext.trainers.online_preference.judge_rewards import JudgeRewards
from trl_ext.trainers.online_preference.pairs import deal_pairs, encode_pairs, forward_rows, token_ids
from trl_ext.trainers.policy.reward_functions import as_reward_functions
from trl_ext.trainers.policy.scoring import ScoringTemperature
from trl_ext.trainers.policy.trainer import PolicyTrainer, takes_several_turns
from trl_ext.trainers.preference.whole_batch import (
    CoupledShare,
    Window,
    coupled_shares,
    join_scores,
    loss_scale,
    map_scores,
)

REPLAY_FILE = "replay.json"


class OnlinePreferenceTrainer(PolicyTrainer):
    """Samples, ranks, and trains a preference loss on the pairs: `OnlinePreferenceConfig(loss=...)`.

    Accepts the arguments of `PolicyTrainer`. Responses to a prompt are ranked by their rewards, less the penalty for
    a missing end. `judge` ranks them by the comparisons they win, instead of reward functions or in addition to them.
    Ties are dropped. The batch sizes set how many updates use a rollout, and recent pairs can be replayed.

    The gradient of an update is that of the mean over its pairs (with importance weights, the self-normalised mean),
    however they are divided into micro-batches and processes. For a batch-coupled loss and for importance weights,
    accumulated micro-batches cost a second forward pass without gradients. The loss, the reference and the logged pair
    metrics use log-probabilities at temperature 1, as in offline training, and importance weights those of the
    sampling distribution, which costs one more pass if its temperature is not 1.

    Logged in addition to TRL's rollout metrics: those of TRL's `DPOTrainer`; `kl`, the mean log-ratio to the reference
    per token of new pairs; `pairs/count`, `pairs/ties_dropped`, `pairs/unscored` and `pairs/reward_margin` (the mean
    lead of the chosen response's reward); and with a replay `replay/size` and `replay/age_mean` of the stored pairs,
    `replay/fraction` and `replay/staleness` (mean age) of the training pairs, and `replay/ess` (effective sample size
    over number of pairs) and `replay/weight_max`.

    Args:
        judge: a `trl_ext.evaluation.PairwiseJudge` or a function of that kind; None for no judge.

    Raises:
        TypeError: `args` is not an `OnlinePreferenceConfig`.
        ValueError: there is nothing to rank responses by, responses have several turns, a judge would see only parts
            of groups.
    """

    _tag_names = ["trl", "trl_ext", "online-preference-optimization"]
    _name = "Online preference optimization"
    _paper: ClassVar[dict] = {"title": "Direct Language Model Alignment from Online AI Feedback", "id": "2402.04792"}
    _config_class: ClassVar[type[OnlinePreferenceConfig]] = OnlinePreferenceConfig
    # The metrics of pairs, where no pair was made.
    mean_of_nothing = math.nan
    _without_signal = "no pair was made, as where all responses to a prompt are within tie_tolerance or not rewarded"

    def __init__(
        self, model, reward_funcs=None, args: OnlinePreferenceConfig | None = None, *, judge=None, **kwargs: Any
    ):
        args = configuration(self, args, self._config_class)
        functions = as_reward_functions(reward_funcs, args.packing)
        self._has_judge = judge is not None
        if judge is not None:
            functions.append(JudgeRewards(judge, lambda: self.group_size, args))
        if takes_several_turns(kwargs):
            raise ValueError("pairs are made of single turns: leave out tools, environments and rollout_func")
        self._window: Window | None = None
        # Scores of the held-out pairs of an evaluation in progress, over all processes, for a batch-coupled loss.
        self._held_out = []
        super().__init__(model, functions, args, **kwargs)
        self.preference = self.algorithm.preference
        rewards = zip(self.reward_weights.tolist(), self.reward_func_names, strict=True)
        self._reward_version = ", ".join(f"{weight:g} {name}" for weight, name in rewards)
        self.replay = None
        if args.replay_capacity:
            self.replay = ReplayBuffer(args.replay_capacity, args.replay_max_age, args.seed)

    def _split_changes_the_update(self) -> str:
        return "it is not for sampled pairs, of which a pass already holds each response once"

    def _prepare_models(self) -> None:
        self.scoring = ScoringTemperature(self)
        super()._prepare_models()

    # ---- Replay ----

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.replay is not None and self.args.should_save:
            self.replay.save(Path(output_dir) / REPLAY_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.replay is None:
            return
        self.replay.load(Path(checkpoint) / REPLAY_FILE)
        stored = len(self.replay)
        self.replay.pairs = [pair for pair in self.replay.pairs if pair.reward_version == self._reward_version]
        if left_out := stored - len(self.replay):
            warn_once_per_run(f"{left_out} of {stored} replayed pairs were labelled by other rewards and are left out")

    def _with_replayed(self, fresh: list[SampledPair]) -> list[SampledPair]:
        """The pairs to train on: new ones, and as many replayed ones as the configuration asks for and are stored."""
        version = self.state.global_step
        self.replay.drop_old(version)
        held = [version - pair.version for pair in self.replay.pairs]
        replayed = self.replay.draw(replayed_count(len(fresh), self.args.replay_fraction), version)
        self.replay.add(fresh)
        pairs = [*fresh, *replayed]
        metrics = self.metrics
        metrics["replay/size"].append(float(len(held)))
        if held:
            metrics["replay/age_mean"].append(sum(held) / len(held))
        if pairs:
            metrics["replay/fraction"].append(len(replayed) / len(pairs))
            metrics["replay/staleness"].append(sum(version - pair.version for pair in pairs) / len(pairs))
        return pairs

    # ---- From scored responses to pairs ----

    def weighted_sum(self, rewards: Tensor) -> Tensor:
        total = super().weighted_sum(rewards)
        if not self._has_judge:
            return total
        # The judge is the last function. A response that it could not compare has not lost its comparisons.
        return total.masked_fill(rewards[:, -1].isnan(), float("nan"))

    def _generate_and_score_completions(self, inputs):
        seen_signal = self._seen_signal
        rollout = super()._generate_and_score_completions(inputs)
        if "pixel_values" in rollout:
            raise ValueError("online preference optimisation is for text: these prompts have images")
        rewards = self.total(self.rewards).tolist()
        selected, ties, unscored = select_pairs(rewards, self.group_size, self.args.pairs, self.args.tie_tolerance)
        self.metrics["pairs/count"].append(float(len(selected)))
        self.metrics["pairs/ties_dropped"].append(float(ties))
        self.metrics["pairs/unscored"].append(float(unscored))
        if selected:
            margins = [rewards[chosen] - rewards[rejected] for chosen, rejected in selected]
            self.metrics["pairs/reward_margin"].append(sum(margins) / len(margins))
        responses = gather_object(self._responses(rollout))
        # Every process needs a pair to pass through the model, even if there is nothing to learn from.
        sampled = [
            SampledPair(*responses[chosen], responses[rejected][1], self.state.global_step, self._reward_version)
            for chosen, rejected in selected or [(0, 0)]
        ]
        filler, pairs = sampled[0], sampled if selected else []
        parts = 1
        if self.model.training:
            parts = self.args.steps_per_generation
            pairs = pairs if self.replay is None else self._with_replayed(pairs)
            self._seen_signal = seen_signal or bool(pairs)
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        own, counted = deal_pairs(pairs, filler, parts, rank, ranks)
        batch = encode_pairs(own, counted, pad_token_id=self._tokenizer.pad_token_id, version=self.state.global_step)
        return {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}

    @torch.no_grad()
    def _responses(self, rollout: dict) -> list[tuple[array, Response]]:
        """This process's prompts and responses, with log-probabilities under the policy that has just sampled them."""
        mask, sampler = self._token_mask(rollout), None
        if self.replay is not None:
            sampler = rollout.get("old_per_token_logps")
            if sampler is None or self.scoring.differs:
                with self.scoring.of_the_sampler():
                    sampler = self.score(self.model, rollout).log_probs
        sums = []
        for log_probs in (sampler, rollout.get("ref_per_token_logps")):
            sums.append([math.nan] * len(mask) if log_probs is None else (log_probs * mask).sum(dim=1).tolist())
        prompts = token_ids(rollout["prompt_ids"], rollout["prompt_mask"])
        responses = token_ids(rollout["completion_ids"], rollout["completion_mask"])
        return list(zip(prompts, map(Response, responses, *sums), strict=True))

    # ---- From log-probabilities to the loss ----

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        accumulation = self.current_gradient_accumulation_steps
        place = self._step % self.args.steps_per_generation
        index = place % accumulation
        if index == 0 or self._window is None:
            batches = self._buffered_inputs[place - index : place - index + accumulation]
            pairs = self.accelerator.reduce(sum(batch["counted"].sum() for batch in batches), reduction="sum")
            self._window = Window(
                # Without a pair the loss is 0, so any positive divisor will do.
                scale=loss_scale(len(batches), self.accelerator.num_processes, max(int(pairs), 1)),
                pending=batches if self._looks_ahead else None,
            )
        return {**inputs, "window": self._window, "window_index": index}

    @property
    def _looks_ahead(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of the optimizer batch."""
        return self.preference.batch_coupled or self.args.replay_weights != "none"

    def _compute_loss(self, model, inputs):
        training, counted = self.model.training, inputs["counted"]
        scores, entropies, auxiliary_loss = self._score(model, inputs)
        if not training:
            loss = self._held_out_mean(scores, counted)
        elif self._looks_ahead:
            window = inputs["window"]
            if window.coupled is None:
                window.coupled = self._look_ahead(model, window, scores)
            loss = window.coupled[inputs["window_index"]].of(scores)
        else:
            loss = (self.preference(scores) * counted).sum() * inputs["window"].scale
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * auxiliary_loss
        self._log(scores, entropies, auxiliary_loss, inputs, loss)
        return loss / self.current_gradient_accumulation_steps if training else loss

    def _score(self, model, inputs: dict) -> tuple[PreferenceScores, Tensor, Tensor | None]:
        """Score the P pairs of a micro-batch in one pass that contains each response once.

        Returns:
            The inputs of the loss; the entropies summed over the tokens of each pair's responses, [P]; and the
            load-balancing loss of a mixture of experts, None for other models.
        """
        *responses, mask, rows = forward_rows(inputs)
        log_probs, entropies, auxiliary_loss = self._get_per_token_logps_and_entropies(
            model, *responses, mask.size(1), compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        sums = (log_probs * mask).sum(dim=1)[rows]
        lengths = mask.sum(dim=1)[rows]
        reference = inputs["reference"].unbind(1) if self.preference.needs_reference else (None, None)
        scores = PreferenceScores(*sums.unbind(1), *reference, *lengths.unbind(1))
        of_pairs = (entropies.detach() * mask).sum(dim=1)[rows].sum(dim=1)
        return scores, of_pairs, auxiliary_loss

    def _look_ahead(self, model, window: Window, scores: PreferenceScores) -> list[CoupledShare]:
        """Each micro-batch's share of this update; several micro-batches take an extra pass without gradients."""
        batches, window.pending = window.pending, None
        parts = self._score_ahead(model, batches) if len(batches) > 1 else [scores]
        whole = present = join_scores([map_scores(Tensor.detach, part) for part in parts])
        if self.scoring.differs and self.args.replay_weights != "none":
            with self.scoring.of_the_sampler():
                present = join_scores(self._score_ahead(model, batches))
        sampler = torch.cat([batch["sampler"] for batch in batches]).sum(dim=1)
        weights = importance_weights(
            present.chosen + present.rejected - sampler,
            self.args.replay_weights,
            lengths=whole.chosen_length + whole.rejected_length,
            cap=self.args.replay_weight_cap,
        )
        counted = torch.cat([batch["counted"] for batch in batches])
        gather = self.accelerator.gather
        weights = gather(weights)[gather(counted).bool()]
        shares = coupled_shares(
            lambda scores: weighted_mean(self.preference(scores), weights),
            parts,
            self.accelerator,
            counted,
        )
        if self.args.replay_weights != "none" and len(weights):
            self.metrics["replay/ess"].append(effective_sample_size(weights).item() / len(weights))
            self.metrics["replay/weight_max"].append(weights.max().item())
        return shares

    def _score_ahead(self, model, batches: list[dict]) -> list[PreferenceScores]:
        """Score without changing the random state, so that the training passes draw the same dropout masks."""
        with torch.no_grad(), preserved_random_state():
            return [self._score(model, batch)[0] for batch in batches]

    # ---- Metrics ----

    def _log(
        self, scores: PreferenceScores, entropies: Tensor, auxiliary_loss: Tensor | None, inputs: dict, loss: Tensor
    ) -> None:
        """Log the metrics of a micro-batch, over the pairs that count and their tokens."""
        counted = inputs["counted"]
        tokens = inputs["completion_mask"].sum(dim=(1, 2)) * counted
        values = pair_metrics(scores, self.preference.beta, counted)
        values["entropy"] = (counted * entropies).sum(), tokens.sum()
        if self.preference.needs_reference:
            fresh, log_ratios = inputs["fresh"], (scores.chosen_log_ratio + scores.rejected_log_ratio).detach()
            values["kl"] = (counted * fresh * log_ratios).sum(), (tokens * fresh).sum()
        if self.aux_loss_enabled:
            values["aux_loss"] = auxiliary_loss, counted.new_ones(())
        if not self.model.training:
            values["loss"] = loss * counted.sum(), counted.sum()
        self.add_metrics(values)

    def _held_out_mean(self, scores: PreferenceScores, counted: Tensor) -> Tensor:
        """The mean loss of the pairs that count in a held-out micro-batch; 0 if none does."""
        keep = counted.bool()
        if self.preference.batch_coupled:
            everywhere = self.accelerator.gather(counted).bool()
            gather = lambda values: self.accelerator.gather(values.detach())[everywhere]  # noqa: E731
            self._held_out.append(map_scores(gather, scores))
        if not keep.any():
            return counted.new_zeros(())
        return self.preference(map_scores(lambda values: values[keep], scores)).mean()

    def held_out_loss(self) -> float | None:
        parts, self._held_out = self._held_out, []
        loss = super().held_out_loss()
        is_coupled = any(len(part.chosen) for part in parts)
        return self.preference(join_scores(parts)).mean().item() if is_coupled else loss
