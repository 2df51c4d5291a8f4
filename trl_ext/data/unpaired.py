"""Convert preference pairs to labelled responses, in an order suited to losses that use neighbouring rows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def pairs_to_unpaired(dataset: Dataset, *, seed: int = 0) -> Dataset:
    """Split each pair into two rows with `prompt`, `completion` and `label`.

    The pairs are shuffled by `seed`. Desirable and undesirable rows then alternate, so that every batch contains both
    labels, and neighbours answer different prompts (with four pairs or more): KTO estimates a divergence from each
    prompt with its neighbour's response. Both rows keep the columns besides `chosen` and `rejected`.

    Raises:
        ValueError: a column is missing, or there are no pairs.
    """
    from datasets import Dataset

    for column in ("prompt", "chosen", "rejected"):
        if column not in dataset.column_names:
            raise ValueError(f"pairs: {column!r} is missing, and there are {', '.join(dataset.column_names)}")
    count = len(dataset)
    if not count:
        raise ValueError("the data holds no pairs to take apart")
    order = random.Random(seed).sample(range(count), count)
    # Half the data set away from the chosen response of the same pair.
    half = count // 2
    rows = []
    for position, index in enumerate(order):
        for side, pair in (("chosen", dataset[index]), ("rejected", dataset[order[(position + half) % count]])):
            kept = {name: value for name, value in pair.items() if name not in ("chosen", "rejected")}
            rows.append({**kept, "completion": pair[side], "label": side == "chosen"})
    return Dataset.from_list(rows)
