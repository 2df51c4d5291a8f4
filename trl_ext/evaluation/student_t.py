"""Student's t distribution, central and shifted, for any positive degrees of freedom."""

from __future__ import annotations

import math

import numpy

# Steps of the integral. Its integrand is smooth and vanishes at both ends: the trapezoid rule gives ten digits.
STEPS = 400
# Beyond this the distribution is the normal one to six digits.
MOST_DEGREES = 1e6

_tail = numpy.frompyfunc(lambda x: math.erfc(x / math.sqrt(2)) / 2, 1, 1)


def exceedance(t: float, degrees: float, shift: float = 0.0) -> float:
    """P(|T| > t) for T = (Z + shift) / U, with Z standard normal and U^2 = chi-squared / degrees, independent of it.

    With `shift` 0 it is the two-sided p-value of a t-test; else the power of a test with critical value t, `shift`
    being the true difference in standard errors (the noncentral t distribution, Johnson and Welch 1940). It is the
    mean over U of P(Z > t U - shift) + P(Z > t U + shift), by numerical integration over log U.

    Raises:
        ValueError: a negative t, or degrees that are not positive.
    """
    if t < 0 or degrees <= 0:
        raise ValueError(f"t must not be negative and degrees must be positive, got {t} and {degrees}")
    degrees = min(degrees, MOST_DEGREES)
    spread = 9 / math.sqrt(2 * degrees)
    log_u = numpy.linspace(-max(spread, 36 / degrees), spread, STEPS)
    half = degrees / 2
    log_density = degrees * log_u - half * numpy.exp(2 * log_u)
    density = 2 * numpy.exp(log_density + half * math.log(half) - math.lgamma(half))
    scaled = t * numpy.exp(log_u)
    chances = (_tail(scaled - shift) + _tail(scaled + shift) if shift else 2 * _tail(scaled)).astype(float)
    return min(1.0, float((density * chances).sum() * (log_u[1] - log_u[0])))


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
