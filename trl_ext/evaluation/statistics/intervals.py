"""95% intervals of means, rates and differences of rates, used for every figure of an evaluation.

`python -m benchmarks.coverage` prints how often each covers the truth in simulated samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
LEAST_FOR_SKEWNESS = 5
NORMAL_95 = float(ndtri(0.5 + CONFIDENCE / 2))


def mean_with_interval(values: Sequence[float], *, gains: bool = False) -> dict[str, float]:
    """The `mean` of the values and its 95% interval, `low` to `high`.

    The interval is that of `mean_interval`, or of `wilson_interval` if all values are 0 or 1, as for verified rewards.
    With few values, it may extend beyond their range.

    Args:
        values: for two policies on the same prompts, the differences of their scores.
        gains: whether the values are such differences. If all are -1, 0 or 1, the interval is Tango's.

    Raises:
        ValueError: there are no values.
    """
    values = _array(values)
    if gains and numpy.isin(values, (-1, 0, 1)).all():
        low, high = gain_interval(int((values == 1).sum()), int((values == -1).sum()), len(values))
    elif not gains and numpy.isin(values, (0, 1)).all():
        low, high = wilson_interval(values.sum(), len(values))
    else:
        low, high = mean_interval(values)
    return {"mean": float(values.mean()), "low": low, "high": high}


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of independent values: Student's t, corrected for skewness from five values on.

    The correction is Hall's monotone transformation of the t statistic (1992, "On the removal of skewness by
    transformation"). It has no effect without skewness. With few, strongly skewed values, a bound may lie outside
    their range. For two systems on the same prompts, pass the differences; the interval is then the paired one. The
    interval of a single value has zero width.

    Raises:
        ValueError: there are no values.
    """
    values = _array(values)
    n, mean, deviation = len(values), float(values.mean()), float(values.std())
    if n == 1 or deviation <= 1e-12 * abs(mean):
        return mean, mean
    skewness = 0.0 if n < LEAST_FOR_SKEWNESS else float((((values - mean) / deviation) ** 3).mean())
    slope = skewness / (3 * math.sqrt(n))

    def transformed(t: float) -> float:
        t -= slope / 2
        return (math.cbrt(1 + 3 * slope * t) - 1) / slope if abs(slope) > 1e-9 else t

    error, t = deviation / math.sqrt(n - 1), critical_value(n - 1)
    return mean - error * transformed(t), mean - error * transformed(-t)


def prediction_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of one further value: mean -+ t s sqrt(1 + 1/n), with the sample standard deviation s.

    Student's t has n - 1 degrees of freedom, and the values are taken as normal. None for fewer than two values.
    """
    values = _array(values)
    n = len(values)
    if n < 2:
        return None
    half_width = critical_value(n - 1) * float(values.std(ddof=1)) * math.sqrt(1 + 1 / n)
    return float(values.mean()) - half_width, float(values.mean()) + half_width


def gain_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """The 95% score interval of a difference of two paired proportions, (gained - lost) / n (Tango 1998).

    Its width is positive even if no pair differs, or if all do.

    Args:
        gained, lost: pairs with an outcome of 1 in the first sample only, and in the second only.
        n: all pairs.
    """
    from scipy.optimize import brentq  # takes a second to import

    def excess(difference: float) -> float:
        """The squared deviation from a true difference, minus what the score test allows."""
        # The likeliest share of losses, given the difference, is the larger root of 2 n q^2 + linear q - constant.
        linear = (2 * n - gained + lost) * difference - gained - lost
        constant = lost * difference * (1 - difference)
        share = (math.sqrt(max(linear**2 + 8 * n * constant, 0.0)) - linear) / (4 * n)
        variance = n * (2 * share + difference * (1 - difference))
        return (gained - lost - n * difference) ** 2 - NORMAL_95**2 * variance

    found = (gained - lost) / n
    # Each bound lies between the measured difference, where the excess is negative, and -1 or 1.
    return tuple(
        end if abs(found - end) < 1e-9 else float(brentq(excess, end, found - 1e-9 * (found - end)))
        for end in (-1.0, 1.0)
    )


def wilson_interval(successes: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson, 1927).

    Args:
        successes: in [0, n]; half successes are allowed.
        n: number of trials; for 0 the result is (0, 1).
        confidence: in (0, 1).

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if n < 0 or n != int(n):
        raise ValueError(f"n must be a whole number of trials, got {n}")
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n = {n}, got {successes}")
    return score_bounds(successes / n, n, float(ndtri(0.5 + confidence / 2))) if n else (0.0, 1.0)


def rate_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of values in [0, 1], such as each problem's share of correct samples.

    It is Wilson's interval, with the sample size of zeros and ones whose mean would vary as much, and Student's t in
    place of the normal quantile (Dean and Pagano 2015, "Evaluating confidence interval methods for binomial
    proportions in clustered surveys"). For zeros and ones, and for equal values, it is Wilson's interval itself.

    Raises:
        ValueError: there are no values.
    """
    return score_bounds(*rate_sample(values))


