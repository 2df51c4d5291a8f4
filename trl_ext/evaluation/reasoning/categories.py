"""The three ways in which a response to a problem with a known answer can come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# Category -> its format and answer rewards. An answer in the wrong form is not looked for, so (0, 1) does not occur.
CATEGORIES = {"correct": (1.0, 1.0), "wrong_answer": (1.0, 0.0), "wrong_format": (0.0, 0.0)}


def category_of(format_reward: float, answer_reward: float) -> str:
    """The category of a graded response: `correct`, `wrong_answer` in the right form, or `wrong_format`.

    Raises:
        ValueError: rewards other than 0 and 1, or a correct answer in the wrong form.
    """
    for name, rewards in CATEGORIES.items():
        if (format_reward, answer_reward) == rewards:
            return name
    raise ValueError(
        f"format_reward {format_reward} and answer_reward {answer_reward}: each must be 0 or 1, and an answer can "
        "only be correct in the right form"
    )


def count_categories(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many rows are in each category, by their `category`; every category is there."""
    counts = Counter(row["category"] for row in rows)
    return {name: counts[name] for name in CATEGORIES}
