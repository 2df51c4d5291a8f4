"""Tournament of policies: judged in pairs on the same prompts, and rated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from trl_ext.evaluation.judging.pairs import judge_pairs
from trl_ext.evaluation.judging.protocol import Usage
from trl_ext.evaluation.statistics.ratings import expected_score, ratings_with_intervals
from trl_ext.evaluation.statistics.win_rate import credit_interval, row_credits
from trl_ext.evaluation.submissions.assets import Response
from trl_ext.evaluation.submissions.candidates import both_systems

BASE = "base"


def run_tournament(
    judge: Any,
    prompts: Sequence[Mapping[str, Any]],
    systems: Mapping[str, Sequence[Response]],
    **judging: Any,
) -> dict[str, Any]:
    """Judge every pair of systems in both orders, and rate them by Bradley-Terry.

    Args:
        judge: a `PairwiseJudge`.
        prompts: rows with `row_id` and `prompt`.
        systems: responses by name, one for each prompt, in order; one of the names is `base`, which is rated 1000.
        judging: keyword arguments of `judge_pairs`.

    Returns:
        JSON-ready: `ratings`, one row for each system, the best first; `virtual_draws`, whether a draw was added to
        every pair; `matches`, one for each pair of systems, with `first`, `second`, the first's `rate` with ties as
        half, its Wilson interval `low` and `high`, `n` judged prompts and `errors`; the number of `prompts`; and
        `usage`. A rating has `name`, `rating`, its interval `low` and `high`, and `expected_against_base`, the win
        rate that the ratings predict, with `expected_low` and `expected_high` (all None for the base).
    """
    names = list(systems)
    credits, matches, usage = [], [], Usage()
    for first, second in itertools.combinations(names, 2):
        result = judge_pairs(judge, prompts, **both_systems(systems[first], systems[second]), **judging)
        credits.append(row_credits(result.outcomes, "half"))
        rate = credit_interval(credits[-1])
        match = {"first": first, "second": second, "rate": rate.rate if rate.n else None}
        matches.append({**match, "low": rate.low, "high": rate.high, "n": rate.n, "errors": len(prompts) - rate.n})
        usage += result.usage
    pairs = list(itertools.combinations(range(len(names)), 2))
    found = ratings_with_intervals(credits, pairs, len(names), anchor=names.index(BASE))
    base = found.ratings[names.index(BASE)]

    def expected(name: str, rating: float) -> float | None:
        # The base's rating is fixed, so the interval follows from that of the rating.
        return None if name == BASE else expected_score(rating - base)

    ratings = [
        {
            "name": name,
            "rating": rating,
            "low": low,
            "high": high,
            "expected_against_base": expected(name, rating),
            "expected_low": expected(name, low),
            "expected_high": expected(name, high),
        }
        for name, rating, low, high in zip(names, found.ratings, found.low, found.high, strict=True)
    ]
    return {
        "ratings": sorted(ratings, key=lambda row: -row["rating"]),
        "virtual_draws": found.virtual_draws,
        "matches": matches,
        "prompts": len(prompts),
        "usage": vars(usage),
    }
