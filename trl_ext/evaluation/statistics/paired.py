"""Two candidates on the same prompts: the difference of their rates, and McNemar's exact test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.statistics.intervals import rate_difference_interval
from trl_ext.evaluation.statistics.win_rate import PairOutcome, Rule, row_credits, win_rate


@dataclass(frozen=True)
class McNemar:
    """McNemar's test of whether two candidates differ, on the prompts that only one of the two wins.

    Attributes:
        p_value: two-sided and exact, from Binomial(b + c, 1/2), so that it is valid for few rows too; 1 if the two
            never differ.
        only_first, only_second: b and c, prompts that only the first or only the second candidate wins.
    """

    p_value: float
    only_first: int
    only_second: int


@dataclass(frozen=True)
class PairedDifference:
    """The win rate of one candidate minus that of another on the same prompts, with its 95% interval.

    Attributes:
        difference, low, high: first minus second, with its interval; None if a candidate has no row that counts.
        first, second: the win rates; None likewise.
        rule: `agreed` or `half`, as in `WinRate`.
        n: number of prompts.
        mcnemar: the exact test on the prompts on which both comparisons are decided (rule `agreed`), under either
            rule.
    """

    difference: float | None
    low: float | None
    high: float | None
    first: float | None
    second: float | None
    rule: Rule
    n: int
    mcnemar: McNemar

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)


def paired_difference(
    first: Sequence[PairOutcome], second: Sequence[PairOutcome], rule: Rule = "agreed"
) -> PairedDifference:
    """Compare two candidates that were judged against the same base on the same prompts.

    Prompt effects shared by both candidates cancel, so the interval is narrower than two separate ones suggest.

    Args:
        first, second: outcomes of the candidates; the same row_ids, in any order.
        rule: `agreed` or `half`, as in `win_rate`.

    Raises:
        ValueError: row_ids differ.
    """
    second = _aligned(first, second)
    credits = [row_credits(outcomes, rule) for outcomes in (first, second)]
    rates = [getattr(win_rate(outcomes), rule) for outcomes in (first, second)]
    own, other = (found.rate if found.n else None for found in rates)
    low, high = rate_difference_interval(*credits) or (None, None)
    wins = list(zip(row_credits(first, "agreed"), row_credits(second, "agreed"), strict=True))
    return PairedDifference(
        difference=None if low is None else own - other,
        low=low,
        high=high,
        first=own,
        second=other,
        rule=rule,
        n=len(first),
        mcnemar=mcnemar(wins.count((1.0, 0.0)), wins.count((0.0, 1.0))),
    )


def mcnemar(only_first: int, only_second: int) -> McNemar:
    """McNemar's test (1947), its p-value exact; see `McNemar`.

    Args:
        only_first, only_second: prompts that only the first or only the second candidate wins, out of those on which
            both comparisons are decided.
    """
    from scipy.stats import binomtest  # takes a second to import

    total = only_first + only_second
    p_value = float(binomtest(only_first, total).pvalue) if total else 1.0
    return McNemar(p_value, only_first, only_second)


def _aligned(first: Sequence[PairOutcome], second: Sequence[PairOutcome]) -> list[PairOutcome]:
    """The second candidate's outcomes in the order of the first's."""
    row_ids = [outcome.row_id for outcome in first]
    by_row_id = {outcome.row_id: outcome for outcome in second}
    if odd := sorted(set(row_ids) ^ by_row_id.keys()):
        raise ValueError(f"row_id {odd[0]}: only one of the two candidates was judged on it; compare on the same rows")
    return [by_row_id[row_id] for row_id in row_ids]
