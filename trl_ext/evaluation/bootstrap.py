"""Two candidates on the same prompts: bootstrap over prompts, McNemar's exact test, and chances at a threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from trl_ext.evaluation.win_rate import PairOutcome, wilson_interval, win_rate

Rule = Literal["agreed", "half"]
RULES = ("agreed", "half")
DRAWS = 2000
MINIMUM_DRAWS = 1000


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
    """The win rate of one candidate minus that of another on the same prompts, with its 95% bootstrap interval.

    Attributes:
        difference, low, high: first minus second; None where a candidate has no row that counts. Where no resampling
            changes the difference, the interval is one of score bounds; see `paired_bootstrap`.
        first, second: the win rates; None likewise.
        rule: `agreed` or `half`, as in `WinRate`.
        n: prompts.
        draws: bootstrap samples of the prompts.
        mcnemar: the exact test on the prompts that both settled, under either rule.
    """

    difference: float | None
    low: float | None
    high: float | None
    first: float | None
    second: float | None
    rule: Rule
    n: int
    draws: int
    mcnemar: McNemar

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)


def resample_counts(n: int, draws: int = DRAWS, seed: int = 0) -> numpy.ndarray:
    """How often each of `n` prompts is in each bootstrap sample of `n`, [draws, n].

    Raises:
        ValueError: no prompts, or fewer than 1000 draws.
    """
    if n < 1:
        raise ValueError("there are no prompts to resample")
    if draws < MINIMUM_DRAWS:
        raise ValueError(f"draws must be at least {MINIMUM_DRAWS} for a 95% interval, got {draws}")
    return numpy.random.default_rng(seed).multinomial(n, numpy.full(n, 1 / n), size=draws)


def percentile_interval(values: numpy.ndarray) -> tuple[float, float]:
    """The middle 95% of bootstrap values."""
    low, high = numpy.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def unanimous_interval(credits: Sequence[float]) -> tuple[float, float] | None:
    """Wilson's 95% bounds where all outcomes are the same; None where they differ.

    Resampling ten wins gives ten wins, and an interval without width; ten wins do not make a rate of 1 certain.
    """
    return wilson_interval(math.fsum(credits), len(credits)) if len(set(credits)) <= 1 else None


def bootstrap_interval(
    outcomes: Sequence[PairOutcome], rule: Rule = "agreed", *, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """95% interval of a win rate by resampling prompts; the denominator is recomputed in each sample.

    Where all rows that count have the same outcome, it is Wilson's: see `unanimous_interval`.

    Raises:
        ValueError: no outcomes, too few draws, or an unknown rule.
    """
    counts = resample_counts(len(outcomes), draws, seed)
    credits = row_credits(outcomes, rule)
    unanimous = unanimous_interval([credit for credit in credits if credit is not None])
    return _percentiles(_rates(credits, counts)) if unanimous is None else unanimous


def paired_bootstrap(
    first: Sequence[PairOutcome],
    second: Sequence[PairOutcome],
    rule: Rule = "agreed",
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> PairedDifference:
    """Compare two candidates that were judged against the same base on the same prompts.

    Prompts are resampled, both candidates' outcomes on them together, and each win rate is recomputed with its
    denominator. What prompts have in common cancels, so the interval is narrower than two separate ones suggest.

    Where no resampling changes the difference, its interval would have no width. If the candidates have the same
    outcome on each of the n prompts that count, it is -+ Wilson's upper bound of 0 differing prompts in n (the score
    interval of Tango 1998); otherwise the two Wilson intervals are combined (Newcombe 1998, method 10).

    Args:
        first, second: outcomes of the candidates; the same row_ids, in any order.
        rule: `agreed` or `half`, as in `win_rate`.
        draws: bootstrap samples, at least 1000.
        seed: of the resampling.

    Raises:
        ValueError: row_ids that differ or repeat, no prompts, too few draws, or an unknown rule.
    """
    second = _aligned(first, second)
    counts = resample_counts(len(first), draws, seed)
    credits = [row_credits(outcomes, rule) for outcomes in (first, second)]
    whole = numpy.ones((1, len(first)), dtype=int)
    rates = [_number(_rates(row, whole)[0]) for row in credits]
    told = None not in rates
    low, high = _difference_interval(*credits, counts) if told else (None, None)
    wins = list(zip(row_credits(first, "agreed"), row_credits(second, "agreed"), strict=True))
    return PairedDifference(
        difference=rates[0] - rates[1] if told else None,
        low=low,
        high=high,
        first=rates[0],
        second=rates[1],
        rule=rule,
        n=len(first),
        draws=draws,
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
    total, fewer = only_first + only_second, min(only_first, only_second)
    statistic = max(abs(only_first - only_second) - 1, 0) ** 2 / total if total else 0.0
    tail = sum(math.comb(total, count) for count in range(fewer + 1)) / 2**total
    return McNemar(statistic=statistic, p_value=min(1.0, 2 * tail), only_first=only_first, only_second=only_second)


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
    won, lost = _log_weights(wins + 0.5, n), _log_weights(losses + 0.5, n)
    drawn = numpy.zeros(1) if ties is None else _log_weights(ties + 0.5, n)
    prior_weight = 1.0 if ties is None else 1.5
    scale = math.lgamma(n + 1) + math.lgamma(n + prior_weight) - math.lgamma(2 * n + prior_weight)
    # The most half points that fall short; the product may round to just above a whole number.
    short = math.ceil(2 * threshold * n - 1e-9) - 1
    total = 0.0
    for new_wins in range(min(n, short // 2) + 1):
        new_ties = numpy.arange(min(n - new_wins, short - 2 * new_wins, len(drawn) - 1) + 1)
        total += numpy.exp(scale + won[new_wins] + drawn[new_ties] + lost[n - new_wins - new_ties]).sum()
    return min(1.0, float(total))


def row_credits(outcomes: Sequence[PairOutcome], rule: Rule) -> list[float | None]:
    """What each prompt adds to the numerator of a win rate: 1, 1/2 or 0; None where it is not in the denominator.

    Raises:
        ValueError: an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    rates = [getattr(win_rate([outcome]), rule) for outcome in outcomes]
    return [interval.rate if interval.n else None for interval in rates]


