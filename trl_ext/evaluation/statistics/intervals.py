"""95% intervals of means, rates and differences of rates, used for every figure of an evaluation.

`python -m benchmarks.coverage` prints how often each covers the truth in simulated samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
LEAST_FOR_SKEWNESS = 5
NORMAL_95 = float(ndtri(0.5 + CONFIDENCE / 2))


@dataclass(frozen=True)
class Estimate:
    """A mean, rate or difference, the interval from `low` to `high`, and the number of rows `n`.

    `f"{estimate:.3f}"` is `0.265 [0.237, 0.294]`. It is the value alone without an interval, and a dash without a
    value. A value that rounds to zero has no sign.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None

    def __format__(self, form: str) -> str:
        if self.value is None:
            return "-"
        # The option z comes after the one for the sign.
        form = form[0] + "z" + form[1:] if form.startswith("+") else f"z{form}"
        if self.low is None or self.high is None:
            return format(self.value, form)
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def mean_with_interval(values: Sequence[float], *, gains: bool = False) -> dict[str, float]:
    """The `mean` of the values and its 95% interval, `low` to `high`.

    The interval is that of `mean_interval`, or of `wilson_interval` if all values are 0 or 1, as for verified rewards.
    With few values, it may extend beyond their range.

    Args:
        values: for two policies on the same prompts, the differences of their scores.
        gains: whether the values are such differences. If all are -1, 0 or 1, the interval is
            `rate_difference_interval` of gains and losses.
    """
    values = _array(values)
    if gains and numpy.isin(values, (-1, 0, 1)).all():
        low, high = rate_difference_interval(values == 1, values == -1)
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


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson, 1927).

    Args:
        successes: in [0, n]; half successes are allowed.
        n: number of trials; for 0 the result is (0, 1).
    """
    return score_bounds(successes / n, n, NORMAL_95) if n else (0.0, 1.0)


def rate_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of values in [0, 1], such as each problem's share of correct samples.

    It is Wilson's interval, with the sample size of zeros and ones whose mean would vary as much, and Student's t in
    place of the normal quantile (Dean and Pagano 2015, "Evaluating confidence interval methods for binomial
    proportions in clustered surveys"). For zeros and ones, and for equal values, it is Wilson's interval itself.
    """
    return score_bounds(*rate_sample(values))


def rate_sample(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of values in [0, 1], and the sample size and the quantile of `rate_interval`."""
    values = _array(values)
    rate, deviation, n = min(max(float(values.mean()), 0.0), 1.0), float(values.std()), len(values)
    if deviation < 1e-9 or numpy.isin(values, (0, 1)).all():
        return rate, n, NORMAL_95
    return rate, (n - 1) * rate * (1 - rate) / deviation**2, critical_value(n - 1)


def rate_difference_interval(
    first: Sequence[float | None], second: Sequence[float | None]
) -> tuple[float, float] | None:
    """The 95% interval of the difference of two rates on the same prompts.

    It is the normal interval after one prompt is added that only the first wins, and one that only the second wins
    (Bonett and Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired
    data"). So its width is positive even if the two never differ. Here the prompts may also differ, and an outcome may
    be a half. The standard error is the root of the summed squares of each prompt's influence on the difference.

    Args:
        first, second: for each prompt, in the same order, its outcome in [0, 1]; None if it is not counted.

    Returns:
        Bounds of the mean of `first` minus that of `second`; None if one of them counts no prompt.
    """
    rows = numpy.array([[*first, 1, 0], [*second, 0, 1]], dtype=float)
    counts = (~numpy.isnan(rows)).sum(axis=1, keepdims=True)
    if counts.min() == 2:
        return None
    rates = numpy.nanmean(rows, axis=1, keepdims=True)
    influence = numpy.nan_to_num((rows - rates) / counts)
    half_width = NORMAL_95 * float(numpy.linalg.norm(influence[0] - influence[1]))
    difference = float(rates[0, 0] - rates[1, 0])
    return max(difference - half_width, -1.0), min(difference + half_width, 1.0)


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
