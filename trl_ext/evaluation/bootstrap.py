"""Two candidates on the same prompts: bootstrap over prompts, McNemar's test, and chances at a threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy

from trl_ext.evaluation.win_rate import PairOutcome, win_rate

Rule = Literal["agreed", "half"]
RULES = ("agreed", "half")
DRAWS = 2000
MINIMUM_DRAWS = 1000


@dataclass(frozen=True)
class McNemar:
    """McNemar's test with continuity correction, on prompts where one candidate beats the base and the other loses.

    Attributes:
        statistic: (|b - c| - 1)^2 / (b + c), never below 0; chi-squared with one degree of freedom.
        p_value: of the two-sided test; 1 where the two never differ.
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
        difference, low, high: first minus second; None where a candidate has no row that counts.
        first, second: the win rates; None likewise.
        rule: `agreed` or `half`, as in `WinRate`.
        n: prompts.
        draws: bootstrap samples of the prompts.
        mcnemar: the test on the prompts that both settled.
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


def bootstrap_interval(
    outcomes: Sequence[PairOutcome], rule: Rule = "agreed", *, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """95% interval of a win rate by resampling prompts; the denominator is recomputed in each sample.

    Raises:
        ValueError: no outcomes, too few draws, or an unknown rule.
    """
    counts = resample_counts(len(outcomes), draws, seed)
    return percentile_interval(_rates(outcomes, rule, counts))


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
    differences = _rates(first, rule, counts) - _rates(second, rule, counts)
    whole = numpy.ones((1, len(first)), dtype=int)
    rates = [_number(_rates(outcomes, rule, whole)[0]) for outcomes in (first, second)]
    told = None not in rates
    # A sample in which nothing counts has no rate to compare.
    low, high = percentile_interval(differences[~numpy.isnan(differences)]) if told else (None, None)
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
    """McNemar's test (1947) with continuity correction; see `McNemar`.

    Raises:
        ValueError: a negative count.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts must not be negative, got {only_first} and {only_second}")
    total = only_first + only_second
    statistic = max(abs(only_first - only_second) - 1, 0) ** 2 / total if total else 0.0
    # P(chi-squared with one degree of freedom > x) = P(|Z| > sqrt(x)).
    p_value = math.erfc(math.sqrt(statistic / 2))
    return McNemar(statistic=statistic, p_value=p_value, only_first=only_first, only_second=only_second)


def chance_below(rate: float, n: int, threshold: float) -> float:
    """P(X / n < threshold) for X ~ Binomial(n, rate): how often another sample of n falls under the threshold.

    Args:
        rate: the measured rate, taken for the true one.
        n: rows in its denominator.
        threshold: to reach, in [0, 1]; reaching it exactly is not falling under it.

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_rates(rate=rate, threshold=threshold)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    # The smallest number of wins that reaches the threshold; the product may round to just above a whole number.
    needed = math.ceil(threshold * n - 1e-9)
    if rate in (0.0, 1.0):
        return float(rate * n < needed)
    terms = (
        math.lgamma(n + 1)
        - math.lgamma(k + 1)
        - math.lgamma(n - k + 1)
        + k * math.log(rate)
        + (n - k) * math.log1p(-rate)
        for k in range(needed)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def chance_mean_below(values: Sequence[float], threshold: float) -> float:
    """P(mean of another sample < threshold) under a normal distribution with the sample's mean and standard error.

    For rates with half wins in them, which are not binomial.

    Raises:
        ValueError: no values, or a threshold outside [0, 1].
    """
    _check_rates(threshold=threshold)
    n = len(values)
    if n < 1:
        raise ValueError("there are no values")
    mean = math.fsum(values) / n
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(n - 1, 1) / n)
    if error == 0:
        return float(mean < threshold)
    return NormalDist(mean, error).cdf(threshold)


def row_credits(outcomes: Sequence[PairOutcome], rule: Rule) -> list[float | None]:
    """What each prompt adds to the numerator of a win rate: 1, 1/2 or 0; None where it is not in the denominator.

    Raises:
        ValueError: an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    rates = [getattr(win_rate([outcome]), rule) for outcome in outcomes]
    return [interval.rate if interval.n else None for interval in rates]


def _rates(outcomes: Sequence[PairOutcome], rule: Rule, counts: numpy.ndarray) -> numpy.ndarray:
    """The win rate in each sample; NaN where its denominator is empty."""
    credit = row_credits(outcomes, rule)
    totals = counts @ numpy.array([float(value is not None) for value in credit])
    wins = counts @ numpy.array([value or 0.0 for value in credit])
    return numpy.divide(wins, totals, out=numpy.full(len(counts), numpy.nan), where=totals > 0)


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


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 <= rate <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {rate}")
