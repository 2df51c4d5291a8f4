"""Tournament of policies: judged in pairs on the same prompts, and rated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.judging.pairs import judge_pairs
from trl_ext.evaluation.judging.protocol import Usage
from trl_ext.evaluation.statistics.ratings import Ratings, expected_score, ratings_with_intervals
from trl_ext.evaluation.statistics.win_rate import credit_interval, row_credits
from trl_ext.evaluation.submissions.assets import Response
from trl_ext.evaluation.submissions.candidates import both_systems

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
        """One JSON-ready row for each system, the best first: `name`, and `rating` with its interval `low` and `high`.

        `expected_against_base` is the win rate predicted by the ratings, with ties as half, and `expected_low` and
        `expected_high` its 95% interval, which follows from the rating's, since the base's rating is fixed. They are
        None for the base.
        """
        columns = zip(self.names, self.ratings.ratings, self.ratings.low, self.ratings.high, strict=True)
        rows = [dict(zip(("name", "rating", "low", "high"), row, strict=True)) for row in columns]
        base = self.ratings.ratings[self.names.index(BASE)]
        for row in rows:
            for name, key in (("expected_against_base", "rating"), ("expected_low", "low"), ("expected_high", "high")):
                row[name] = None if row["name"] == BASE else expected_score(row[key] - base)
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
    """
    names = list(systems)
    pairs, credits, matches, usage = list(itertools.combinations(range(len(names)), 2)), [], [], Usage()
    for first, second in itertools.combinations(names, 2):
        result = judge_pairs(judge, prompts, **both_systems(systems[first], systems[second]), **judging)
        credits.append(row_credits(result.outcomes, "half"))
        rate = credit_interval(credits[-1])
        match = {"first": first, "second": second, "rate": rate.rate if rate.n else None}
        matches.append({**match, "low": rate.low, "high": rate.high, "n": rate.n, "errors": len(prompts) - rate.n})
        usage += result.usage
    ratings = ratings_with_intervals(credits, pairs, len(names), anchor=names.index(BASE))
    return Tournament(names, ratings, matches, len(prompts), usage)
