"""Metrics of an optimizer step or an evaluation describe its whole batch, however it was divided.

TRL logs a mean for each micro-batch and then averages these. That gives the mean over pairs if the micro-batches have
equal size, but not the mean over tokens. Here, sums and counts are added up over the micro-batches and processes of a
step, and divided at its end. If a step is one micro-batch, the result is TRL's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trl_ext.losses import PreferenceScores


class StepMetrics:
    """Mixin before one of TRL's trainers, whose loss step calls `add_metrics`.

    In an evaluation over several processes whose rows do not divide evenly, the rows that accelerate repeats count
    twice in these means.
    """

    # Sum and count of each metric of the step or the evaluation in progress; kept apart, as TRL keeps its metrics.
    _sums: dict[str, dict[str, tuple[float, float]]] | None = None

    def add_metrics(self, values: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add a micro-batch to its step's means. Every process must call this, once for each micro-batch.

        In evaluation, a metric `loss` replaces the held-out loss that transformers averages over batches.

        Args:
            values: for each metric, the sum over this process's micro-batch, and how much it sums over (such as the
                number of pairs, or of tokens), each a tensor of one number. The mean over nothing is NaN.
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
            self._metrics[mode].setdefault(name, []).append(total / count if count else math.nan)
        sums.clear()

    def held_out_loss(self) -> float | None:
        """The loss over all rows of the evaluation that has just ended; None for transformers' mean over batches."""
        (loss,) = self._metrics["eval"].pop("loss", [math.nan])
        return None if math.isnan(loss) else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training:
            self._end_step("eval")
            loss = self.held_out_loss()
            logs.update({name: loss for name in logs if name.endswith("_loss") and loss is not None})
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


class MergedMetrics:
    """Mixin before a trainer that logs a value for each micro-batch; it defines counts and what weights each metric.

    Costs one exchange of a few numbers per micro-batch. In an evaluation over several processes whose rows do not
    divide evenly, the rows that accelerate repeats count twice in these means.
    """

    # Weights of the micro-batch values since the last merge, in order.
    _unmerged: dict[str, list[dict[str, float]]] | None = None

    def _micro_batch_counts(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Numbers of pairs, tokens or the like in this process's micro-batch."""
        raise NotImplementedError

    def _step_metrics(self, mode: str) -> dict[str, str]:
        """Names of metrics, each with the count that weights it, or `min` or `max` for an extreme."""
        raise NotImplementedError

    def _loss_weight(self) -> str | None:
        """The count that weights the held-out losses of batches and ranks; None to keep TRL's mean."""
        return None

    def _held_out_loss(self) -> float | None:
        """The loss over all rows of the evaluation that has just ended; None to keep TRL's. Called once."""
        counts = self._unmerged["eval"] if self._unmerged else []
        weight = sum(count.get(self._loss_weight(), 0.0) for count in counts)
        return sum(count["loss"] for count in counts) / weight if weight else None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        counts = self._micro_batch_counts(inputs)
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        mode, weight = "train" if self.model.training else "eval", self._loss_weight()
        if mode == "eval" and weight:
            loss = result[0] if return_outputs else result
            counts["loss"] = loss.double() * counts[weight]
        values = torch.stack([count.detach().double() for count in counts.values()])
        totals = self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum").tolist()
        if self._unmerged is None:
            self._unmerged = {"train": [], "eval": []}
        self._unmerged[mode].append(dict(zip(counts, totals, strict=True)))
        if mode == "train" and self.accelerator.sync_gradients:
            self._merge(mode)
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training:
            loss = self._held_out_loss()
            for name in [name for name in logs if name.endswith("_loss")] if loss is not None else []:
                logs[name] = loss
            self._merge("eval")
        super().log(logs, start_time)

    def _merge(self, mode: str) -> None:
        """Merge the latest micro-batch values of each metric into one value."""
        counts = self._unmerged[mode] if self._unmerged else []
        if counts:
            self._unmerged[mode] = []
        if len(counts) < 2:
            return
        for name, by in self._step_metrics(mode).items():
            values = self._metrics[mode].get(name, [])
            latest = values[-len(counts) :]
            if len(latest) == len(counts):
                values[-len(counts) :] = [merged(latest, by, counts)]


def merged(values: Sequence[float], by: str, counts: Sequence[dict[str, float]]) -> float:
    """Merge the values of several micro-batches into one; NaN values are left out.

    Args:
        values: one for each micro-batch.
        by: `min`, `max`, or the count to weight them by.
        counts: the counts of each micro-batch.
    """
    known = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
    if not known:
        return math.nan
    if by in ("min", "max"):
        return {"min": min, "max": max}[by](value for value, _ in known)
    total = sum(count[by] for _, count in known)
    # TRL logs 0 for a batch without tokens; here no batch has any.
    return sum(value * count[by] for value, count in known) / total if total else 0.0


class RolloutMetrics(MergedMetrics):
    """For a policy's responses; a metric of clipped sequence ratios is weighted by responses.

    With several processes, TRL's own held-out loss drops responses of the last batch, because accelerate takes the
    repeated prompts for rows that pad the batch.
    """

    # A trainer's own means over the tokens that its loss counts.
    _own_means: tuple[str, ...] = ()

    @staticmethod
    def _token_mask(inputs: dict) -> Tensor:
        """1 where the policy chose the token: neither padding nor tool output. [B, T]."""
        mask = inputs["completion_mask"]
        return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask

    def _micro_batch_counts(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        # A trainer's loss may leave out responses; TRL's metrics cover all tokens.
        mask, counted = RolloutMetrics._token_mask(inputs), self._token_mask(inputs)
        rows = torch.tensor(len(mask), device=mask.device)
        return {"tokens": mask.sum(), "counted": counted.sum(), "rows": rows}

    def _loss_weight(self) -> str:
        return "counted" if self.algorithm.aggregation == "token_mean" else "rows"

    def _step_metrics(self, mode: str) -> dict[str, str]:
        by = "rows" if self.algorithm.ratio == "sequence" else "tokens"
        return {
            "kl": "tokens",
            "entropy": "tokens",
            "cispo_clip_ratio": "tokens",
            "log_ratio/clamped": "counted",
            **dict.fromkeys(self._own_means, "counted"),
            "sampling/sampling_logp_difference/mean": "counted",
            "sampling/sampling_logp_difference/max": "max",
            **{f"clip_ratio/{name}_mean": by for name in ("low", "high", "region")},
            "clip_ratio/low_min": "min",
            "clip_ratio/high_max": "max",
        }
