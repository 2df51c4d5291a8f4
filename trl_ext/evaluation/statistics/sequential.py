"""Deciding whether a rate is above a threshold with as few verdicts as possible, and an interval that remains valid.

`python -m benchmarks.fewer_verdicts` measures verdicts and errors with recorded judges.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
from scipy.special import ndtr, ndtri

from trl_ext.evaluation.statistics.intervals import NORMAL_95, rate_sample, score_bounds

# The two add up to 5%: the risk of stopping early, and that of the two looks at all prompts.
EARLY_ALPHA = 0.005
LOOKS_ALPHA = 0.045
# Every so many prompts is asked in both orders from the start, which shows how often the orders disagree.
DOUBLED_EVERY = 8
# The second orders are not asked if they would decide with a lower probability.
LEAST_CHANCE = 0.05
LARGEST_BET = 0.5

Ask = Callable[[list[tuple[int, bool]]], Sequence[float | None]]


@dataclass(frozen=True)
class Decision:
    """Whether a rate is above a threshold.

    Attributes:
        decision: "above", "below", or "undecided" if the interval includes the threshold.
        rate: mean of the verdicts; those of a prompt that was asked in both orders count together as one.
        low, high: an interval that covers the true rate with at least 95%, whenever the asking stopped.
        threshold: what the rate is compared with.
        n_prompts: prompts with a verdict.
        n_verdicts: questions asked, and `n_all`, both orders of every prompt.
        stopped: "early", before every prompt was asked once; "one order", without the second orders of most prompts;
            or "both orders".
    """

    decision: Literal["above", "below", "undecided"]
    rate: float
    low: float
    high: float
    threshold: float
    n_prompts: int
    n_verdicts: int
    n_all: int
    stopped: Literal["early", "one order", "both orders"]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        return dataclasses.asdict(self)


def confidence_sequence(
    values: Sequence[float], *, alpha: float = 0.05, points: int = 1000
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Bounds of a mean after each value, which all hold at once with probability 1 - alpha.

    One may therefore look after every value and stop at any time. It is the hedged betting sequence of Waudby-Smith
    and Ramdas (2010.09686, theorem 3): a mean is excluded once a gambler who bets against it has multiplied the
    capital by 1 / alpha.

    Args:
        values: independent, in [0, 1], with the same mean given the ones before; shape [n].
        alpha: the probability of an error at any time.
        points: of the grid on which means are tried; bounds are rounded outwards to it.

    Returns:
        Lower and upper bounds, each of shape [n]; they only ever become narrower.

    Raises:
        ValueError: a value is outside [0, 1], or alpha is not in (0, 1).
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    means = numpy.arange(points + 1) / points
    kept = numpy.logical_and.accumulate(_log_capital(values, means, alpha) < math.log(1 / alpha), axis=0)
    # The set of means that are kept is an interval; if it is empty, an error has happened.
    low = numpy.where(kept.any(axis=1), kept.argmax(axis=1) - 1, points)
    high = numpy.where(kept.any(axis=1), points + 1 - kept[:, ::-1].argmax(axis=1), 0)
    return low.clip(0) / points, high.clip(None, points) / points


def decide(ask: Ask, n: int, *, threshold: float = 0.5, batch_size: int = 32, seed: int = 0) -> Decision:
    """Ask about `n` prompts until it is decided whether the rate of wins is above or below a threshold.

    The rate is the mean over prompts of the verdicts in both orders. Prompts are asked in random order, each in one
    order that is drawn by a coin, so that position bias cancels; every eighth in both. Asking stops

    1. when a confidence sequence with alpha 0.5% excludes the threshold;
    2. when every prompt was asked once, if a score interval excludes the threshold, or the second orders would hardly
       change that: given the verdicts so far, with a probability below 5%;
    3. when every prompt was asked in both orders.

    The intervals of 2 and 3 have a joint error of 4.5%, by the correlation of the two means. So the rate is outside
    `Decision.low` to `Decision.high` in at most 5% of all runs, up to the normal approximation of 2 and 3.

    Args:
        ask: takes pairs of a prompt's index and whether the candidate is shown first, and returns for each 1 for a win
            of the candidate, 1/2 for a tie, 0 for a loss, or None without a verdict. The prompt is then left out.
        n: number of prompts, a random sample of those that the rate is about.
        threshold: in (0, 1).
        batch_size: prompts between two looks at the confidence sequence.
        seed: of the order of prompts and the coins; the same seed asks the same questions.

    Raises:
        ValueError: `n` is not positive, the threshold is not in (0, 1), or there is no verdict.
    """
    if n < 1 or not 0 < threshold < 1:
        raise ValueError(f"n must be positive and threshold in (0, 1), got {n} and {threshold}")
    generator = random.Random(seed)
    order = generator.sample(range(n), n)
    coins = [generator.random() < 0.5 for _ in range(n)]
    doubled = set(order[::DOUBLED_EVERY])
    # Of each prompt, with the base and with the candidate first; NaN without a verdict.
    answers, asked = numpy.zeros((n, 2)), numpy.zeros((n, 2), dtype=bool)

    def ask_about(questions: list[tuple[int, bool]]) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The mean verdicts of the prompts so far, in the order of asking, and the differences of both orders."""
        rows, columns = zip(*questions, strict=True)
        index = numpy.array(rows), numpy.array(columns, dtype=int)
        answers[index], asked[index] = numpy.array(ask(questions), dtype=float), True
        means = answers[order].sum(axis=1) / numpy.maximum(asked[order].sum(axis=1), 1)
        differences = (answers[:, 0] - answers[:, 1])[asked.all(axis=1)]
        kept = asked[order].any(axis=1) & ~numpy.isnan(means)
        return means[kept], differences[~numpy.isnan(differences)]

    def decision(values: numpy.ndarray, low: float, high: float, stopped: str) -> Decision:
        told = "above" if low > threshold else "below" if high < threshold else "undecided"
        rate, n_verdicts = float(values.mean()), int(asked.sum())
        return Decision(told, rate, low, high, threshold, len(values), n_verdicts, 2 * n, stopped)

    for start in range(0, n, batch_size):
        batch = order[start : start + batch_size]
        twice = [(i, not coins[i]) for i in batch if i in doubled]
        values, differences = ask_about([(i, coins[i]) for i in batch] + twice)
        if len(values) and _log_capital(values, numpy.array([threshold]), EARLY_ALPHA).max() >= -math.log(EARLY_ALPHA):
            low, high = (float(bounds[-1]) for bounds in confidence_sequence(values, alpha=EARLY_ALPHA))
            # The bounds are rounded outwards, but exclude the threshold.
            beyond = numpy.nextafter(threshold, [0.0, 1.0]).tolist()
            low, high = (max(low, beyond[1]), high) if low + high > 2 * threshold else (low, min(high, beyond[0]))
            return decision(values, low, high, "early")
    if not len(values):
        raise ValueError("no prompt has a verdict")
    quantiles, chance = _looks(values, differences, threshold)
    first = values, *_score_interval(values, quantiles[0])
    if not first[1] <= threshold <= first[2]:
        return decision(*first, "one order")
    rest = [i for i in order if i not in doubled]
    for start in range(0, len(rest), batch_size):
        if chance < LEAST_CHANCE:
            return decision(*first, "one order")
        values, differences = ask_about([(i, not coins[i]) for i in rest[start : start + batch_size]])
        chance = _looks(values, differences, threshold)[1]
    return decision(values, *_score_interval(values, quantiles[1]), "both orders")