def rate_sample(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of values in [0, 1], and the sample size and the quantile of `rate_interval`.

    Raises:
        ValueError: there are no values.
    """
    values = _array(values)
    rate, deviation, n = min(max(float(values.mean()), 0.0), 1.0), float(values.std()), len(values)
    if deviation < 1e-9 or numpy.isin(values, (0, 1)).all():
        return rate, n, NORMAL_95
    return rate, (n - 1) * rate * (1 - rate) / deviation**2, critical_value(n - 1)


def rate_difference_interval(
    first: Sequence[float | None], second: Sequence[float | None]
) -> tuple[float, float] | None:
    """The 95% interval of the difference of two rates on the same prompts: Newcombe (1998), method 10.

    The squared distances to Wilson's bounds of the two rates are added, minus a term for the correlation on the
    prompts that both are measured on. For zeros and ones on the same prompts, this is the published interval, with its
    continuity correction of the correlation. Here the prompts may differ, and an outcome may be a half.

    Args:
        first, second: for each prompt, in the same order, its outcome in [0, 1]; None if it is not counted.

    Returns:
        Bounds of the mean of `first` minus that of `second`; None if one of them counts no prompt.
    """
    rows = numpy.array([first, second], dtype=float)
    counts = (~numpy.isnan(rows)).sum(axis=1)
    if not counts.all():
        return None
    rates = numpy.nanmean(rows, axis=1)
    joint = float(numpy.nansum((rows[0] - rates[0]) * (rows[1] - rates[1])))
    scale = float(numpy.nanstd(rows, axis=1).prod()) * math.sqrt(counts.prod())
    # Continuity correction: a correlation that one outcome could change to 0 counts as 0.
    correlation = (max(joint - 0.5, 0.0) if joint > 0 else joint) / scale if scale > 0 else 0.0
    (rate, other_rate), (size, other_size) = rates.tolist(), counts.tolist()
    low, high = score_bounds(rate, size, NORMAL_95)
    other_low, other_high = score_bounds(other_rate, other_size, NORMAL_95)

    def combined(own: float, other: float) -> float:
        return math.sqrt(max(own**2 - 2 * correlation * own * other + other**2, 0.0))

    return (
        rate - other_rate - combined(rate - low, other_high - other_rate),
        rate - other_rate + combined(high - rate, other_rate - other_low),
    )


def critical_value(degrees: float, alpha: float = 1 - CONFIDENCE) -> float:
    """The t that |T| exceeds with probability `alpha`, for Student's t with `degrees` degrees of freedom."""
    return -float(stdtrit(degrees, alpha / 2))


def _array(values: Sequence[float]) -> numpy.ndarray:
    values = numpy.asarray(values, dtype=float)
    if not values.size:
        raise ValueError("the mean of no values was asked for")
    return values


def score_bounds(rate: float, n: float, quantile: float) -> tuple[float, float]:
    """Wilson's bounds of a rate over n trials; n need not be an integer."""
    centre = rate + quantile**2 / (2 * n)
    half_width = quantile * math.sqrt(rate * (1 - rate) / n + quantile**2 / (4 * n**2))
    scale = 1 + quantile**2 / n
    # At a rate of 0 or 1, one bound is exactly 0 or 1; rounding may put it just outside.
    return max(0.0, (centre - half_width) / scale), min(1.0, (centre + half_width) / scale)
