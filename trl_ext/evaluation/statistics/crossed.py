"""Methods trained on several seeds and evaluated on the same prompts: intervals and tests.

A conclusion should hold for other prompts and other seeds, and every seed meets every prompt: prompts and seeds are
two crossed random effects. The value of prompt p on seed s is modelled as mean + a_p + b_s + e_ps, with variances
prompt, seed and rest. Studies in which several readers read the same cases have the same design. An interval over
prompts alone, or over the seeds' means alone, ignores one of the two sources of error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
from scipy.optimize import brentq

from trl_ext.evaluation.statistics.intervals import critical_value

Verdict = Literal["higher", "lower", "indistinguishable"]
ALPHA = 0.05
LEAST_P_VALUE = 1e-12


@dataclass(frozen=True)
class CrossedMean:
    """A mean over prompts and seeds with its 95% interval.

    Attributes:
        mean: mean of all values.
        prompts, seeds: their numbers.
        low, high: mean -+ critical value x standard error. None with only one prompt or seed, whose effect cannot be
            estimated, and if all values are equal; the same holds for the next two attributes.
        standard_error, seed_share: see `error_of_mean`.
    """

    mean: float
    prompts: int
    seeds: int
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    seed_share: float | None = None


@dataclass(frozen=True)
class MethodDifference:
    """A method minus the baseline, on the same prompts and seeds.

    Attributes:
        difference: its mean and interval, which is of this comparison alone, without Holm's correction.
        p_value: two-sided, from the t-test that corresponds to the interval; 1 without an interval.
        adjusted_p_value: Holm's, over all comparisons with the baseline.
        verdict: higher or lower if the adjusted p-value is at most 0.05.
    """

    difference: CrossedMean
    p_value: float
    adjusted_p_value: float
    verdict: Verdict


def mean_squares(values: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Mean squares of prompts, seeds and the rest, each [...], of values [..., P, S]: ANOVA without replicas.

    Their expectations are rest + S prompt, rest + P seed, and rest.
    """
    prompts, seeds = values.shape[-2:]
    mean = values.mean((-2, -1), keepdims=True)
    by_prompt, by_seed = values.mean(-1, keepdims=True) - mean, values.mean(-2, keepdims=True) - mean
    rest = values - mean - by_prompt - by_seed
    return (
        seeds * (by_prompt**2).sum((-2, -1)) / (prompts - 1),
        prompts * (by_seed**2).sum((-2, -1)) / (seeds - 1),
        (rest**2).sum((-2, -1)) / ((prompts - 1) * (seeds - 1)),
    )


def error_of_mean(prompt, seed, rest, prompts: int, seeds: int):
    """Standard error of a mean over P prompts and S seeds from the three mean squares, and the seeds' share in it.

    The variance is (MS_prompt + MS_seed - MS_rest) / (P S), and at least MS_prompt / (P S), MS_seed / (P S) and
    MS_rest / (P S). These are the variances without the seeds' effect, without the prompts' effect, and without
    either. Without the last bound, values that differ could have a variance of 0. The same variance serves studies of
    readers and cases (Obuchowski and Rockette 1995).

    The share MS_seed / (MS_prompt + MS_seed) says how much of the error comes from the seeds, for
    `mixed_critical_value`. If neither has an effect, the smaller sample takes all of it. Arrays of mean squares give
    arrays.
    """
    total = numpy.maximum(numpy.maximum(prompt, seed), numpy.maximum(rest, prompt + seed - rest))
    both = prompt + seed
    nothing = both <= 1e-12 * total
    share = numpy.where(nothing, float(seeds <= prompts), seed / numpy.where(nothing, 1.0, both))
    return numpy.sqrt(total / (prompts * seeds)), share


def mixed_critical_value(seed_share, prompts: int, seeds: int, alpha: float = ALPHA):
    """How many standard errors a mean must be from 0 at a two-sided level alpha (Cochran and Cox 1957).

    This is the mean of the critical values of Student's t with P - 1 and with S - 1 degrees of freedom, weighted by
    the shares. With only one of the two effects, it is the t-test. Satterthwaite's degrees of freedom, which few seeds
    estimate badly, would give shorter intervals that cover too little, especially at the levels that many comparisons
    need.

    It is approximate; docs/comparing.md has its coverage in simulated studies. An array of shares gives an array.
    """
    return (1 - seed_share) * critical_value(prompts - 1, alpha) + seed_share * critical_value(seeds - 1, alpha)


def crossed_mean(values) -> CrossedMean:
    """The mean of values [P, S] with an interval that is valid for other prompts and other seeds."""
    values = numpy.asarray(values, dtype=float)
    prompts, seeds = values.shape
    mean = float(values.mean())
    if min(prompts, seeds) < 2 or numpy.ptp(values) <= 1e-12 * numpy.abs(values).max():
        return CrossedMean(mean, prompts, seeds)
    squares = [float(square) for square in mean_squares(values)]
    error, share = (float(value) for value in error_of_mean(*squares, prompts, seeds))
    margin = mixed_critical_value(share, prompts, seeds) * error
    return CrossedMean(mean, prompts, seeds, mean - margin, mean + margin, error, share)


def compare_with_baseline(methods: Mapping[str, tuple[Any, Any]]) -> dict[str, MethodDifference]:
    """Compare methods with one baseline, each on the prompts and seeds that it shares with the baseline.

    Prompt and seed effects shared by both cancel in the differences, which are analysed as in `crossed_mean`.

    Args:
        methods: name -> the method's values and the baseline's on the same prompts and seeds, [P, S] each.
    """
    means = {name: crossed_mean(numpy.subtract(own, base)) for name, (own, base) in methods.items()}
    p_values = {name: _p_value(mean) for name, mean in means.items()}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return {
        name: MethodDifference(mean, p_values[name], adjusted[name], verdict(mean.mean, adjusted[name]))
        for name, mean in means.items()
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of k tests, in their order (Holm 1979): the i-th smallest times k - i + 1, never decreasing.

    The chance that any adjusted p-value of a true null is at most alpha is at most alpha, however the tests depend on
    each other, if each keeps its level.
    """
    p_values = numpy.asarray(p_values, dtype=float)
    order, adjusted = p_values.argsort(), numpy.empty(len(p_values))
    factors = numpy.arange(len(order), 0, -1)
    adjusted[order] = numpy.maximum.accumulate(numpy.minimum(factors * p_values[order], 1.0))
    return adjusted.tolist()


def verdict(difference: float, adjusted_p_value: float) -> Verdict:
    """The conclusion about a difference, at a level of 0.05."""
    if adjusted_p_value > ALPHA or difference == 0:
        return "indistinguishable"
    return "higher" if difference > 0 else "lower"


def _p_value(mean: CrossedMean) -> float:
    """The level at which the mean lies on the bound of its interval."""
    if mean.standard_error is None or mean.mean == 0:
        return 1.0
    distance = abs(mean.mean) / mean.standard_error

    def excess(log_level: float) -> float:
        return mixed_critical_value(mean.seed_share, mean.prompts, mean.seeds, math.exp(log_level)) - distance

    least = math.log(LEAST_P_VALUE)
    return math.exp(brentq(excess, least, 0.0)) if excess(least) > 0 else LEAST_P_VALUE
