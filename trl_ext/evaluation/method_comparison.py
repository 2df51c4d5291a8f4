"""Methods that were trained on several seeds and evaluated on the same prompts: intervals, tests and their power.

Prompts and seeds are both samples of what one wants to speak of, and every seed meets every prompt: two crossed random
effects. The value of prompt p on seed s is taken as mean + a_p + b_s + e_ps, with variances prompt, seed and rest. It
is the design of studies in which several readers read the same cases. An interval over prompts alone, or one over the
seeds' means alone, leaves out one of the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
from scipy.special import gammaincinv, ndtr, stdtr

from trl_ext.evaluation.intervals import critical_value

Verdict = Literal["better", "worse", "cannot tell"]
ALPHA = 0.05
POWER = 0.8
# Prompts or seeds beyond which a study is called impossible.
MOST = 1_000_000
# Below it a p-value is not told apart from another.
LEAST_P_VALUE = 1e-12
# Equally likely values of each of the two mean squares that power is the mean over.
NODES = 60


@dataclass(frozen=True)
class Variances:
    """Variance components of a value, none negative: between prompts, between seeds, and the rest."""

    prompt: float
    seed: float
    rest: float

    def standard_error(self, prompts: int, seeds: int) -> float:
        """Of the mean over so many prompts and seeds: sqrt(prompt / P + seed / S + rest / (P S))."""
        return math.sqrt(self.prompt / prompts + self.seed / seeds + self.rest / (prompts * seeds))


@dataclass(frozen=True)
class CrossedMean:
    """A mean over prompts and seeds with its 95% interval.

    Attributes:
        mean: of all values.
        low, high: mean -+ critical value x standard error; None with one prompt or one seed, whose effect cannot be
            told then, and where no value differs from another.
        standard_error, seed_share: see `error_of_mean`; None likewise.
        variances: estimated components; None likewise.
        prompts, seeds: how many.
    """

    mean: float
    low: float | None
    high: float | None
    standard_error: float | None
    seed_share: float | None
    variances: Variances | None
    prompts: int
    seeds: int


@dataclass(frozen=True)
class MethodDifference:
    """A method minus the baseline, on the same prompts and seeds.

    Attributes:
        difference: its mean and interval; the interval is of this comparison alone, without Holm's correction.
        p_value: two-sided, of the t-test that goes with the interval; 1 where there is no interval.
        adjusted_p_value: Holm's, over all comparisons with the baseline.
        verdict: better or worse where the adjusted p-value is at most 0.05.
        detectable: the smallest difference that this many prompts and seeds find with a power of 0.8.
        effect: the difference that the following two are for.
        prompts_needed, seeds_needed: how many would find `effect` with a power of 0.8, the number of the other staying
            as it is; None where no number would, or where the variances are unknown or the effect is 0.
    """

    difference: CrossedMean
    p_value: float
    adjusted_p_value: float
    verdict: Verdict
    detectable: float | None
    effect: float
    prompts_needed: int | None
    seeds_needed: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)


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

    The variance is (MS_prompt + MS_seed - MS_rest) / (P S), and no less than MS_prompt / (P S) or MS_seed / (P S),
    which it would be without the other's effect, nor than MS_rest / (P S), which it would be without either's. Without
    the last bound, which costs no coverage to speak of, values that differ could have a variance of 0, and with it a
    difference that is certain. The same variance serves studies of readers and cases (Obuchowski and Rockette 1995).

    The share MS_seed / (MS_prompt + MS_seed) says of which of the two samples the error is, for
    `mixed_critical_value`. Where neither has an effect, the smaller sample takes all of it. Arrays of mean squares
    give arrays.
    """
    total = numpy.maximum(numpy.maximum(prompt, seed), numpy.maximum(rest, prompt + seed - rest))
    both = prompt + seed
    nothing = both <= 1e-12 * total
    share = numpy.where(nothing, float(seeds <= prompts), seed / numpy.where(nothing, 1.0, both))
    return numpy.sqrt(total / (prompts * seeds)), share


