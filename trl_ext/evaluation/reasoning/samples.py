"""Several samples to a problem: pass@k and majority voting."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# Votes over all subsets of k samples where there are no more than this, else over as many random ones.
MAX_SUBSETS = 200
_CORRECT = object()


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` samples is correct: 1 - C(n - correct, k) / C(n, k).

    The unbiased estimate of Chen et al. (2021) from `n` samples of which `correct` are correct; the mean over all
    subsets of size k.

    Raises:
        ValueError: counts that do not fit together.
    """
    _check(n, k)
    if not 0 <= correct <= n:
        raise ValueError(f"correct must lie between 0 and n = {n}, got {correct}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[Any], correct: Sequence[bool], k: int, *, seed: int = 0) -> float:
    """Probability that the most frequent answer among `k` of the samples is correct (maj@k; Wang et al., 2022).

    Correct answers are one answer, however they are written; wrong ones are the same where their votes are. A sample
    without an answer does not vote, and where none votes the problem is failed. Of answers that are equally frequent
    one is drawn, each as likely. The mean over all subsets of size k, or over 200 random ones where there are more.

    Args:
        votes: each sample's answer, hashable; None for a sample without one.
        correct: whether it is correct.
        k: samples that vote.
        seed: of the random subsets.

    Raises:
        ValueError: lists of different length, or counts that do not fit together.
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
    """What a graded row votes for: the answer that its reward reads, with spaces and case evened out.

    Without a `parsed_answer`, as from a grader of one's own, the whole response votes. None for a response in the
    wrong form or without an answer.
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
