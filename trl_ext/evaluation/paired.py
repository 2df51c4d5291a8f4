"""Two candidates on the same prompts: difference of their rates, McNemar's exact test, and chances at a threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from trl_ext.evaluation.intervals import rate_difference_interval
from trl_ext.evaluation.win_rate import PairOutcome, win_rate

Rule = Literal["agreed", "half"]
RULES = ("agreed", "half")


@dataclass(frozen=True)
class McNemar:
    """McNemar's test of whether two candidates differ, on the prompts that only one of the two wins.

    Only decisive rows count, whatever rule a difference beside it is measured by: both candidates' comparisons with
    the base must be settled (rule `agreed`), one as a win and the other as a loss.

    Attributes:
        statistic: (|b - c| - 1)^2 / (b + c), never below 0, as in textbooks; chi-squared with one degree of freedom
            where b + c is large.
        p_value: two-sided and exact, from Binomial(b + c, 1/2), so that it holds for few rows too; 1 where the two
            never differ.
        only_first, only_second: b and c, prompts that only the first or only the second candidate wins.
    """

    statistic: float
    p_value: float
    only_first: int
    only_second: int


@dataclass(frozen=True)
class PairedDifference:
    """The win rate of one candidate minus that of another on the same prompts, with its 95% interval.

    Attributes:
        difference, low, high: first minus second, with its interval; None where a candidate has no row that counts.
        first, second: the win rates; None likewise.
        rule: `agreed` or `half`, as in `WinRate`.
        n: prompts.
        mcnemar: the exact test on the prompts that both settled, under either rule.
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

    What prompts have in common cancels, so the interval is narrower than two separate ones suggest.

    Args:
        first, second: outcomes of the candidates; the same row_ids, in any order.
        rule: `agreed` or `half`, as in `win_rate`.

    Raises:
        ValueError: row_ids that differ or repeat, no prompts, or an unknown rule.
    """
    if not first:
        raise ValueError("there are no prompts to compare on")
    second = _aligned(first, second)
    credits = [row_credits(outcomes, rule) for outcomes in (first, second)]
    kept = [[credit for credit in row if credit is not None] for row in credits]
    rates = [math.fsum(row) / len(row) if row else None for row in kept]
    low, high = rate_difference_interval(*credits) or (None, None)
    wins = list(zip(row_credits(first, "agreed"), row_credits(second, "agreed"), strict=True))
    return PairedDifference(
        difference=None if low is None else rates[0] - rates[1],
        low=low,
        high=high,
        first=rates[0],
        second=rates[1],
        rule=rule,
        n=len(first),
        mcnemar=mcnemar(wins.count((1.0, 0.0)), wins.count((0.0, 1.0))),
    )


def mcnemar(only_first: int, only_second: int) -> McNemar:
    """McNemar's test (1947), its p-value exact; see `McNemar`.

    Args:
        only_first, only_second: prompts that only the first or only the second candidate wins, out of those that both
            settled.

    Raises:
        ValueError: a count that is negative or not whole.
    """
    if min(only_first, only_second) < 0 or any(count != int(count) for count in (only_first, only_second)):
        raise ValueError(f"counts must be whole and not negative, got {only_first} and {only_second}")
    total = only_first + only_second
    if not total:
        return McNemar(statistic=0.0, p_value=1.0, only_first=only_first, only_second=only_second)
    from scipy.stats import binomtest

    statistic = max(abs(only_first - only_second) - 1, 0) ** 2 / total
    p_value = float(binomtest(int(only_first), int(total)).pvalue)
    return McNemar(statistic=statistic, p_value=p_value, only_first=only_first, only_second=only_second)


def chance_below(wins: int, n: int, threshold: float, *, ties: int | None = None) -> float | None:
    """How likely the rate of another `n` rows of the same kind is to fall under a threshold.

    The measured rate is not taken for the true one: with one row, won, that would make a failure impossible. The true
    shares of wins, losses and ties are drawn from their posterior under Jeffreys' prior, Beta(wins + 1/2, losses +
    1/2) or with ties Dirichlet(wins + 1/2, losses + 1/2, ties + 1/2), and the new rows from them: the answer is a sum
    of beta-binomial or Dirichlet-multinomial probabilities, computed exactly.

    Args:
        wins: rows worth 1.
        n: rows in the denominator.
        threshold: to reach, in [0, 1]; reaching it exactly is not falling under it.
        ties: rows worth 1/2; None under a rule that has no such rows.

    Returns:
        A probability; None for no rows, of which nothing can be said.

    Raises:
        ValueError: a threshold outside [0, 1], or counts that do not fit together.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie between 0 and 1, got {threshold}")
    losses = n - wins - (ties or 0)
    if min(wins, losses, ties or 0) < 0 or any(count != int(count) for count in (wins, n, ties or 0)):
        raise ValueError(f"counts must be whole, got {wins} wins and {ties or 0} ties of {n} rows")
    if n == 0:
        return None
    from scipy.stats import dirichlet_multinomial

    new_wins, new_ties = numpy.mgrid[: n + 1, : 1 if ties is None else n + 1]
    # Half points that fall short; the product may round to just above a whole number.
    short = (2 * new_wins + new_ties < 2 * threshold * n - 1e-9) & (new_wins + new_ties <= n)
    new = numpy.stack([new_wins[short], n - new_wins[short] - new_ties[short], new_ties[short]], axis=1)
    categories = 2 if ties is None else 3
    prior = numpy.array([wins, losses, ties or 0])[:categories] + 0.5
    return min(1.0, float(dirichlet_multinomial.pmf(new[:, :categories], prior, n).sum()))


def row_credits(outcomes: Sequence[PairOutcome], rule: Rule) -> list[float | None]:
    """What each prompt adds to the numerator of a win rate: 1, 1/2 or 0; None where it is not in the denominator.

    Raises:
        ValueError: an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    rates = [getattr(win_rate([outcome]), rule) for outcome in outcomes]
    return [interval.rate if interval.n else None for interval in rates]


def _aligned(first: Sequence[PairOutcome], second: Sequence[PairOutcome]) -> list[PairOutcome]:
    """The second candidate's outcomes in the order of the first's."""
    by_row_id = {outcome.row_id: outcome for outcome in second}
    row_ids = [outcome.row_id for outcome in first]
    for outcomes, name in ((first, "first"), (second, "second")):
        if len({outcome.row_id for outcome in outcomes}) != len(outcomes):
            raise ValueError(f"the {name} candidate's outcomes repeat a row_id")
    odd = sorted(set(row_ids) ^ set(by_row_id))
    if odd:
        raise ValueError(f"row_id {odd[0]}: only one of the two candidates was judged on it; compare on the same rows")
    return [by_row_id[row_id] for row_id in row_ids]
