"""Metrics of an optimizer step or an evaluation describe its whole batch, however it was divided.

TRL logs a mean for each micro-batch and then averages these. That gives the mean over pairs if the micro-batches have
equal size, but not the mean over tokens. Here, sums and counts are added up over the micro-batches and processes of a
step, and divided at its end. If a step is one micro-batch, the result is TRL's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from trl_ext.losses import PreferenceScores


class StepMetrics:
    """Mixin before one of TRL's trainers, whose loss step calls `add_metrics`.

    A micro-batch waits for no number: sums stay on the device and on their process until the step or the evaluation
    ends, and then one exchange gives all of them. Rows that accelerate repeats in an evaluation over several processes
    are left out where the trainer asks `counted`.
    """

    # The mean of a metric over no pairs or tokens; TRL's is 0.
    mean_of_nothing = 0.0
    # What each metric of the step or the evaluation in progress sums up to, and over how much, [2]; by mode, as TRL
    # keeps its metrics.
    _sums: dict[str, dict[str, Tensor]] | None = None
    # The least and the greatest values of others, by name.
    _extremes: dict[str, dict[str, Tensor]] | None = None
    # Tokens of the step in progress on this process.
    _step_tokens: Tensor | None = None
    _held_out_prefix = "eval"
    # Scores of the pairs of the evaluation in progress, for a loss that is one of all pairs.
    _held_out: list[PreferenceScores] | tuple[()] = ()

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        # `predict`, and an evaluation that was interrupted, leave what was never logged.
        self._metrics["eval"].clear()
        if self._sums:
            self._sums["eval"].clear()
            self._extremes["eval"].clear()
        self._held_out = []
        self._held_out_prefix = metric_key_prefix
        return super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)

    def add_metrics(
        self,
        values: dict[str, tuple[Tensor, Tensor]],
        *,
        extremes: dict[str, Tensor] | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Add a micro-batch to its step's means. Every process must call this, once for each micro-batch.

        In evaluation, a metric `loss` replaces the held-out loss that transformers averages over batches.

        Args:
            values: for each metric, the sum over this process's micro-batch, and how much it sums over (such as the
                number of pairs, or of tokens), each a tensor of one number.
            extremes: least values by names with `min`, greatest ones by others, each a tensor of one number; NaN where
                there is none.
            tokens: this process's tokens, which TRL counts over the run as `num_tokens`.
        """
        mode = "train" if self.model.training else "eval"
        if self._sums is None:
            self._sums, self._extremes = {"train": {}, "eval": {}}, {"train": {}, "eval": {}}
        for name, pair in values.items():
            added = torch.stack([self.widened(number) for number in pair])
            self._sums[mode][name] = self._sums[mode].get(name, 0) + added
        for name, value in (extremes or {}).items():
            value = self.widened(value)
            self._extremes[mode][name] = _extreme(name, torch)(self._extremes[mode].get(name, value), value)
        if tokens is not None and mode == "train":
            self._step_tokens = tokens if self._step_tokens is None else self._step_tokens + tokens
        elif tokens is not None:
            self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._end_step("train")
        return loss

    def forget_step(self) -> None:
        """Drop what the micro-batches of the step in progress have added, which will be computed again."""
        self._step_tokens = None
        if self._sums:
            self._sums["train"].clear()
            self._extremes["train"].clear()

    def widened(self, values: Tensor) -> Tensor:
        """Values without gradient in float64; in float32 on Apple's GPUs, which have no float64."""
        dtype = torch.float32 if self.accelerator.device.type == "mps" else torch.float64
        return values.detach().to(self.accelerator.device, dtype)

    def counted(self, rows: int) -> Tensor:
        """1 for each row of a held-out micro-batch that counts, and 0 for the others, [rows].

        accelerate completes the last batch of several processes with rows from the beginning, which count once.
        """
        state, counted = self.accelerator.gradient_state, torch.ones(rows, device=self.accelerator.device)
        if not self.model.training and state.end_of_dataloader and state.remainder > 0:
            counted[max(state.remainder - rows * self.accelerator.process_index, 0) :] = 0
        return counted

    def _end_step(self, mode: str) -> None:
        sums, extremes = (found[mode] if found else {} for found in (self._sums, self._extremes))
        tokens, self._step_tokens = (self._step_tokens, None) if mode == "train" else (None, self._step_tokens)
        if not sums:
            return
        parts = [torch.cat([*sums.values()]), *(value[None] for value in extremes.values())]
        parts += [] if tokens is None else [tokens.to(parts[0])[None]]
        of_ranks = self.accelerator.gather(torch.cat(parts)).view(-1, sum(map(len, parts))).cpu().numpy()
        totals, logged = of_ranks.sum(axis=0), self._metrics[mode]
        for index, name in enumerate(sums):
            total, count = totals[2 * index : 2 * index + 2]
            logged.setdefault(name, []).append(float(total / count) if count else self.mean_of_nothing)
        for index, name in enumerate(extremes, start=2 * len(sums)):
            logged.setdefault(name, []).append(float(_extreme(name, numpy).reduce(of_ranks[:, index])))
        if tokens is not None:
            # Ranks of a tensor-parallel group hold the same batch.
            self._total_train_tokens += int(totals[-1]) // self._tp_size
            logged["num_tokens"] = [self._total_train_tokens]
        sums.clear()
        extremes.clear()

    def held_out_loss(self) -> float | None:
        """The loss over all rows of the evaluation that has just ended; None for transformers' mean over batches."""
        (loss,) = self._metrics["eval"].pop("loss", [math.nan])
        return None if math.isnan(loss) else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training:
            self._end_step("eval")
            loss, name = self.held_out_loss(), f"{self._held_out_prefix}_loss"
            if loss is not None and name in logs:
                logs[name] = loss
        super().log(logs, start_time)


def _extreme(name: str, library) -> Callable:
    """torch's or numpy's function for the lesser or the greater of two numbers, or the one that is not NaN."""
    return library.fmin if "min" in name else library.fmax


def pair_metrics(scores: PreferenceScores, beta: float, counted: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """TRL's metrics of pairs, as sums and counts over the pairs where `counted` is 1, [B].

    A reward is beta times the log-ratio of summed log-probabilities to the reference; to zero, if there is none.
    """
    chosen, rejected = scores.chosen.detach(), scores.rejected.detach()
    has_reference = scores.ref_chosen is not None
    chosen_reward = beta * (chosen - scores.ref_chosen if has_reference else chosen)
    rejected_reward = beta * (rejected - scores.ref_rejected if has_reference else rejected)
    values = {
        "rewards/chosen": chosen_reward,
        "rewards/rejected": rejected_reward,
        "rewards/accuracies": (chosen_reward > rejected_reward).float(),
        "rewards/margins": chosen_reward - rejected_reward,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    return {name: ((counted * value).sum(), counted.sum()) for name, value in values.items()}
