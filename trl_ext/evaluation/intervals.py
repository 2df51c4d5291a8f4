"""95% intervals of means, rates and differences of rates, for every figure of an evaluation.

`python -m benchmarks.coverage` prints how often each holds the truth in simulated samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

CONFIDENCE = 0.95
LEAST_FOR_SKEWNESS = 5
NORMAL_95 = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def critical_value(degrees: float, alpha: float = 1 - CONFIDENCE) -> float:
    """The t that |T| exceeds with probability `alpha`, for Student's t with so many degrees of freedom."""
    from scipy.special import stdtrit

    return -float(stdtrit(degrees, alpha / 2))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of independent values: Student's t, of five values or more corrected for skewness.

    The correction is Hall's monotone transformation of the t statistic (1992, "On the removal of skewness by
    transformation"). It changes nothing without skewness. With few strongly skewed values, an end may lie outside
    their range. For two systems on the same prompts, give the differences: the interval is then the paired one. The
    interval of a single value has no width.

    Raises:
        ValueError: no values.
    """
    mean, deviation = _moments(values)
    n = len(values)
    if n == 1 or deviation <= 1e-12 * abs(mean):
        return mean, mean
    few = n < LEAST_FOR_SKEWNESS
    skewness = 0.0 if few else math.fsum(((value - mean) / deviation) ** 3 for value in values) / n
    slope = skewness / (3 * math.sqrt(n))

    def transformed(t: float) -> float:
        t -= slope / 2
        return (math.cbrt(1 + 3 * slope * t) - 1) / slope if abs(slope) > 1e-9 else t

    error, t = deviation / math.sqrt(n - 1), critical_value(n - 1)
    return mean - error * transformed(t), mean - error * transformed(-t)


def gain_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """The 95% score interval of a difference of two paired proportions, (gained - lost) / n (Tango 1998).

    Its width is positive even if no pair differs, or if all do.

    Args:
        gained, lost: pairs with an outcome of 1 in the first sample only, and in the second only.
        n: all pairs.
    """
    from scipy.optimize import brentq

    def excess(difference: float) -> float:
        """The squared deviation from a true difference, less what the score test allows."""
        # The likeliest share of losses, given the difference, is the larger root of 2 n q^2 + linear q - constant.
        linear = (2 * n - gained + lost) * difference - gained - lost
        constant = lost * difference * (1 - difference)
        share = (math.sqrt(max(linear**2 + 8 * n * constant, 0.0)) - linear) / (4 * n)
        variance = n * (2 * share + difference * (1 - difference))
        return (gained - lost - n * difference) ** 2 - NORMAL_95**2 * variance

    found = (gained - lost) / n
    # Each end lies between the measured difference, where the excess is negative, and -1 or 1.
    return tuple(
        end if abs(found - end) < 1e-9 else float(brentq(excess, end, found - 1e-9 * (found - end)))
        for end in (-1.0, 1.0)
    )


def wilson_interval(successes: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson, 1927).

    Args:
        successes: in [0, n]; half successes are allowed.
        n: number of trials; (0, 1) is returned for 0.
        confidence: in (0, 1).

    Raises:
        ValueError: an argument is outside its range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if n < 0 or n != int(n):
        raise ValueError(f"n must be a whole number of trials, got {n}")
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n = {n}, got {successes}")
    return _score_bounds(successes / n, n, NormalDist().inv_cdf(0.5 + confidence / 2)) if n else (0.0, 1.0)


def rate_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of values in [0, 1], such as the share of each problem's samples that are right.

    It is Wilson's with the size of the sample of zeros and ones whose mean would vary as much, and Student's t in
    place of the normal quantile (Dean and Pagano 2015, "Evaluating confidence interval methods for binomial
    proportions in clustered surveys"). For zeros and ones, and for equal values, it is Wilson's itself.

    Raises:
        ValueError: no values.
    """
    rate, deviation = _moments(values)
    rate, n = min(max(rate, 0.0), 1.0), len(values)
    if deviation < 1e-9 or {*map(float, values)} <= {0.0, 1.0}:
        return _score_bounds(rate, n, NORMAL_95)
    return _score_bounds(rate, (n - 1) * rate * (1 - rate) / deviation**2, critical_value(n - 1))


def rate_difference_interval(
    first: Sequence[float | None], second: Sequence[float | None]
) -> tuple[float, float] | None:
    """The 95% interval of the difference of two rates on the same prompts: Newcombe (1998), method 10.

    Wilson's bounds of the two rates are combined by squares, less what the prompts that both are measured on have in
    common. For zeros and ones on the same prompts it is the published interval, with its continuity correction of the
    correlation; here the prompts may differ, and an outcome may be a half.

    Args:
        first, second: for each prompt, in the same order, its outcome in [0, 1]; None where it is not counted.

    Returns:
        Bounds of the mean of `first` minus that of `second`; None where one of the two counts no prompt.
    """
    kept = [[value for value in row if value is not None] for row in (first, second)]
    if not all(kept):
        return None
    (rate, deviation), (other_rate, other_deviation) = map(_moments, kept)
    both = [
        (own - rate) * (other - other_rate)
        for own, other in zip(first, second, strict=True)
        if None not in (own, other)
    ]
    joint, scale = math.fsum(both), deviation * other_deviation * math.sqrt(len(kept[0]) * len(kept[1]))
    # The continuity correction: a correlation that one outcome could change to 0 counts as 0.
    correlation = (max(joint - 0.5, 0.0) if joint > 0 else joint) / scale if scale > 0 else 0.0
    low, high = _score_bounds(rate, len(kept[0]), NORMAL_95)
    other_low, other_high = _score_bounds(other_rate, len(kept[1]), NORMAL_95)

    def combined(own: float, other: float) -> float:
        return math.sqrt(max(own**2 - 2 * correlation * own * other + other**2, 0.0))

    return (
        rate - other_rate - combined(rate - low, other_high - other_rate),
        rate - other_rate + combined(high - rate, other_rate - other_low),
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("the mean of no values was asked for")
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _score_bounds(rate: float, n: float, quantile: float) -> tuple[float, float]:
    """Wilson's bounds of a rate over n trials, not necessarily whole."""
    centre = rate + quantile**2 / (2 * n)
    half_width = quantile * math.sqrt(rate * (1 - rate) / n + quantile**2 / (4 * n**2))
    scale = 1 + quantile**2 / n
    # At a rate of 0 or 1 one end is exactly 0 or 1; rounding may put it just outside.
    return max(0.0, (centre - half_width) / scale), min(1.0, (centre + half_width) / scale)
