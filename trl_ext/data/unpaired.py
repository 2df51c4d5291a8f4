"""Preference pairs as single labelled responses, in an order that losses over neighbours can use."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def pairs_to_unpaired(dataset: Dataset, *, seed: int = 0) -> Dataset:
    """Take pairs apart: a row with `prompt`, `completion` and `label` for each of the two responses.

    Desirable and undesirable rows alternate, and neighbours answer different prompts (with four pairs or more): KTO
    estimates a divergence from each prompt with its neighbour's response, in batches of consecutive rows, each of
    which then holds both labels. The pairs are shuffled first.

    Args:
        dataset: columns `prompt`, `chosen` and `rejected`; other columns are kept for both responses.
        seed: of the shuffling.

    Raises:
        ValueError: a column is missing, or there are no pairs.
    """
    from datasets import Dataset

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
    # Half way round from where the chosen response of the same pair stands.
    half = count // 2
    rows = []
    for position, index in enumerate(order):
        rows.append(_half(dataset[index], "chosen", label=True))
        rows.append(_half(dataset[order[(position + half) % count]], "rejected", label=False))
    return Dataset.from_list(rows)


def _half(row: dict, side: str, *, label: bool) -> dict:
    kept = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
    return {**kept, "completion": row[side], "label": label}
