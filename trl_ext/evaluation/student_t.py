"""Student's t distribution and the chi-squared one beneath it, for any positive degrees of freedom."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy

# Steps of the integral. Its integrand is smooth and vanishes at both ends: the trapezoid rule gives ten digits.
STEPS = 400
# Beyond this the distribution is the normal one to six digits.
MOST_DEGREES = 1e6

_tail = numpy.frompyfunc(lambda x: math.erfc(x / math.sqrt(2)) / 2, 1, 1)


def normal_tail(x: numpy.ndarray) -> numpy.ndarray:
    """P(Z > x) for standard normal Z, element by element."""
    return _tail(x).astype(float)


def exceedance(t: float, degrees: float) -> float:
    """P(|T| > t) for T = Z / U, Z standard normal and U^2 = chi-squared / degrees: the two-sided p-value of a t-test.

    It is the mean over U of 2 P(Z > t U), by numerical integration over log U.

    Raises:
        ValueError: a negative t, or degrees that are not positive.
    """
    if t < 0:
        raise ValueError(f"t must not be negative, got {t}")
    log_u, weights = _log_u(degrees)
    return min(1.0, 2 * float((weights * normal_tail(t * numpy.exp(log_u))).sum()))


@lru_cache(maxsize=10_000)
def critical_value(degrees: float, alpha: float = 0.05) -> float:
    """The t that |T| exceeds with probability alpha: 4.303 for 2 degrees of freedom and an alpha of 0.05.

    Raises:
        ValueError: an alpha outside (0, 1), or degrees that are not positive.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    low, high = 0.0, 2.0
    while exceedance(high, degrees) > alpha:
        low, high = high, 2 * high
    while high - low > 1e-8 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if exceedance(middle, degrees) > alpha else (low, middle)
    return high


def mean_square_quantiles(degrees: float, count: int) -> numpy.ndarray:
    """`count` equally likely values of chi-squared / degrees: its quantiles at 1 / 2n, 3 / 2n, ... , in order.

    Raises:
        ValueError: degrees that are not positive.
    """
    log_u, weights = _log_u(degrees)
    # Half of a step's weight lies before its middle.
    below = numpy.cumsum(weights) - weights / 2
    return numpy.exp(2 * numpy.interp((numpy.arange(count) + 0.5) / count, below, log_u))


def _log_u(degrees: float) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Values of log U for U^2 = chi-squared / degrees, and the weights that make sums over them means over U."""
    if degrees <= 0:
        raise ValueError(f"degrees of freedom must be positive, got {degrees}")
    degrees = min(degrees, MOST_DEGREES)
    spread = 9 / math.sqrt(2 * degrees)
    log_u = numpy.linspace(-max(spread, 36 / degrees), spread, STEPS)
    half = degrees / 2
    log_density = degrees * log_u - half * numpy.exp(2 * log_u)
    density = 2 * numpy.exp(log_density + half * math.log(half) - math.lgamma(half))
    return log_u, density * (log_u[1] - log_u[0])
