"""Pairs of sampled responses: their selection, a buffer that replays recent ones, and importance weights for these.

A preference label is valid whichever policy sampled the pair, so the loss is consistent without weights. The
distribution of pairs, however, depends on the policy that sampled them; the weights approximate pairs sampled by the
current policy.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trl_ext.files import write_text

PAIR_CHOICES = ("best_worst", "all")
WEIGHT_CHOICES = ("none", "sequence", "length_normalized")


def select_pairs(
    rewards: Sequence[float], group_size: int, choice: str = "best_worst", tolerance: float = 0.0
) -> tuple[list[tuple[int, int]], int, int]:
    """Pair the responses to each prompt; the response with the higher reward is chosen.

    Args:
        rewards: one per response, group after group; NaN for a response without a reward, which is left out.
        choice: `best_worst` to pair the first best with the first worst response of a group; `all` for every pair of
            its responses.
        tolerance: rewards that differ by no more than this are a tie.

    Returns:
        Positions of the chosen and the rejected response of each pair, in the order of the groups; the number of ties,
        which are dropped; and the number of groups in which fewer than two responses have a reward.
    """
    pairs, ties, unscored = [], 0, 0
    for start in range(0, len(rewards), group_size):
        known = [index for index in range(start, start + group_size) if not math.isnan(rewards[index])]
        if len(known) < 2:
            unscored += 1
            continue
        if choice == "best_worst":
            candidates = [(max(known, key=rewards.__getitem__), min(known, key=rewards.__getitem__))]
        else:
            candidates = combinations(known, 2)
        for one, other in candidates:
            if abs(rewards[one] - rewards[other]) <= tolerance:
                ties += 1
            else:
                pairs.append((one, other) if rewards[one] > rewards[other] else (other, one))
    return pairs, ties, unscored


class Response(NamedTuple):
    """A sampled response: token ids, and its log-probability in nats under the policy that sampled it, and under the
    loss's reference; NaN where it is not used.
    """

    ids: array
    log_prob: float
    ref_log_prob: float


@dataclass(frozen=True)
class SampledPair:
    """Two responses to a prompt, after `version` optimizer updates of the policy, labelled by `reward_version`."""

    prompt_ids: array
    chosen: Response
    rejected: Response
    version: int
    reward_version: str


class ReplayBuffer:
    """Keeps the most recent pairs up to a capacity, and draws from them without replacement.

    A draw depends only on the seed, the policy's version and the stored pairs. There is no random state, so processes
    that store the same pairs draw the same ones. `max_age` is in versions of the policy.
    """

    def __init__(self, capacity: int, max_age: int, seed: int = 0):
        self.capacity, self.max_age, self.seed = capacity, max_age, seed
        self.pairs: list[SampledPair] = []

    def __len__(self) -> int:
        return len(self.pairs)

    def add(self, pairs: Iterable[SampledPair]) -> None:
        """Add pairs as the most recent."""
        self.pairs = [*self.pairs, *pairs][-self.capacity :]

    def drop_old(self, version: int) -> None:
        """Drop pairs older than `max_age` at this version of the policy."""
        self.pairs = [pair for pair in self.pairs if version - pair.version <= self.max_age]

    def draw(self, count: int, version: int) -> list[SampledPair]:
        """Draw `count` pairs, or all if there are fewer, for this version of the policy, without replacement."""
        numbers = random.Random(f"{self.seed} {version}")
        return [self.pairs[index] for index in numbers.sample(range(len(self.pairs)), min(count, len(self.pairs)))]

    def save(self, path: str | Path) -> None:
        """Write the pairs to a JSON file, atomically."""
        write_text(path, json.dumps(list(map(vars, self.pairs)), default=list))

    def load(self, path: str | Path) -> None:
        """Replace the pairs with those in a file written by `save`, keeping the most recent up to the capacity."""
        rows = json.loads(Path(path).read_text(encoding="utf-8"))[-self.capacity :]
        self.pairs = [
            SampledPair(
                array("i", row.pop("prompt_ids")),
                *(Response(array("i", ids), *sums) for ids, *sums in (row.pop("chosen"), row.pop("rejected"))),
                **row,
            )
            for row in rows
        ]


def replayed_count(fresh: int, fraction: float) -> int:
    """Number of replayed pairs to add to `fresh` new ones to make up `fraction` of all: `fresh f / (1 - f)`."""
    return round(fresh * fraction / (1 - fraction))


# ---- Importance weights ----


def importance_weights(
    log_ratio: Tensor, kind: str = "sequence", *, lengths: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Importance weights of samples from another policy: `min(cap, ratio)`. No gradient flows. [P].

    Args:
        log_ratio: log ratio of the current policy's to the sampling policy's probability, summed over tokens, [P].
        kind: `sequence` for the ratio of probabilities; `length_normalized` for its geometric mean over tokens, which
            has lower variance but is biased (as GSPO's ratio, arXiv 2507.18071); `none` for 1.
        lengths: number of summed tokens, [P]; for `length_normalized`.
        cap: maximum weight; None for no cap.
    """
    if kind == "none":
        return torch.ones_like(log_ratio)
    log_weights = log_ratio.detach()
    if kind == "length_normalized":
        log_weights = log_weights / lengths.clamp(min=1)
    # Cap before exponentiating, which could overflow.
    return log_weights.clamp(max=math.inf if cap is None else math.log(cap)).exp()


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """`sum(w v) / sum(w)`, the self-normalised estimate; 0 if all weights are 0."""
    return (weights * values).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def effective_sample_size(weights: Tensor) -> Tensor:
    """`(sum w)^2 / sum w^2`: the number of equally weighted samples with the same variance; 0 without weights."""
    return weights.sum().square() / weights.square().sum().clamp(min=torch.finfo(weights.dtype).tiny)
