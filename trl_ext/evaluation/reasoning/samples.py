"""Several samples per problem: pass@k and majority voting."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# Use all subsets of k samples if there are at most this many, else this many random ones.
MAX_SUBSETS = 200
_CORRECT = object()


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` samples is correct: 1 - C(n - correct, k) / C(n, k).

    The unbiased estimate of Chen et al. (2021) from `n` samples of which `correct` are correct: the mean over all
    subsets of size k.

    Raises:
        ValueError: the counts are inconsistent.
    """
    _check(n, k)
    if not 0 <= correct <= n:
        raise ValueError(f"correct must lie between 0 and n = {n}, got {correct}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[Any], correct: Sequence[bool], k: int, *, seed: int = 0) -> float:
    """Probability that the most frequent answer among `k` of the samples is correct (maj@k; Wang et al., 2022).

    All correct answers count as the same answer, however they are written. Wrong answers are the same if their votes
    are equal. A sample without an answer does not vote; without any vote, the problem counts as failed. Ties are
    broken uniformly at random. The result is the mean over all subsets of size k, or over 200 random ones if there are
    more.

    Args:
        votes: each sample's answer, hashable; None for a sample without one.
        correct: whether each sample is correct.
        k: number of samples that vote.
        seed: seed of the random subsets.

    Raises:
        ValueError: the lists differ in length, or the counts are inconsistent.
    """
    if len(votes) != len(correct):
        raise ValueError(f"{len(votes)} votes for {len(correct)} samples")
    n = len(votes)
    _check(n, k)
    ballots = [_CORRECT if right else vote for vote, right in zip(votes, correct, strict=True)]
    if math.comb(n, k) <= MAX_SUBSETS:
        subsets = list(itertools.combinations(ballots, k))
    else:
        generator = random.Random(seed)
        subsets = [generator.sample(ballots, k) for _ in range(MAX_SUBSETS)]
    return math.fsum(map(_elected, subsets)) / len(subsets)


def vote_of(row: Mapping[str, Any]) -> str | None:
    """The vote of a graded row: the answer that its reward reads, with spaces and case normalized.

    Without a `parsed_answer`, as from a custom grader, the whole response is the vote. Returns None for a response in
    the wrong format or without an answer.
    """
    answer = row.get("parsed_answer", row["response_text"])
    if row["category"] == "wrong_format" or answer is None:
        return None
    return " ".join(answer.split()).casefold() or None


def _elected(ballots: Sequence[Any]) -> float:
    counts = Counter(ballot for ballot in ballots if ballot is not None)
    most = max(counts.values(), default=0)
    leaders = [ballot for ballot, count in counts.items() if count == most]
    return (_CORRECT in leaders) / len(leaders) if leaders else 0.0


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must lie between 1 and the {n} samples of a problem, got {k}")