def mixed_critical_value(seed_share, prompts: int, seeds: int, alpha: float = ALPHA):
    """How many standard errors a mean must be from 0 at a two-sided level alpha (Cochran and Cox 1957).

    The critical values of Student's t with P - 1 and with S - 1 degrees of freedom, mixed by the shares. With one of
    the two alone it is the t-test. Satterthwaite's degrees of freedom, which few seeds estimate badly, would give
    shorter intervals that cover too little, the more so at the levels that many comparisons need.

    It is approximate. In simulated studies of 40 to 200 prompts, with seeds that bring up to ten times the prompts'
    variance, the interval covers the truth in 94.5 to 99% of cases with 2 or 3 seeds and in 94.7 to 97% with 5: most
    where seeds do not matter, which few seeds cannot show. A test at 0.05 / 11 = 0.45% rejects a true null in at most
    0.9% of cases with 2 or 3 seeds and 0.6% with 5 (`python -m benchmarks.comparison_levels`).
    An array of shares gives an array.
    """
    return (1 - seed_share) * critical_value(prompts - 1, alpha) + seed_share * critical_value(seeds - 1, alpha)


def crossed_mean(values) -> CrossedMean:
    """The mean of values [P, S] with an interval that speaks of other prompts and other seeds.

    Raises:
        ValueError: values that are not of that shape, or not finite.
    """
    values = _checked(values)
    prompts, seeds = values.shape
    unknown = CrossedMean(float(values.mean()), None, None, None, None, None, prompts, seeds)
    if min(prompts, seeds) < 2 or numpy.ptp(values) <= 1e-12 * numpy.abs(values).max():
        return unknown
    squares = [float(square) for square in mean_squares(values)]
    error, share = (float(value) for value in error_of_mean(*squares, prompts, seeds))
    by_prompt, by_seed, rest = squares
    margin = mixed_critical_value(share, prompts, seeds) * error
    return dataclasses.replace(
        unknown,
        low=unknown.mean - margin,
        high=unknown.mean + margin,
        standard_error=error,
        seed_share=share,
        variances=Variances(max(0.0, by_prompt - rest) / seeds, max(0.0, by_seed - rest) / prompts, rest),
    )


