"""`OnlinePreferenceTrainer`: preference losses on pairs that the policy samples during training.

It overrides the same two methods as `PolicyTrainer`. `_generate_and_score_completions` lets TRL generate, score and
log, and then turns the responses into rows of pairs, which TRL shuffles and splits as it does responses.
`_compute_loss` computes the log-probabilities of both responses of each pair in one forward pass and passes them to
the loss.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_ext.losses import PreferenceScores
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts.pairing import Selection, select_pairs
from trl_ext.rollouts.replay import (
    ReplayBuffer,
    SampledPair,
    ages,
    effective_sample_size,
    importance_weights,
    replayed_count,
    weighted_mean,
)
from trl_ext.trainers.defaults import configuration
from trl_ext.trainers.online_preference.config import OnlinePreferenceConfig
from trl_ext.trainers.online_preference.judge_rewards import JudgeRewards
from trl_ext.trainers.online_preference.pairs import (
    SampledPairMetrics,
    deal_pairs,
    encode_pairs,
    forward_rows,
)
from trl_ext.trainers.policy.reward_functions import as_reward_functions
from trl_ext.trainers.policy.scoring import ScoringTemperature
from trl_ext.trainers.policy.trainer import PolicyTrainer
from trl_ext.trainers.preference.whole_batch import CoupledShare, Window, coupled_shares, join_scores, map_scores

REPLAY_FILE = "replay.json"


class OnlinePreferenceTrainer(SampledPairMetrics, PolicyTrainer):
    """Samples, ranks, and trains a preference loss on the pairs: `OnlinePreferenceConfig(loss=...)`.

    Accepts the arguments of `PolicyTrainer`. Responses to a prompt are ranked by their rewards, less the penalty for
    a missing end. `judge` ranks them by the comparisons they win, instead of reward functions or in addition to them.
    Ties are dropped. The batch sizes set how many updates use a rollout, and recent pairs can be replayed.

    The gradient of an update is that of the mean over its pairs (with importance weights, the self-normalised mean),
    however they are divided into micro-batches and processes. A batch-coupled loss sees the whole optimizer batch, as
    do importance weights. With accumulated micro-batches, either one costs a second forward pass without gradients.
    Whatever the sampling temperature, the loss, the reference and the logged pair metrics use log-probabilities at
    temperature 1, as in offline training. Importance weights use the sampling distribution, which costs one more pass
    if its temperature is not 1.

    Logged in addition to TRL's rollout metrics: `rewards/chosen`, `rewards/rejected`, `rewards/margins`,
    `rewards/accuracies`, `logps/chosen` and `logps/rejected` as in TRL's `DPOTrainer`; `kl`, the mean log-ratio to the
    reference per token of new pairs; `pairs/count`, `pairs/ties_dropped`, `pairs/unscored` and `pairs/reward_margin`
    (the mean lead of the chosen response's reward); and with a replay `replay/size`, `replay/dropped`,
    `replay/age_mean` and `replay/age_max` of the stored pairs, `replay/fraction` and `replay/staleness` (mean age) of
    the training pairs, and `replay/ess` (effective sample size over number of pairs) and `replay/weight_max`.

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
    _without_signal = "no pair was made, as where all responses to a prompt are within tie_tolerance or not rewarded"

    def __init__(
        self, model, reward_funcs=None, args: OnlinePreferenceConfig | None = None, *, judge=None, **kwargs: Any
    ):
        args = configuration(self, args, self._config_class)
        functions = as_reward_functions(reward_funcs, args.packing)
        self._has_judge = judge is not None
        if judge is not None:
            functions.append(JudgeRewards(judge, lambda: self.group_size, args))
        several = [name for name in ("tools", "environment_factory", "rollout_func") if kwargs.get(name)]
        if several:
            raise ValueError(f"{several[0]} makes responses of several turns, and pairs are made of single ones")
        self._pair_window: Window | None = None
        super().__init__(model, functions, args, **kwargs)
        rewards = zip(self.reward_weights.tolist(), self.reward_func_names, strict=True)
        self._reward_version = ", ".join(f"{weight:g} {name}" for weight, name in rewards)
        self.replay = None
        if args.replay_capacity:
            self.replay = ReplayBuffer(args.replay_capacity, args.replay_max_age, args.seed)

    @property
    def beta(self) -> float:
        """TRL reads this to decide whether there is a reference: 0 for a reference-free loss."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = value if self.algorithm.needs_reference else 0.0

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
        path = Path(checkpoint) / REPLAY_FILE
        if not path.is_file():
            warn_once_per_run(f"{checkpoint} has no {REPLAY_FILE}: the replay begins empty")
            return
        self.replay.load(path)
        known = [pair for pair in self.replay.pairs if pair.reward_version == self._reward_version]
        if len(known) < len(self.replay):
            warn_once_per_run(
                f"{len(self.replay) - len(known)} of {len(self.replay)} replayed pairs were labelled by other rewards "
                f"than {self._reward_version}, and are left out"
            )
            self.replay.pairs = known

    def _with_replayed(self, fresh: list[SampledPair]) -> list[SampledPair]:
        """The pairs to train on: new ones, and as many replayed ones as the configuration asks for and are stored."""
        version = self.state.global_step
        dropped = self.replay.drop_old(version)
        held = ages(self.replay.pairs, version)
        replayed = self.replay.draw(replayed_count(len(fresh), self.args.replay_fraction), version)
        self.replay.add(fresh)
        pairs = [*fresh, *replayed]
        metrics = self._metrics["train"]
        metrics["replay/size"].append(float(len(held)))
        metrics["replay/dropped"].append(float(dropped))
        if held:
            metrics["replay/age_mean"].append(sum(held) / len(held))
            metrics["replay/age_max"].append(float(max(held)))
        if pairs:
            metrics["replay/fraction"].append(len(replayed) / len(pairs))
            metrics["replay/staleness"].append(sum(ages(pairs, version)) / len(pairs))
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
        output = super()._generate_and_score_completions(inputs)
        if "pixel_values" in output:
            raise ValueError("online preference optimisation is for text: these prompts have images")
        mode = "train" if self.model.training else "eval"
        rewards = self.total(self.rewards).tolist()
        selection = select_pairs(rewards, self.group_size, self.args.pairs, self.args.tie_tolerance)
        self._log_selection(mode, rewards, selection)
        rows = self._rows(output)
        pairs = self._sampled_pairs(rows, rewards, selection)
        # Every process needs a pair to pass through the model, even if there is nothing to learn from.
        filler = pairs[0] if pairs else self._pair(rows[0], rows[0], 0.0, 0.0)
        if mode == "train" and self.replay is not None:
            pairs = self._with_replayed(pairs)
        if mode == "train":
            self._seen_signal = seen_signal or bool(pairs)
        parts = self.args.steps_per_generation if mode == "train" else 1
        share, counted = deal_pairs(
            pairs, filler, parts, self.accelerator.process_index, self.accelerator.num_processes
        )
        return encode_pairs(
            share,
            counted,
            pad_token_id=self._tokenizer.pad_token_id,
            version=self.state.global_step,
            device=self.accelerator.device,
        )

    def _log_selection(self, mode: str, rewards: list[float], selection: Selection) -> None:
        metrics = self._metrics[mode]
        metrics["pairs/count"].append(float(len(selection.pairs)))
        metrics["pairs/ties_dropped"].append(float(selection.ties))
        metrics["pairs/unscored"].append(float(selection.unscored))
        if selection.pairs:
            margins = [rewards[chosen] - rewards[rejected] for chosen, rejected in selection.pairs]
            metrics["pairs/reward_margin"].append(sum(margins) / len(margins))

    def _rows(self, output: dict) -> list[_Response]:
        mask = self._token_mask(output)
        unknown = [float("nan")] * len(mask)
        sampler = unknown
        if self.replay is not None:
            sampler = (self._sampling_log_probs(output) * mask).sum(dim=1).tolist()
        reference = output.get("ref_per_token_logps")
        reference = unknown if reference is None else (reference * mask).sum(dim=1).tolist()
        ids = {}
        for name in ("prompt", "completion"):
            kept = output[f"{name}_mask"].bool().cpu()
            rows = zip(output[f"{name}_ids"].cpu(), kept, strict=True)
            ids[name] = [array("i", row[mask].tolist()) for row, mask in rows]
        return list(map(_Response, ids["prompt"], ids["completion"], sampler, reference))

    def _sampled_pairs(self, rows: list[_Response], rewards: list[float], selection: Selection) -> list[SampledPair]:
        """The selected pairs of all processes, in the same order on each."""
        first = self.accelerator.process_index * len(rows)
        wanted = {index for pair in selection.pairs for index in pair}
        own = [(first + index, row) for index, row in enumerate(rows) if first + index in wanted]
        responses = dict(gather_object(own))
        return [
            self._pair(responses[chosen], responses[rejected], rewards[chosen], rewards[rejected])
            for chosen, rejected in selection.pairs
        ]

    def _pair(
        self, chosen: _Response, rejected: _Response, chosen_reward: float, rejected_reward: float
    ) -> SampledPair:
        return SampledPair(
            chosen.prompt_ids,
            chosen.response_ids,
            rejected.response_ids,
            *(chosen.log_prob, rejected.log_prob, chosen.ref_log_prob, rejected.ref_log_prob),
            *(chosen_reward, rejected_reward),
            version=self.state.global_step,
            reward_version=self._reward_version,
        )

    @torch.no_grad()
    def _sampling_log_probs(self, output: dict) -> Tensor:
        """Log-probabilities of the responses under the policy that has just sampled them, [n, T]."""
        if output.get("old_per_token_logps") is not None and not self.scoring.differs:
            return output["old_per_token_logps"]
        with self.scoring.of_the_sampler():
            return self.rollout_log_probs(output)

    # ---- From log-probabilities to the loss ----

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        accumulation = self.current_gradient_accumulation_steps
        place = self._step % self.args.steps_per_generation
        index = place % accumulation
        if index == 0 or self._pair_window is None:
            self._pair_window = self._open_window(self._buffered_inputs[place - index : place - index + accumulation])
        return {**inputs, "window": self._pair_window, "window_index": index}

    def _open_window(self, batches: list[dict]) -> Window:
        pairs = self.accelerator.reduce(sum(batch["counted"].sum() for batch in batches), reduction="sum")
        return Window(
            size=len(batches),
            # Without a pair the loss is 0, so any positive divisor will do.
            pairs=max(int(pairs), 1),
            ranks=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            pending=batches if self._looks_ahead else None,
        )

    @property
    def _looks_ahead(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of the optimizer batch."""
        return self.algorithm.preference.batch_coupled or self.args.replay_weights != "none"

    def _compute_loss(self, model, inputs):
        training = self.model.training
        scores, auxiliary_loss = self._score(model, inputs, log=True)
        preference, counted = self.algorithm.preference, inputs["counted"]
        if not training:
            loss = self._held_out_mean(scores, counted)
        elif self._looks_ahead:
            window = inputs["window"]
            if window.coupled is None:
                window.coupled = self._look_ahead(model, window, scores)
            loss = window.share(inputs["window_index"], scores)
        else:
            loss = (preference(scores) * counted).sum() * inputs["window"].scale
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * auxiliary_loss
        return loss / self.current_gradient_accumulation_steps if training else loss

    def _score(self, model, inputs: dict, *, log: bool = False) -> tuple[PreferenceScores, Tensor | None]:
        """Scores of the pairs in a micro-batch, from one pass that contains each response once."""
        rows = forward_rows(inputs)
        log_probs, entropies, auxiliary_loss = self._get_per_token_logps_and_entropies(
            model,
            rows.input_ids,
            rows.attention_mask,
            rows.mask.size(1),
            compute_entropy=log,
            compute_aux_loss=self.aux_loss_enabled,
        )
        sums = (log_probs * rows.mask).sum(dim=1)[rows.index]
        lengths = rows.mask.sum(dim=1)[rows.index]
        reference = inputs["reference"].unbind(1) if self.algorithm.needs_reference else (None, None)
        scores = PreferenceScores(*sums.unbind(1), *reference, *lengths.unbind(1))
        if log:
            self._log_pairs(scores, inputs, (entropies.detach() * rows.mask).sum(dim=1)[rows.index].sum(dim=1))
            if auxiliary_loss is not None:
                mode = "train" if self.model.training else "eval"
                self._metrics[mode]["aux_loss"].append(self.accelerator.gather(auxiliary_loss.detach()).mean().item())
        return scores, auxiliary_loss

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
            lambda scores: weighted_mean(self.algorithm.preference(scores), weights),
            parts,
            window.rank,
            gather,
            counted,
        )
        if self.args.replay_weights != "none" and len(weights):
            metrics = self._metrics["train"]
            metrics["replay/ess"].append(effective_sample_size(weights).item() / len(weights))
            metrics["replay/weight_max"].append(weights.max().item())
        return shares

    def _score_ahead(self, model, batches: list[dict]) -> list[PreferenceScores]:
        """Score without changing the random state, so that the training passes draw the same dropout masks."""
        with torch.no_grad(), preserved_random_state():
            return [self._score(model, batch)[0] for batch in batches]


class _Response(NamedTuple):
    """A sampled response and its log-probabilities under the policy that sampled it and under the reference."""

    prompt_ids: array
    response_ids: array
    log_prob: float
    ref_log_prob: float