def _difference_interval(
    first: list[float | None], second: list[float | None], counts: numpy.ndarray
) -> tuple[float, float]:
    """95% interval of the difference of two rates that were measured on the same prompts."""
    differences = _rates(first, counts) - _rates(second, counts)
    if numpy.nanmax(differences) - numpy.nanmin(differences) > 1e-12:
        return _percentiles(differences)
    difference = float(numpy.nanmean(differences))
    kept = [[credit for credit in credits if credit is not None] for credits in (first, second)]
    if first == second:
        margin = wilson_interval(0, len(kept[0]))[1]
        return -margin, margin
    (low, high), (other_low, other_high) = (wilson_interval(math.fsum(credits), len(credits)) for credits in kept)
    rate, other = (math.fsum(credits) / len(credits) for credits in kept)
    return (
        difference - math.hypot(rate - low, other_high - other),
        difference + math.hypot(high - rate, other - other_low),
    )


def _rates(credits: list[float | None], counts: numpy.ndarray) -> numpy.ndarray:
    """The win rate in each sample; NaN where its denominator is empty."""
    totals = counts @ numpy.array([float(credit is not None) for credit in credits])
    wins = counts @ numpy.array([credit or 0.0 for credit in credits])
    return numpy.divide(wins, totals, out=numpy.full(len(counts), numpy.nan), where=totals > 0)


def _percentiles(values: numpy.ndarray) -> tuple[float, float]:
    """`percentile_interval` without the samples in which nothing counts, which have no rate."""
    return percentile_interval(values[~numpy.isnan(values)])


def _log_weights(weight: float, n: int) -> numpy.ndarray:
    """log of Gamma(i + weight) / (Gamma(weight) i!) for i = 0 ... n: a category's part in a Dirichlet-multinomial."""
    return numpy.array([math.lgamma(i + weight) - math.lgamma(weight) - math.lgamma(i + 1) for i in range(n + 1)])


def _number(value: float) -> float | None:
    return None if numpy.isnan(value) else float(value)


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
