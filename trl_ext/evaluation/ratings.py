"""Bradley-Terry ratings of several systems from their wins against one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from trl_ext.evaluation.bootstrap import DRAWS, percentile_interval, resample_counts

POINTS_PER_FACTOR_TEN = 400.0
CENTRE = 1000.0
NEWTON_STEPS = 100


@dataclass(frozen=True)
class Ratings:
    """Ratings on the scale of Elo: 400 points are odds of ten to one.

    Attributes:
        ratings: one for each system.
        low, high: 95% intervals by resampling prompts; a rating that was fixed has none of its own and both equal it.
        virtual_draws: whether a draw was added to every pair that met, because the ratings would be infinite else.
    """

    ratings: list[float]
    low: list[float]
    high: list[float]
    virtual_draws: bool


def expected_score(difference: float) -> float:
    """The expected score, in [0, 1], of a system rated `difference` points above its opponent."""
    return 1 / (1 + 10 ** (-difference / POINTS_PER_FACTOR_TEN))


def bradley_terry(wins, *, anchor: int | None = None) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Maximum-likelihood ratings of the Bradley-Terry model, in which i beats j with odds strength_i / strength_j.

    Finite ratings exist only where every system can be reached from every other along wins (Ford 1957). Where that
    fails, such as for a system that wins all, half a win each way is added to every pair that met: a virtual draw.

    Args:
        wins: [..., k, k]; `wins[i][j]` is how often i beat j, with 1/2 to each for a tie. Leading dimensions are
            separate problems, solved at once.
        anchor: the system whose rating is 1000; None for ratings whose mean is 1000.

    Returns:
        Ratings, [..., k], and whether virtual draws were added, [...].

    Raises:
        ValueError: a matrix that is not square or has negative entries, or systems that no chain of matches connects.
    """
    wins = numpy.array(wins, dtype=float)
    size = wins.shape[-1]
    if wins.ndim < 2 or wins.shape[-2] != size or size < 2 or not (wins >= 0).all():
        raise ValueError("wins must be a square table of counts for two or more systems")
    wins[..., range(size), range(size)] = 0.0
    flat = wins.reshape(-1, size, size)
    ratings, virtual = _rate(flat, (flat + flat.swapaxes(1, 2)) > 0, anchor)
    return ratings.reshape(wins.shape[:-1]), virtual.reshape(wins.shape[:-2])


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

    Args:
        credits: for each pair, and in it for each prompt, 1 where the first of the pair won, 1/2 for a tie, 0 where it
            lost, None where that comparison has no judgement.
        pairs: the two systems of each, as indices.
        size: number of systems.
        anchor: as for `bradley_terry`.
        draws: bootstrap samples of the prompts, at least 1000.
        seed: of the resampling.

    Raises:
        ValueError: as for `bradley_terry`, or too few draws.
    """
    table = numpy.array([[numpy.nan if value is None else value for value in row] for row in credits], dtype=float)
    judged = ~numpy.isnan(table)
    first, second = numpy.where(judged, table, 0.0), numpy.where(judged, 1 - table, 0.0)

    def matrix(counts: numpy.ndarray) -> numpy.ndarray:
        wins = numpy.zeros((len(counts), size, size))
        for index, (a, b) in enumerate(pairs):
            wins[:, a, b] += counts @ first[index]
            wins[:, b, a] += counts @ second[index]
        return wins

    whole = matrix(numpy.ones((1, table.shape[1])))
    met = (whole + whole.swapaxes(1, 2)) > 0
    ratings, virtual = _rate(whole, met, anchor)
    # Samples of a whole that needs virtual draws need them as well; others get them one by one.
    drawn, _ = _rate(matrix(resample_counts(table.shape[1], draws, seed)), met, anchor)
    low, high = zip(*(percentile_interval(drawn[:, system]) for system in range(size)), strict=True)
    return Ratings(ratings=ratings[0].tolist(), low=list(low), high=list(high), virtual_draws=bool(virtual[0]))


def _rate(wins: numpy.ndarray, met: numpy.ndarray, anchor: int | None) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Ratings, [d, k], and whether each problem needed virtual draws, [d], which go to the pairs in `met`."""
    if not _reaches_all(met).all():
        raise ValueError("some systems never met, not even through others: they cannot be rated together")
    virtual = ~_reaches_all(wins > 0)
    log_strengths = _maximize(wins + 0.5 * met * virtual[:, None, None])
    ratings = POINTS_PER_FACTOR_TEN / numpy.log(10.0) * log_strengths
    origin = ratings.mean(axis=1, keepdims=True) if anchor is None else ratings[:, [anchor]]
    return ratings - origin + CENTRE, virtual


def _reaches_all(edges: numpy.ndarray) -> numpy.ndarray:
    """Whether each directed graph, [d, k, k], leads from every node to every other, [d]."""
    size = edges.shape[-1]
    reach = (edges | numpy.eye(size, dtype=bool)).astype(float)
    for _ in range(size.bit_length()):
        reach = (reach @ reach > 0).astype(float)
    return reach.all(axis=(1, 2))


def _maximize(wins: numpy.ndarray) -> numpy.ndarray:
    """Log-strengths, [d, k], of maximal likelihood with the first at 0, by Newton's method with bounded steps."""
    matches = wins + wins.swapaxes(1, 2)
    strengths = numpy.zeros(wins.shape[:2])
    diagonal = range(wins.shape[-1])
    for _ in range(NEWTON_STEPS):
        rates = 1 / (1 + numpy.exp(strengths[:, None, :] - strengths[:, :, None]))
        gradient = (wins - matches * rates).sum(axis=2)
        information = -matches * rates * (1 - rates)
        information[:, diagonal, diagonal] = -information.sum(axis=2)
        step = numpy.linalg.solve(information[:, 1:, 1:], gradient[:, 1:, None])[..., 0]
        largest = numpy.abs(step).max(axis=1, keepdims=True)
        strengths[:, 1:] += step / numpy.maximum(largest, 1.0)
        if largest.max() < 1e-10:
            break
    return strengths
