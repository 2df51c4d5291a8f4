"""Bradley-Terry ratings of several systems from their wins against one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.special import expit, logit, ndtri

from trl_ext.evaluation.statistics.intervals import NORMAL_95, wilson_interval

POINTS_PER_FACTOR_TEN = 400.0
CENTRE = 1000.0
NEWTON_STEPS = 100
DRAWS = 2000


@dataclass(frozen=True)
class Ratings:
    """Ratings on the Elo scale: 400 points are odds of ten to one.

    Attributes:
        ratings: one for each system.
        low, high: 95% intervals from resampling prompts, and from Wilson's bounds for pairs whose comparisons all have
            the same outcome; for a fixed rating, both equal the rating.
        virtual_draws: whether a draw was added to every pair that met, because the ratings would otherwise be
            infinite.
    """

    ratings: list[float]
    low: list[float]
    high: list[float]
    virtual_draws: bool


def expected_score(difference: float) -> float:
    """The expected score, in [0, 1], of a system rated `difference` points above its opponent."""
    return 1 / (1 + 10 ** (-difference / POINTS_PER_FACTOR_TEN))


def bradley_terry(wins, *, anchor: int | None = None, met=None) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Maximum-likelihood ratings of the Bradley-Terry model, in which i beats j with odds strength_i / strength_j.

    Finite ratings exist only if every system can be reached from every other along wins (Ford 1957). If not, for
    example because a system wins all comparisons, half a win each way is added to every pair that met: a virtual draw.

    Args:
        wins: [..., k, k]; `wins[i][j]` is how often i beat j, with 1/2 to each for a tie. Leading dimensions are
            separate problems, solved at once.
        anchor: the system whose rating is fixed at 1000; None for ratings whose mean is 1000.
        met: [..., k, k], which pairs met; None for those with a win either way.

    Returns:
        Ratings, [..., k], and whether virtual draws were added, [...].

    Raises:
        ValueError: no chain of matches connects some systems.
    """
    wins = numpy.array(wins, dtype=float)
    size = wins.shape[-1]
    wins[..., range(size), range(size)] = 0.0
    met = (wins + wins.swapaxes(-1, -2)) > 0 if met is None else met
    if not _reaches_all(met).all():
        raise ValueError("some systems never met, not even through others: they cannot be rated together")
    virtual = ~_reaches_all(wins > 0)
    ratings = POINTS_PER_FACTOR_TEN / numpy.log(10.0) * _maximize(wins + 0.5 * met * virtual[..., None, None])
    origin = ratings.mean(axis=-1, keepdims=True) if anchor is None else ratings[..., [anchor]]
    return ratings - origin + CENTRE, virtual


