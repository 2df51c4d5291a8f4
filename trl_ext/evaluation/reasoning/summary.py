"""The figures of a reasoning evaluation, with 95% intervals, and the gain between two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.evaluation.reasoning.samples import majority_at_k, pass_at_k, vote_of
from trl_ext.evaluation.statistics.intervals import rate_interval
from trl_ext.evaluation.statistics.paired import paired_difference
from trl_ext.evaluation.statistics.win_rate import PairOutcome
from trl_ext.rewards.verified import count_categories

Rows = Sequence[Mapping[str, Any]]


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

    lengths = {
        correct: [row["generated_num_tokens"] for row in rows if (row["category"] == "correct") == correct]
        for correct in (True, False)
    }
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
        "maj_at": {
            str(k): per_prompt(lambda samples, k=k: majority_at_k([*map(vote_of, samples)], right(samples), k))
            for k in ks
        },
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
    return {
        "mean": found.difference,
        "low": found.low,
        "high": found.high,
        "n": found.n,
        "p_value": found.mcnemar.p_value,
    }


def _outcomes(rows: Rows) -> list[PairOutcome]:
    names = {True: "candidate", False: "base"}
    return [PairOutcome(row["row_id"], *[names[row["category"] == "correct"]] * 2) for row in rows]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
