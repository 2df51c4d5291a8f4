"""Convert preference pairs to labelled responses, in an order suited to losses that use neighbouring rows."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def pairs_to_unpaired(dataset: Dataset, *, seed: int = 0) -> Dataset:
    """Split each pair into two rows with `prompt`, `completion` and `label`.

    The pairs are shuffled. Desirable and undesirable rows then alternate, and neighbours answer different prompts
    (with four pairs or more): KTO estimates a divergence from each prompt with its neighbour's response, in batches
    of consecutive rows, so that every batch contains both labels.

    Both rows keep the columns besides `chosen` and `rejected`; `seed` is that of the shuffling.

    Raises:
        ValueError: a column is missing, or there are no pairs.
    """
    from datasets import concatenate_datasets

    for column in ("prompt", "chosen", "rejected"):
        if column not in dataset.column_names:
            raise ValueError(
                f"pairs have the columns prompt, chosen and rejected, and {column!r} is missing: the data has "
                f"{', '.join(dataset.column_names)}"
            )
    count = len(dataset)
    if not count:
        raise ValueError("the data holds no pairs to take apart")
    order = random.Random(seed).sample(range(count), count)
    # Half the data set away from the chosen response of the same pair.
    half = count // 2
    sides = [_side(dataset, side) for side in ("chosen", "rejected")]
    places = [(index, count + order[(position + half) % count]) for position, index in enumerate(order)]
    return concatenate_datasets(sides).select(itertools.chain(*places))


def _side(dataset: Dataset, side: str) -> Dataset:
    others = {"chosen", "rejected", "completion", "label"} - {side}
    rows = dataset.remove_columns([name for name in dataset.column_names if name in others])
    return rows.rename_column(side, "completion").add_column("label", [side == "chosen"] * len(rows))
