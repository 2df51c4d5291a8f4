"""The plan of a packed forward pass: the encoded tokens of a padded batch, and where each row finds its own.

The rows of a batch, sorted as sequences of tokens, form a trie: a row's longest common prefix with any earlier row is
the one with the row before it. A plan concatenates what each row adds, in one row without padding, and stores for each
row the path of positions formed by its prefix and its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

# A shorter common prefix, such as the beginning of a chat template, saves less than its bookkeeping costs.
MINIMUM_SHARED = 8


class Paths(NamedTuple):
    """What one call of attention over all N segments needs of a plan.

    Compiled layers receive it in place of the plan: its numbers may change without another compilation.

    Attributes:
        index: the paths, concatenated, as positions of the packed row, [K]; None if no prefix is shared.
        query_bounds, key_bounds: where the tokens and the path of each segment begin, and the end, int32, [N + 1].
        longest_query, longest_key: tokens of the longest segment and of the longest path.
    """

    index: Tensor | None
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Plan:
    """A batch of B rows and L columns as one row of T tokens, in N segments that N of its rows add.

    Attributes:
        input_ids: the tokens, [1, T].
        position_ids: the position of each in its own row, from 0, [1, T].
        query_lengths: tokens of each segment; their sum is T.
        key_lengths: tokens of the path that each segment attends to, which ends with the segment itself.
        key_index: the paths, concatenated, as positions of the packed row, [sum of key_lengths].
        sources: the packed positions of the states that are read, row by row, [P]: of every column that has one, or of
            the tokens before the labels, if there are labels.
        places: the columns of these states, as indices of the flattened batch, [P].
        targets: the labels, [1, P]; None if every state is read.
        columns: the packed position of a column of the batch; 0 if it has none, on the CPU, [B, L].
        present: whether a column has a packed position, on the CPU; padding and tokens that are not encoded have none,
            [B, L].
        shares: whether any prefix is shared; otherwise only padding is left out.
        derived: values that attention back-ends compute from the plan once for all layers.
    """

    input_ids: Tensor
    position_ids: Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_index: Tensor
    sources: Tensor
    places: Tensor
    targets: Tensor | None
    columns: Tensor
    present: Tensor
    shares: bool
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """T, the number of encoded tokens."""
        return self.input_ids.shape[1]

    @property
    def paths(self) -> Paths:
        """The segments for one call of attention over all of them."""
        if "paths" not in self.derived:
            lengths = torch.tensor([self.query_lengths, self.key_lengths])
            bounds = pad(lengths.cumsum(dim=1), (1, 0)).int().to(self.key_index.device)
            index, longest = self.key_index if self.shares else None, lengths.amax(dim=1).tolist()
            self.derived["paths"] = Paths(index, *bounds, *longest)
        return self.derived["paths"]

    def read(self, states: Tensor) -> Tensor:
        """The states of the packed row, [1, T, H], that are read, [1, P, H]."""
        return states.squeeze(0).index_select(0, self.sources)[None]

    def spread(self, values: Tensor) -> Tensor:
        """What was made of the states that are read, [1, P, ...], at their columns, 0 elsewhere: [B, L, ...].

        With labels, the result has L - 1 columns, and each belongs to the token after it.
        """
        rows, width = self.present.shape
        width -= self.targets is not None
        spread = values.new_zeros(rows * width, *values.shape[2:]).index_copy(0, self.places, values.squeeze(0))
        return spread.view(rows, width, *values.shape[2:])

    def unpack(self, states: Tensor) -> Tensor:
        """States of the packed row, [1, T, H], at their columns of the batch, [B, L, H]; 0 where a column has none."""
        return self.spread(self.read(states))


def plan_batch(
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor | None = None,
    *,
    share: bool = True,
    minimum_shared: int = MINIMUM_SHARED,
    device: torch.device | str | None = None,
    round_up: bool = False,
) -> Plan | None:
    """Plan the packed forward pass of a padded batch.

    The plan is made on the host, and reaches a device in a single copy that does not wait for it.

    Args:
        input_ids: [B, L], best on the CPU.
        attention_mask: 1 on the tokens of a row, which are one block, padded on either side or both, [B, L].
        labels: the next-token labels, -100 for none, [B, L]. The last token of each row of several, which predicts no
            other, is then left out.
        share: False to leave out padding only.
        minimum_shared: a shorter common prefix is encoded again for each row.
        device: where the plan goes; None for the device of `input_ids`.
        round_up: whether to fill T up to one of few lengths by a segment that no row reads. Each new length costs a
            GPU memory and the choice of its kernels.

    Returns:
        The plan; None for a batch that no plan fits: with an empty row, a mask with holes, or a label after padding.
    """
    ids, attended = _on_host(input_ids), _on_host(attention_mask) != 0
    if not ids.size:
        return None
    lengths, first = attended.sum(axis=1), attended.argmax(axis=1)
    column = np.arange(ids.shape[1])
    block = (column >= first[:, None]) & (column < (first + lengths)[:, None])
    if not lengths.all() or not (block == attended).all():
        return None
    encoded = np.maximum(lengths - (labels is not None), 1)
    rows = [ids[row, start : start + length] for row, (start, length) in enumerate(zip(first, encoded, strict=True))]
    # The bytes of big-endian numbers sort like the numbers.
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i8").tobytes()) if share else range(len(rows))

    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)
    segments: list[tuple[int, int]] = []
    total, previous = 0, None
    for row in order:
        shared = _common_prefix(rows[previous], rows[row]) if share and previous is not None else 0
        shared = shared if shared >= minimum_shared else 0
        added = len(rows[row]) - shared
        own = np.arange(total, total + added)
        paths[row] = np.concatenate([paths[previous][:shared], own]) if shared else own
        total, previous = total + added, row
        if added:
            segments.append((row, added))

    added_lengths = [added for _, added in segments]
    path_lengths = [len(paths[row]) for row, _ in segments]
    key_index = [paths[row] for row, _ in segments]
    shares = total < int(encoded.sum())
    if filler := -total % _step_of_lengths(total) if round_up else 0:
        added_lengths.append(filler)
        path_lengths.append(filler)
        key_index.append(np.arange(total, total + filler))

    packed_ids, packed_positions = np.zeros(total + filler, np.int64), np.zeros(total + filler, np.int64)
    packed_positions[total:] = np.arange(filler)
    columns, present = np.zeros(ids.shape, np.int64), np.zeros(ids.shape, bool)
    for row, path in enumerate(paths):
        packed_ids[path] = rows[row]
        packed_positions[path] = np.arange(len(path))
        columns[row, first[row] : first[row] + len(path)] = path
        present[row, first[row] : first[row] + len(path)] = True

    parts = [packed_ids, packed_positions, np.concatenate(key_index)]
    if labels is None:
        parts += [columns[present], np.flatnonzero(present)]
    else:
        following = _on_host(labels)[:, 1:]
        labelled = following != -100
        if (labelled & ~present[:, :-1]).any():
            return None
        parts += [columns[:, :-1][labelled], np.flatnonzero(labelled), following[labelled]]
    moved = _on_device(np.concatenate(parts), device or input_ids.device).split([len(part) for part in parts])
    return Plan(
        input_ids=moved[0][None],
        position_ids=moved[1][None],
        query_lengths=tuple(added_lengths),
        key_lengths=tuple(path_lengths),
        key_index=moved[2],
        sources=moved[3],
        places=moved[4],
        targets=None if labels is None else moved[5][None],
        columns=torch.from_numpy(columns),
        present=torch.from_numpy(present),
        shares=shares,
    )


def _step_of_lengths(tokens: int) -> int:
    """The distance between the lengths to which a packed row of so many tokens may be filled up."""
    return 128 if tokens <= 4096 else 512


def _on_host(tensor: Tensor) -> np.ndarray:
    return (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()


def _on_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(array)
    # From pageable memory, the copy would wait for what the device still computes.
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
