"""Tournament of policies: judged in pairs on the same prompts, and rated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.judging.protocol import Usage
from trl_ext.evaluation.statistics.intervals import wilson_interval
from trl_ext.evaluation.statistics.ratings import Ratings, expected_score, ratings_with_intervals
from trl_ext.evaluation.statistics.win_rate import row_credits
from trl_ext.evaluation.submissions.candidates import judge_responses
from trl_ext.evaluation.submissions.rows import Response

BASE = "base"


@dataclass(frozen=True)
class Tournament:
    """The result of a tournament.

    Attributes:
        names: the systems; the base is one of them, and its rating is 1000.
        ratings: Bradley-Terry ratings with their intervals.
        matches: one for each pair of systems: `first`, `second`, the first's `rate` with ties as half, its
            Wilson interval `low` and `high`, `n` judged prompts and `errors`.
        prompts: number of prompts.
        usage: total usage of judging.
    """

    names: list[str]
    ratings: Ratings
    matches: list[dict[str, Any]]
    prompts: int
    usage: Usage

    def table(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each system, the best first.

        `expected_against_base` is the win rate predicted by the ratings, with ties as half. `expected_low` and
        `expected_high` are its 95% interval, which follows from the rating's, since the base's rating is fixed. The
        base has none.
        """
        names = {"expected_against_base": "rating", "expected_low": "low", "expected_high": "high"}
        columns = (self.names, self.ratings.ratings, self.ratings.low, self.ratings.high)
        rows = [dict(zip(("name", "rating", "low", "high"), row, strict=True)) for row in zip(*columns, strict=True)]
        base = next(row["rating"] for row in rows if row["name"] == BASE)
        for row in rows:
            is_base = row["name"] == BASE
            row |= {name: None if is_base else expected_score(row[key] - base) for name, key in names.items()}
        return sorted(rows, key=lambda row: -row["rating"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "ratings": self.table(),
            "virtual_draws": self.ratings.virtual_draws,
            "matches": self.matches,
            "prompts": self.prompts,
            "usage": self.usage.to_dict(),
        }


def run_tournament(
    judge: Any,
    prompts: Sequence[Mapping[str, Any]],
    systems: Mapping[str, Sequence[Response]],
    **judging: Any,
) -> Tournament:
    """Judge every pair of systems in both orders, and rate them.

    Args:
        judge: a `PairwiseJudge`.
        prompts: rows with `row_id` and `prompt`.
        systems: responses by name, one for each prompt, in order; one of the names is `base`.
        judging: keyword arguments of `judge_pairs`.

    Raises:
        ValueError: there is no base or no other system, or nothing could be judged.
        TooManyErrors: too many comparisons could not be judged.
    """
    names = list(systems)
    if BASE not in names or len(names) < 2:
        raise ValueError(f"a tournament needs the system {BASE!r} and at least one other, got {', '.join(names)}")
    pairs = list(itertools.combinations(range(len(names)), 2))
    results = [judge_responses(judge, prompts, systems[names[a]], systems[names[b]], **judging) for a, b in pairs]
    credits = [row_credits(result.outcomes, "half") for result in results]
    ratings = ratings_with_intervals(credits, pairs, len(names), anchor=names.index(BASE))
    return Tournament(
        names=names,
        ratings=ratings,
        matches=[_match(names[a], names[b], row) for (a, b), row in zip(pairs, credits, strict=True)],
        prompts=len(prompts),
        usage=sum((result.usage for result in results), Usage()),
    )


def _match(first: str, second: str, credits: Sequence[float | None]) -> dict[str, Any]:
    judged = [credit for credit in credits if credit is not None]
    low, high = wilson_interval(sum(judged), len(judged))
    return {
        "first": first,
        "second": second,
        "rate": sum(judged) / len(judged) if judged else None,
        "low": low,
        "high": high,
        "n": len(judged),
        "errors": len(credits) - len(judged),
    }
