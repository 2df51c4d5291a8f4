"""Replay of recent pairs: a buffer with a maximum age, and importance weights for the pairs drawn from it.

A preference label is valid whichever policy sampled the pair, so the loss is consistent without weights. The
distribution of pairs, however, depends on the policy that sampled them; the weights approximate pairs sampled by the
current policy. The sampling policy and the loss's reference are different models, so the buffer keeps
log-probabilities under both.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trl_ext.files import write_text

WEIGHT_CHOICES = ("none", "sequence", "length_normalized")


class Response(NamedTuple):
    """A sampled response: token ids, and sums of log-probabilities in nats.

    Attributes:
        ids: an array of 32-bit integers.
        log_prob: under the policy that sampled it; NaN if unused.
        ref_log_prob: under the loss's reference; NaN for a reference-free loss.
    """

    ids: array
    log_prob: float
    ref_log_prob: float


@dataclass(frozen=True)
class SampledPair:
    """Two responses to a prompt.

    Attributes:
        prompt_ids: token ids, as an array of 32-bit integers.
        chosen, rejected: the responses.
        version: number of optimizer updates of the policy that sampled them.
        reward_version: version of the reward that labelled them.
    """

    prompt_ids: array
    chosen: Response
    rejected: Response
    version: int
    reward_version: str


class ReplayBuffer:
    """Keeps the most recent pairs, and draws from them without replacement.

    A draw depends only on the seed, the policy's version and the stored pairs. There is no random state, so processes
    that store the same pairs draw the same ones.

    Args:
        capacity: maximum number of pairs; the oldest are dropped first.
        max_age: policy versions after which a pair is dropped.
        seed: seed of the draws.
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


def ages(pairs: Sequence[SampledPair], version: int) -> list[int]:
    """Number of policy versions since each pair was sampled."""
    return [version - pair.version for pair in pairs]