def _score_interval(values: numpy.ndarray, quantile: float) -> tuple[float, float]:
    rate, size, of_95 = rate_sample(values)
    return score_bounds(rate, size, quantile * of_95 / NORMAL_95)


def _log_capital(values: Sequence[float], means: numpy.ndarray, alpha: float) -> numpy.ndarray:
    """The logarithm of the gambler's capital against each mean after each value; [n, number of means].

    Half of the capital bets that the mean is larger, and half that it is smaller. A bet depends only on the values
    before, by their mean and variance with one value of 1/2 more, whose squared deviation counts 1/4.
    """
    values = numpy.asarray(values, dtype=float)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("values must lie between 0 and 1")
    counts = numpy.arange(1, len(values) + 1)
    running = (0.5 + numpy.cumsum(values)) / (counts + 1)
    variances = (0.25 + numpy.cumsum((values - running) ** 2)) / (counts + 1)
    before = numpy.concatenate([[0.25], variances[:-1]])
    bets = numpy.sqrt(2 * math.log(2 / alpha) / (before * counts * numpy.log1p(counts)))[:, None]
    gains = values[:, None] - means
    with numpy.errstate(divide="ignore"):
        larger = numpy.log1p(numpy.minimum(bets, LARGEST_BET / means) * gains)
        smaller = numpy.log1p(-numpy.minimum(bets, LARGEST_BET / (1 - means)) * gains)
    return numpy.maximum(numpy.cumsum(larger, axis=0), numpy.cumsum(smaller, axis=0)) - math.log(2)


def _looks(values: numpy.ndarray, differences: numpy.ndarray, threshold: float) -> tuple[tuple[float, float], float]:
    """The quantiles of both looks, and the probability that the second orders decide.

    The mean of one verdict of a prompt is that of both plus noise, whose variance is a quarter of the mean squared
    difference of the two. So the covariance of the means at the two looks is the variance of the second.
    """
    variance = float(values.var())
    # Half a disagreement more, as few prompts may not show one.
    noise = (float((differences**2).sum()) / 4 + 0.125) / (len(differences) + 1)
    of_both = max(variance - noise * (1 - len(differences) / len(values)), variance / 2)
    correlation = math.sqrt(of_both / variance) if variance else 1.0
    quantiles = spending_quantiles(round(correlation, 2))
    spread = math.sqrt(max(variance - of_both, 1e-12))
    distance = abs(float(values.mean()) - threshold) * math.sqrt(len(values))
    return quantiles, float(ndtr((distance - quantiles[1] * math.sqrt(of_both)) / spread))


@functools.lru_cache
def spending_quantiles(correlation: float, alpha: float = LOOKS_ALPHA) -> tuple[float, float]:
    """The quantiles of two looks at standard normals of this correlation, which exceed them with probability alpha.

    The first spends the share of alpha that O'Brien and Fleming's function gives to its information, the squared
    correlation (Lan and DeMets 1983): little, if much is to come. So the second is nearly that of a single look.
    """
    from scipy.optimize import brentq  # takes a second to import

    if correlation > 0.995:
        return (float(ndtri(1 - alpha / 2)),) * 2
    # Each side has half of alpha.
    first, spread = -float(ndtri(2 * ndtr(ndtri(alpha / 4) / correlation))), math.sqrt(1 - correlation**2)
    nodes, weights = numpy.polynomial.legendre.leggauss(200)
    z = first * nodes
    density = first * weights * numpy.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    def excess(second: float) -> float:
        """The probability to exceed either, minus alpha."""
        within = ndtr((second - correlation * z) / spread) - ndtr((-second - correlation * z) / spread)
        return 1 - alpha - float(density @ within)

    return first, float(brentq(excess, 1.0, 5.0))
