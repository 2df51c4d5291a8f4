"""Batches of sampled pairs: dealt to processes, encoded, and each response once in a forward pass."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_ext.rollouts.replay import SampledPair


def token_ids(ids: Tensor, mask: Tensor) -> list[array]:
    """The token ids of each row without padding."""
    return [array("i", row[kept].tolist()) for row, kept in zip(ids.cpu(), mask.bool().cpu(), strict=True)]


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
    pairs: Sequence[SampledPair], counted: Sequence[bool], *, pad_token_id: int, version: int
) -> dict[str, Tensor]:
    """Pairs as tensors whose first dimension is P pairs; a second dimension of 2 is chosen, then rejected.

    Returns:
        `prompt_ids` and `prompt_mask` [P, L], padded on the left; `completion_ids` and `completion_mask` [P, 2, T],
        padded on the right; `sampler` and `reference`, sums of log-probabilities, [P, 2]; `fresh`, 1 where the current
        policy sampled the pair, `counted`, 1 where a pair counts, and `group`, equal for pairs of one prompt, [P].
    """
    prompts = [pair.prompt_ids for pair in pairs]
    responses = [ids for pair in pairs for ids in (pair.chosen.ids, pair.rejected.ids)]
    prompt_ids, prompt_mask = _padded(prompts, pad_token_id, left=True)
    completion_ids, completion_mask = _padded(responses, pad_token_id, left=False)
    groups: dict[bytes, int] = {}
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids.unflatten(0, (-1, 2)),
        "prompt_mask": prompt_mask,
        "completion_mask": completion_mask.unflatten(0, (-1, 2)),
        "sampler": torch.tensor([[pair.chosen.log_prob, pair.rejected.log_prob] for pair in pairs]),
        "reference": torch.tensor([[pair.chosen.ref_log_prob, pair.rejected.ref_log_prob] for pair in pairs]),
        "counted": torch.tensor(counted, dtype=torch.float32),
        "fresh": torch.tensor([pair.version == version for pair in pairs], dtype=torch.float32),
        "group": torch.tensor([groups.setdefault(prompt.tobytes(), len(groups)) for prompt in prompts]),
    }


def _padded(rows: Sequence[array], pad_token_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    ids = [torch.tensor(row.tolist(), dtype=torch.long) for row in rows]
    padded = functools.partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
    return padded(ids, padding_value=pad_token_id), padded([torch.ones_like(row) for row in ids])


def forward_rows(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The R distinct responses of a micro-batch of pairs, without columns that hold only padding.

    Returns:
        The token ids of prompt and response and their attention mask, [R, L + T]; 1 at the tokens of the response,
        [R, T]; and the row of each pair's chosen and rejected response, [P, 2].
    """
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
    return ids, attended, attended[:, int(prompts.sum()) :], index.unflatten(0, (-1, 2))