def compare_with_baseline(
    methods: Mapping[str, tuple[Any, Any]], *, effect: float | None = None
) -> dict[str, MethodDifference]:
    """Compare methods with one baseline, each on the prompts and seeds that it shares with the baseline.

    What a prompt or a seed does to both cancels in the differences, which are analysed as `crossed_mean` does.

    Args:
        methods: name -> the method's values and the baseline's on the same prompts and seeds, [P, S] each.
        effect: the true difference to plan for; None for the one that was found.

    Raises:
        ValueError: values of different shapes, or an effect that is not above 0.
    """
    if effect is not None and not effect > 0:
        raise ValueError(f"the difference to plan for must be above 0, got {effect}")
    differences = {name: _checked(own) - _checked(base, like=own) for name, (own, base) in methods.items()}
    means = {name: crossed_mean(values) for name, values in differences.items()}
    p_values = {name: _p_value(mean) for name, mean in means.items()}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    # Holm's hardest step: what is planned for is found whatever the other comparisons say.
    alpha = ALPHA / max(1, len(methods))
    return {
        name: MethodDifference(
            difference=mean,
            p_value=p_values[name],
            adjusted_p_value=adjusted[name],
            verdict=verdict(mean.mean, adjusted[name]),
            **_plan(mean, abs(mean.mean) if effect is None else effect, alpha),
        )
        for name, mean in means.items()
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of k tests, in their order (Holm 1979): the i-th smallest times k - i + 1, never decreasing.

    Calling a difference where the adjusted p-value is at most alpha is wrong about any of them with a chance of at
    most alpha, however the tests depend on each other, if each keeps its own level; `mixed_critical_value` says how
    far they do with few seeds.
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def verdict(difference: float, adjusted_p_value: float) -> Verdict:
    """What can be said of a difference, at a level of 0.05."""
    if adjusted_p_value > ALPHA or difference == 0:
        return "cannot tell"
    return "better" if difference > 0 else "worse"


# ---- Power ----


def power(effect: float, variances: Variances, prompts: int, seeds: int, alpha: float = ALPHA) -> float:
    """The chance that a true difference `effect` is found with P prompts and S seeds, at a two-sided level alpha.

    The test's own standard error and critical value vary from study to study, as few seeds tell little of how
    seeds differ. So this is the mean of P(|mean| > t SE) over equally likely pairs of MS_prompt and MS_seed, which
    with normal effects are chi-squared with P - 1 and S - 1 degrees of freedom and independent of the mean; MS_rest,
    which has the most, is left at its expectation. Simulated studies find the difference in 78 to 82% of cases where
    this says 80%. It takes the variances for known, which few seeds tell roughly.

    Raises:
        ValueError: fewer than two prompts or seeds, or no variance at all.
    """
    if min(prompts, seeds) < 2:
        raise ValueError(f"at least two prompts and two seeds are needed, got {prompts} and {seeds}")
    truth = variances.standard_error(prompts, seeds)
    if not truth > 0:
        raise ValueError("without any variance there is nothing to plan")
    by_prompt = (variances.rest + seeds * variances.prompt) * _mean_squares(prompts - 1)
    by_seed = (variances.rest + prompts * variances.seed) * _mean_squares(seeds - 1)
    error, share = error_of_mean(by_prompt[:, None], by_seed, variances.rest, prompts, seeds)
    limit = mixed_critical_value(share, prompts, seeds, alpha) * error
    return float((ndtr((abs(effect) - limit) / truth) + ndtr((-abs(effect) - limit) / truth)).mean())


def _mean_squares(degrees: int) -> numpy.ndarray:
    """Equally likely values of chi-squared / degrees, [NODES]: its quantiles at 1 / 2n, 3 / 2n, ..."""
    return 2 / degrees * gammaincinv(degrees / 2, (numpy.arange(NODES) + 0.5) / NODES)


def smallest_detectable(variances: Variances, prompts: int, seeds: int, alpha: float = ALPHA) -> float:
    """The true difference that is found with a power of 0.8."""
    low, high = 0.0, variances.standard_error(prompts, seeds)
    while power(high, variances, prompts, seeds, alpha) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        enough = power(middle, variances, prompts, seeds, alpha) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high


def prompts_needed(effect: float, variances: Variances, seeds: int, alpha: float = ALPHA) -> int | None:
    """Prompts that find `effect` with a power of 0.8 on S seeds; None where seed / S alone hides it."""
    return _fewest(lambda prompts: power(effect, variances, prompts, seeds, alpha))


def seeds_needed(effect: float, variances: Variances, prompts: int, alpha: float = ALPHA) -> int | None:
    """Seeds that find `effect` with a power of 0.8 on P prompts; None where prompt / P alone hides it."""
    return _fewest(lambda seeds: power(effect, variances, prompts, seeds, alpha))


def _fewest(power_of: Callable[[int], float]) -> int | None:
    """The least count from 2 on whose power is enough.

    Power rises with the count. With two or three seeds it falls slightly again beyond many prompts, where the test
    holds its level better: searched is the way up.
    """
    low, high = 1, 2
    while power_of(high) < POWER:
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= POWER else (middle, high)
    return high


def _plan(mean: CrossedMean, effect: float, alpha: float) -> dict[str, Any]:
    prompts = seeds = detectable = None
    if mean.variances is not None:
        detectable = smallest_detectable(mean.variances, mean.prompts, mean.seeds, alpha)
        if effect > 0:
            prompts = prompts_needed(effect, mean.variances, mean.seeds, alpha)
            seeds = seeds_needed(effect, mean.variances, mean.prompts, alpha)
    return {"detectable": detectable, "effect": effect, "prompts_needed": prompts, "seeds_needed": seeds}


def _p_value(mean: CrossedMean) -> float:
    """The level at which the mean lies on the end of its interval; it is between the p-values of the two t-tests."""
    if mean.standard_error is None or mean.seed_share is None:
        return 1.0
    distance = abs(mean.mean) / mean.standard_error
    low, high = sorted(2 * float(stdtr(count - 1, -distance)) for count in (mean.prompts, mean.seeds))
    low = max(low, LEAST_P_VALUE)
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        is_inside = distance < mixed_critical_value(mean.seed_share, mean.prompts, mean.seeds, middle)
        low, high = (middle, high) if is_inside else (low, middle)
    return high


def _checked(values, like=None) -> numpy.ndarray:
    values = numpy.asarray(values, dtype=float)
    if values.ndim != 2 or not values.size or not numpy.isfinite(values).all():
        raise ValueError(f"values must be finite, one row per prompt and one column per seed, got {values.shape}")
    if like is not None and values.shape != numpy.shape(like):
        raise ValueError(f"the baseline has values of shape {values.shape}, and the method of {numpy.shape(like)}")
    return values
