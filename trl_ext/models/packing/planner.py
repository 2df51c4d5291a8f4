"""The plan of a packed forward pass: the encoded tokens of a padded batch, and where each row finds its own.

The rows of a batch, sorted as sequences of tokens, form a trie: a row's longest common prefix with any earlier row is
the one with the row before it. A plan concatenates what each row adds, in one row without padding, and stores for each
row the path of positions formed by its prefix and its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A shorter common prefix, such as the beginning of a chat template, saves less than its bookkeeping costs.
MINIMUM_SHARED = 8


@dataclass(frozen=True)
class Plan:
    """A batch of B rows and L columns as one row of T tokens, in N segments that N of its rows add.

    Attributes:
        input_ids: the tokens, [1, T].
        position_ids: the position of each in its own row, from 0, [1, T].
        query_lengths: tokens of each segment; their sum is T.
        key_lengths: tokens of the path that each segment attends to, which ends with the segment itself.
        key_index: the paths, concatenated, as positions of the packed row, [sum of key_lengths].
        columns: the packed position of a column of the batch; 0 if it has none, [B, L].
        present: whether a column has a packed position; padding and tokens that predict nothing have none, [B, L].
        shares: whether any prefix is shared; otherwise only padding is left out.
        derived: values that attention back-ends compute from the plan once for all layers.
    """

    input_ids: Tensor
    position_ids: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_index: Tensor
    columns: Tensor
    present: Tensor
    shares: bool
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """T, the number of encoded tokens."""
        return self.input_ids.shape[1]

    def shift_labels(self, labels: Tensor) -> Tensor:
        """The label that each packed position predicts, -100 for none, [1, T], from the batch's labels [B, L]."""
        shifted = torch.full_like(self.input_ids[0], -100)
        counts = labels[:, 1:] != -100
        shifted[self.columns[:, :-1][counts]] = labels[:, 1:][counts]
        return shifted[None]


def plan_batch(
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor | None = None,
    *,
    share: bool = True,
    minimum_shared: int = MINIMUM_SHARED,
) -> Plan | None:
    """Plan the packed forward pass of a padded batch.

    With labels for a causal language model, a shared prefix ends one token before its rows diverge, so that every
    packed position has one next token. Tokens after a row's last label, which predict nothing, are not encoded.
    Without labels, every token is encoded.

    Args:
        input_ids: [B, L].
        attention_mask: 1 on the tokens of a row, which are one block, padded on either side or both, [B, L].
        labels: the next-token labels of a causal language model, unshifted, -100 for none, [B, L].
        share: False to leave out padding only.
        minimum_shared: a shorter common prefix is encoded again for each row.

    Returns:
        The plan, on the device of `input_ids`; None for a batch that no plan fits: an empty row, a mask with holes, or
        a label that is on padding, on a row's first token, or differs from the input's token.
    """
    ids, attended = input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0
    if not ids.size:
        return None
    lengths, first = attended.sum(axis=1), attended.argmax(axis=1)
    column = np.arange(ids.shape[1])
    block = (column >= first[:, None]) & (column < (first + lengths)[:, None])
    if not lengths.all() or not (block == attended).all():
        return None
    needed = lengths
    if labels is not None:
        needed = _needed_tokens(labels.cpu().numpy(), ids, attended, first)
        if needed is None:
            return None
    # Includes the token that the last one predicts. Later tokens must not separate rows that are encoded alike.
    ends = first + np.minimum(lengths, needed + 1)
    rows = [ids[row, start:end] for row, (start, end) in enumerate(zip(first, ends, strict=True))]
    # The bytes of big-endian numbers sort like the numbers.
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i8").tobytes()) if share else range(len(rows))

    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)
    segments: list[tuple[int, int]] = []
    total, previous = 0, None
    for row in order:
        shared = 0
        if share and previous is not None:
            shared = max(0, _common_prefix(rows[previous], rows[row]) - (labels is not None))
            shared = shared if shared >= minimum_shared else 0
        added = needed[row] - shared
        own = np.arange(total, total + added)
        paths[row] = np.concatenate([paths[previous][:shared], own]) if shared else own
        total, previous = total + added, row
        if added:
            segments.append((row, int(added)))

    packed_ids, packed_positions = np.empty(total, np.int64), np.empty(total, np.int64)
    columns, present = np.zeros(ids.shape, np.int64), np.zeros(ids.shape, bool)
    for row, path in enumerate(paths):
        packed_ids[path] = rows[row][: len(path)]
        packed_positions[path] = np.arange(len(path))
        columns[row, first[row] : first[row] + len(path)] = path
        present[row, first[row] : first[row] + len(path)] = True

    def place(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(input_ids.device)

    return Plan(
        input_ids=place(packed_ids)[None],
        position_ids=place(packed_positions)[None],
        query_lengths=tuple(added for _, added in segments),
        key_lengths=tuple(len(paths[row]) for row, _ in segments),
        key_index=place(np.concatenate([paths[row] for row, _ in segments])),
        columns=place(columns),
        present=place(present),
        shares=bool(total < needed.sum()),
    )


def _needed_tokens(labels: np.ndarray, ids: np.ndarray, attended: np.ndarray, first: np.ndarray) -> np.ndarray | None:
    """How many tokens of each row predict its labels, at least one; None if the labels do not fit. [B]."""
    counts = labels != -100
    # A causal model never scores the first column.
    counts[:, 0] = False
    predicted_from = np.roll(attended, 1, axis=1)
    if (counts & ~(attended & predicted_from)).any() or (labels != ids)[counts].any():
        return None
    last = counts.shape[1] - 1 - counts[:, ::-1].argmax(axis=1)
    return np.where(counts.any(axis=1), last - first, 1)


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
