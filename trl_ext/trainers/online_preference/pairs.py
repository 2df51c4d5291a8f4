"""Batches of pairs: distributes and encodes pairs, passes each response through a model once, and weights losses."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_ext.losses import PreferenceScores
from trl_ext.rollouts.replay import SampledPair
from trl_ext.trainers.preference.whole_batch import join_scores, map_scores


def deal_pairs(
    pairs: Sequence[SampledPair], filler: SampledPair, parts: int, rank: int, ranks: int
) -> tuple[list[SampledPair], list[bool]]:
    """One process's part of the pairs of all processes, and which of them count.

    It is of the same size on every process, a multiple of `parts` (the micro-batches), and filled with `filler`.
    """
    slots = parts * max(-(-len(pairs) // (parts * ranks)), 1)
    own = list(pairs[rank * slots : (rank + 1) * slots])
    missing = slots - len(own)
    return own + [filler] * missing, [True] * len(own) + [False] * missing


def encode_pairs(
    pairs: Sequence[SampledPair],
    counted: Sequence[bool],
    *,
    pad_token_id: int,
    version: int,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Pairs as tensors whose first dimension is P pairs; a second dimension of 2 is chosen, then rejected.

    Returns:
        `prompt_ids` and `prompt_mask` [P, L], padded on the left; `completion_ids` and `completion_mask` [P, 2, T],
        padded on the right; `sampler` and `reference`, sums of log-probabilities, [P, 2]; `fresh`, 1 where the current
        policy sampled the pair, `counted`, 1 where a pair counts, and `group`, equal for pairs of one prompt, [P].
    """
    prompts = [pair.prompt_ids for pair in pairs]
    responses = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    prompt_ids, prompt_mask = _padded(prompts, pad_token_id, left=True)
    completion_ids, completion_mask = _padded(responses, pad_token_id, left=False)
    groups: dict[bytes, int] = {}
    batch = {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids.unflatten(0, (-1, 2)),
        "prompt_mask": prompt_mask,
        "completion_mask": completion_mask.unflatten(0, (-1, 2)),
        "sampler": torch.tensor([[pair.chosen_log_prob, pair.rejected_log_prob] for pair in pairs]),
        "reference": torch.tensor([[pair.ref_chosen, pair.ref_rejected] for pair in pairs]),
        "counted": torch.tensor(counted, dtype=torch.float32),
        "fresh": torch.tensor([pair.version == version for pair in pairs], dtype=torch.float32),
        "group": torch.tensor([groups.setdefault(prompt.tobytes(), len(groups)) for prompt in prompts]),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _padded(rows: Sequence[array], pad_token_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    ids = [torch.tensor(row.tolist(), dtype=torch.long) for row in rows]
    padded = functools.partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
    return padded(ids, padding_value=pad_token_id), padded([torch.ones_like(row) for row in ids])


@dataclass
class ForwardRows:
    """The R distinct responses of a micro-batch.

    Attributes:
        input_ids, attention_mask: prompt and response, [R, L + T].
        mask: 1 at the tokens of the response, [R, T].
        index: the row of each pair's chosen and rejected response, [P, 2].
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    index: Tensor


def forward_rows(batch: dict[str, Tensor]) -> ForwardRows:
    """The responses of a micro-batch of pairs, each once, without columns that hold only padding."""
    prompts = batch["prompt_mask"].any(dim=0)
    responses = batch["completion_mask"].flatten(0, 1).any(dim=0)
    ids, attended = (
        torch.cat(
            [
                batch[f"prompt_{kind}"][:, prompts].repeat_interleave(2, dim=0),
                batch[f"completion_{kind}"].flatten(0, 1)[:, responses],
            ],
            dim=1,
        )
        for kind in ("ids", "mask")
    )
    rows, index = torch.cat([ids, attended], dim=1).unique(dim=0, return_inverse=True)
    ids, attended = rows.chunk(2, dim=1)
    return ForwardRows(ids, attended, attended[:, int(prompts.sum()) :], index.unflatten(0, (-1, 2)))


class SampledPairMetrics:
    """Logs TRL's pair metrics for a trainer on batches of pairs, over the pairs that count and their tokens.

    The held-out loss of a batch-coupled loss treats all held-out pairs as one batch.
    """

    # Scores of the held-out pairs of an evaluation in progress, over all processes; None for other losses.
    _held_out: list[PreferenceScores] | None = None

    def _held_out_mean(self, scores: PreferenceScores, counted: Tensor) -> Tensor:
        """The mean loss of the pairs that count in a held-out micro-batch; 0 if none does."""
        preference, keep = self.algorithm.preference, counted.bool()
        if preference.batch_coupled:
            everywhere = self.accelerator.gather(counted).bool()
            gathered = map_scores(lambda values: self.accelerator.gather(values.detach())[everywhere], scores)
            self._held_out = [*(self._held_out or []), gathered]
        if not keep.any():
            return counted.new_zeros(())
        return preference(map_scores(lambda values: values[keep], scores)).mean()

    def _held_out_loss(self) -> float | None:
        parts, self._held_out = self._held_out, None
        loss = super()._held_out_loss()
        if parts is None or not any(len(part.chosen) for part in parts):
            return loss
        return self.algorithm.preference(join_scores(parts)).mean().item()

    def _micro_batch_counts(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = inputs["completion_mask"].sum(dim=(1, 2)) * inputs["counted"]
        return {"pairs": inputs["counted"].sum(), "tokens": tokens.sum(), "fresh": (tokens * inputs["fresh"]).sum()}

    def _loss_weight(self) -> str:
        return "pairs"

    def _step_metrics(self, mode: str) -> dict[str, str]:
        groups = {"rewards": ("chosen", "rejected", "margins", "accuracies"), "logps": ("chosen", "rejected")}
        of_pairs = [f"{group}/{name}" for group, names in groups.items() for name in names]
        return {**dict.fromkeys(of_pairs, "pairs"), "entropy": "tokens", "kl": "fresh"}

    def _log_pairs(self, scores: PreferenceScores, batch: dict, entropies: Tensor) -> None:
        """Log the metrics of a micro-batch over all processes, NaN where no pair contributes.

        Args:
            scores: the scores of its pairs.
            batch: the pairs.
            entropies: of each pair's responses, summed over tokens, [P].
        """
        counted, chosen, rejected = batch["counted"], scores.chosen.detach(), scores.rejected.detach()
        ratios = chosen, rejected
        if scores.ref_chosen is not None:
            ratios = chosen - scores.ref_chosen, rejected - scores.ref_rejected
        beta = self.algorithm.beta
        values = {
            "rewards/chosen": beta * ratios[0],
            "rewards/rejected": beta * ratios[1],
            "rewards/margins": beta * (ratios[0] - ratios[1]),
            "rewards/accuracies": (ratios[0] > ratios[1]).float(),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            "entropy": entropies,
        }
        if scores.ref_chosen is not None:
            values["kl"] = (ratios[0] + ratios[1]) * batch["fresh"]
        counts = self._micro_batch_counts(batch)
        local = [(counted * value).sum() for value in values.values()] + list(counts.values())
        totals = self.accelerator.reduce(torch.stack([value.float() for value in local]), reduction="sum").tolist()
        counts = dict(zip(counts, totals[len(values) :], strict=True))
        mode = "train" if self.model.training else "eval"
        by = self._step_metrics(mode)
        for name, total in zip(values, totals, strict=False):
            count = counts[by[name]]
            self._metrics[mode][name].append(total / count if count else math.nan)
