"""Metrics of an optimizer step or an evaluation describe its whole batch, however it was divided.

TRL logs a mean for each micro-batch and then averages these. That gives the mean over pairs if the micro-batches have
equal size, but not the mean over tokens. Here, sums and counts are added up over the micro-batches and processes of a
step, and divided at its end. If a step is one micro-batch, the result is TRL's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_ext.losses import PreferenceScores


class StepMetrics:
    """Mixin before one of TRL's trainers, whose loss step calls `add_metrics`.

    In an evaluation over several processes whose rows do not divide evenly, the rows that accelerate repeats count
    twice in these means.
    """

    # The mean of a metric over no pairs or tokens; TRL's is 0.
    mean_of_nothing = 0.0
    # Sum and count of each metric of the step or the evaluation in progress; kept apart, as TRL keeps its metrics.
    _sums: dict[str, dict[str, tuple[float, float]]] | None = None
    _held_out_prefix = "eval"
    # Scores of the pairs of the evaluation in progress, for a loss that is one of all pairs.
    _held_out: list[PreferenceScores]

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        # `predict`, and an evaluation that was interrupted, leave what was never logged.
        self._metrics["eval"].clear()
        if self._sums:
            self._sums["eval"].clear()
        self._held_out = []
        self._held_out_prefix = metric_key_prefix
        return super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)

    def add_metrics(self, values: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add a micro-batch to its step's means. Every process must call this, once for each micro-batch.

        In evaluation, a metric `loss` replaces the held-out loss that transformers averages over batches.

        Args:
            values: for each metric, the sum over this process's micro-batch, and how much it sums over (such as the
                number of pairs, or of tokens), each a tensor of one number.
        """
        mode = "train" if self.model.training else "eval"
        numbers = torch.stack([number.detach().double() for value in values.values() for number in value])
        totals = self.accelerator.reduce(numbers.to(self.accelerator.device), reduction="sum").tolist()
        self._sums = self._sums or {"train": {}, "eval": {}}
        for name, total, count in zip(values, totals[::2], totals[1::2], strict=True):
            before = self._sums[mode].get(name, (0.0, 0.0))
            self._sums[mode][name] = (before[0] + total, before[1] + count)
        if mode == "train" and self.accelerator.sync_gradients:
            self._end_step(mode)

    def _end_step(self, mode: str) -> None:
        sums = self._sums[mode] if self._sums else {}
        for name, (total, count) in sums.items():
            self._metrics[mode].setdefault(name, []).append(total / count if count else self.mean_of_nothing)
        sums.clear()

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
