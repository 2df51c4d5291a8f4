"""Build preference pairs from groups of scored responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

PAIR_CHOICES = ("best_worst", "all")


@dataclass
class Selection:
    """The pairs selected from the groups of a rollout.

    Attributes:
        pairs: positions of the chosen and the rejected response, in the order of the groups.
        ties: number of pairs dropped because their rewards are equal.
        unscored: number of groups in which fewer than two responses have a reward.
    """

    pairs: list[tuple[int, int]] = field(default_factory=list)
    ties: int = 0
    unscored: int = 0


def select_pairs(
    rewards: Sequence[float], group_size: int, choice: str = "best_worst", tolerance: float = 0.0
) -> Selection:
    """Pair the responses to each prompt; the response with the higher reward is chosen.

    Args:
        rewards: one per response, group after group; NaN for a response without a reward, which is left out.
        group_size: responses to each prompt.
        choice: `best_worst` to pair the first best with the first worst response of a group; `all` for every pair of
            its responses.
        tolerance: rewards that differ by no more than this are a tie.
    """
    selection = Selection()
    for start in range(0, len(rewards), group_size):
        known = [index for index in range(start, start + group_size) if not math.isnan(rewards[index])]
        if len(known) < 2:
            selection.unscored += 1
            continue
        if choice == "best_worst":
            candidates = [(max(known, key=rewards.__getitem__), min(known, key=rewards.__getitem__))]
        else:
            candidates = combinations(known, 2)
        for one, other in candidates:
            if abs(rewards[one] - rewards[other]) <= tolerance:
                selection.ties += 1
            else:
                selection.pairs.append((one, other) if rewards[one] > rewards[other] else (other, one))
    return selection