def ratings_with_intervals(
    credits: Sequence[Sequence[float | None]],
    pairs: Sequence[tuple[int, int]],
    size: int,
    *,
    anchor: int | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Ratings:
    """Bradley-Terry ratings of systems that were compared on the same prompts, with intervals over prompts.

    Prompts are resampled, and the ratings are computed again. Resampling says nothing about a pair whose comparisons
    all have the same outcome: ten wins stay ten wins. For such a pair, a rate is drawn instead. Its log-odds are
    normal on either side of the rate, with Wilson's bounds as their middle 95%. A virtual draw is included, without
    which the odds of ten wins are infinite. For only two systems, the interval consists of these bounds in points. In
    general, it spans both sources of variation.

    Args:
        credits: for each pair, and in it for each prompt, 1 if the first of the pair won, 1/2 for a tie, 0 if it lost,
            None if the comparison has no judgement.
        pairs: the two systems of each pair, as indices.
        size: number of systems.
        anchor: as for `bradley_terry`.
        draws: bootstrap samples of the prompts.
        seed: seed of the resampling.
    """
    table = numpy.array(credits, dtype=float)
    judged = ~numpy.isnan(table)
    first, second = numpy.where(judged, table, 0.0), numpy.where(judged, 1 - table, 0.0)
    whole = _matrix(first.sum(axis=1)[None], second.sum(axis=1)[None], pairs, size)
    met = (whole + whole.swapaxes(1, 2)) > 0
    ratings, virtual = bradley_terry(whole, anchor=anchor)
    prompts = table.shape[1]
    counts = numpy.random.default_rng(seed).multinomial(prompts, numpy.full(prompts, 1 / prompts), size=draws)
    # If the whole sample needs virtual draws, its resamples get them too, so that all are treated alike.
    half_draws = 0.5 * virtual[0] * judged.any(axis=1)
    won, lost = counts @ first.T + half_draws, counts @ second.T + half_draws
    sampled = [bradley_terry(_matrix(won, lost, pairs, size), anchor=anchor, met=met)[0]]
    generator = numpy.random.default_rng([seed, draws])
    unanimous = [pair for pair, known in enumerate(judged) if len(numpy.unique(table[pair, known])) == 1]
    for pair in unanimous:
        wins, n = first[pair].sum() + 0.5, int(judged[pair].sum()) + 1
        rates = _drawn_rates(wins, n, draws, generator)
        won[:, pair], lost[:, pair] = rates * n, (1 - rates) * n
    if unanimous:
        sampled.append(bradley_terry(_matrix(won, lost, pairs, size), anchor=anchor, met=met)[0])
    low, high = numpy.percentile(sampled, [2.5, 97.5], axis=1)
    return Ratings(ratings[0].tolist(), low.min(axis=0).tolist(), high.max(axis=0).tolist(), bool(virtual[0]))


def _matrix(won: numpy.ndarray, lost: numpy.ndarray, pairs: Sequence[tuple[int, int]], size: int) -> numpy.ndarray:
    """Tables of wins, [d, k, k], from how often the first of each pair won and lost, [d, pairs]."""
    wins = numpy.zeros((len(won), size, size))
    for index, (a, b) in enumerate(pairs):
        wins[:, a, b] += won[:, index]
        wins[:, b, a] += lost[:, index]
    return wins


def _drawn_rates(wins: float, n: int, draws: int, generator: numpy.random.Generator) -> numpy.ndarray:
    """Rates, [draws], whose log-odds are normal on either side of wins / n, with Wilson's bounds as the middle 95%."""
    low, high, middle = logit([*wilson_interval(wins, n), wins / n])
    # Use evenly spaced quantiles in random order, so that the bounds hold exactly and not only on average.
    quantiles = ndtri((numpy.arange(draws) + 0.5) / draws)
    spread = numpy.where(quantiles < 0, middle - low, high - middle) / NORMAL_95
    return expit(middle + generator.permutation(quantiles * spread))


def _reaches_all(edges: numpy.ndarray) -> numpy.ndarray:
    """Whether each directed graph, [..., k, k], leads from every node to every other, [...]."""
    size = edges.shape[-1]
    reach = (edges | numpy.eye(size, dtype=bool)).astype(float)
    for _ in range(size.bit_length()):
        reach = (reach @ reach > 0).astype(float)
    return reach.all(axis=(-1, -2))


def _maximize(wins: numpy.ndarray) -> numpy.ndarray:
    """Maximum-likelihood log-strengths, [..., k], with the first at 0, by Newton's method with bounded steps."""
    matches = wins + wins.swapaxes(-1, -2)
    strengths = numpy.zeros(wins.shape[:-1])
    diagonal = range(wins.shape[-1])
    for _ in range(NEWTON_STEPS):
        rates = expit(strengths[..., :, None] - strengths[..., None, :])
        gradient = (wins - matches * rates).sum(axis=-1)
        information = -matches * rates * (1 - rates)
        information[..., diagonal, diagonal] = -information.sum(axis=-1)
        step = numpy.linalg.solve(information[..., 1:, 1:], gradient[..., 1:, None])[..., 0]
        largest = numpy.abs(step).max(axis=-1, keepdims=True)
        strengths[..., 1:] += step / numpy.maximum(largest, 1.0)
        if largest.max() < 1e-10:
            break
    return strengths
