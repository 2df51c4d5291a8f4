"""Evaluation of reasoning by verified answers: pass@k and majority votes, figures with intervals, and their gain."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.evaluation.statistics.intervals import rate_interval
from trl_ext.evaluation.statistics.paired import paired_difference
from trl_ext.evaluation.statistics.win_rate import PairOutcome
from trl_ext.rewards.verified import count_categories

Rows = Sequence[Mapping[str, Any]]
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


# ---- Figures ----


def summarize_reasoning(rows: Rows, ks: Sequence[int] = ()) -> dict[str, Any]:
    """Accuracy, categories and lengths of graded responses.

    Args:
        rows: rows of `evaluate_reasoning`, with the same number for each problem.
        ks: the k of pass@k and maj@k, at most the number of samples per problem.

    Returns:
        JSON-ready: `n_prompts`; `n_samples` per problem; `accuracy` and `format_rate`, each with `mean`, its interval
        `low` and `high`, and `n`; counts by category; mean lengths in tokens of all, correct and incorrect responses;
        the share that was truncated; the mean entropy in nats (None if unknown); and `pass_at` and `maj_at` by k, with
        intervals. Intervals are those of `rate_interval` over problems, which with one sample per problem are
        Wilson's.

    Raises:
        ValueError: there are no rows, problems differ in their number of samples, or a k exceeds it.
    """
    by_prompt: dict[str, list] = {}
    for row in rows:
        by_prompt.setdefault(row["row_id"], []).append(row)
    counts = {len(samples) for samples in by_prompt.values()}
    if not counts:
        raise ValueError("there are no responses to summarize")
    if len(counts) > 1:
        raise ValueError(f"problems have {min(counts)} to {max(counts)} samples: give the same number for each")
    n_samples = counts.pop()

    def per_prompt(value: Callable[[Rows], float]) -> dict[str, Any]:
        values = [value(samples) for samples in by_prompt.values()]
        low, high = rate_interval(values)
        return {"mean": _mean(values), "low": low, "high": high, "n": len(values)}

    def right(samples: Rows) -> list[bool]:
        return [row["category"] == "correct" for row in samples]

    def majority(samples: Rows, k: int) -> float:
        return majority_at_k([vote_of(row) for row in samples], right(samples), k)

    lengths: dict[bool, list[int]] = {True: [], False: []}
    for row in rows:
        lengths[row["category"] == "correct"].append(row["generated_num_tokens"])
    return {
        "n_prompts": len(by_prompt),
        "n_samples": n_samples,
        "accuracy": per_prompt(lambda samples: _mean([row["answer_reward"] for row in samples])),
        "format_rate": per_prompt(lambda samples: _mean([row["format_reward"] for row in samples])),
        "categories": count_categories(rows),
        "mean_tokens": _mean(lengths[True] + lengths[False]),
        "mean_tokens_correct": _mean(lengths[True]),
        "mean_tokens_incorrect": _mean(lengths[False]),
        "truncated_fraction": _mean([not row["finished"] for row in rows]),
        "mean_entropy": _mean([row["entropy"] for row in rows if row.get("entropy") is not None]),
        "pass_at": {str(k): per_prompt(lambda samples, k=k: pass_at_k(n_samples, sum(right(samples)), k)) for k in ks},
        "maj_at": {str(k): per_prompt(lambda samples, k=k: majority(samples, k)) for k in ks},
    }


def accuracy_gain(before: Rows, after: Rows) -> dict[str, Any]:
    """Accuracy after minus before, on the same problems with one response each, and its paired 95% interval.

    See `trl_ext.evaluation.paired_difference`.

    Returns:
        `mean`, `low`, `high`, `n` (problems), and `p_value` of McNemar's exact test.

    Raises:
        ValueError: the two cover different problems, or a problem has several responses.
    """
    found = paired_difference(_outcomes(after), _outcomes(before))
    estimate = {"mean": found.difference, "low": found.low, "high": found.high, "n": found.n}
    return {**estimate, "p_value": found.mcnemar.p_value}


def _outcomes(rows: Rows) -> list[PairOutcome]:
    names = {True: "candidate", False: "base"}
    return [PairOutcome(row["row_id"], *[names[row["category"] == "correct"]] * 2) for row in rows]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
