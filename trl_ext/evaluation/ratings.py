"""Bradley-Terry ratings of several systems from their wins against one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy

from trl_ext.evaluation.intervals import wilson_interval

POINTS_PER_FACTOR_TEN = 400.0
CENTRE = 1000.0
NEWTON_STEPS = 100
DRAWS = 2000
MINIMUM_DRAWS = 1000


@dataclass(frozen=True)
class Ratings:
    """Ratings on the scale of Elo: 400 points are odds of ten to one.

    Attributes:
        ratings: one for each system.
        low, high: 95% intervals by resampling prompts, and by Wilson's bounds for pairs whose comparisons all have one
            outcome; a rating that was fixed has none of its own and both equal it.
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

    Prompts are resampled, and the ratings computed anew. A pair whose comparisons all have one outcome says nothing
    so: ten wins stay ten wins. In its place a rate is drawn whose log-odds are normal on either side of the rate, with
    Wilson's bounds as their middle 95%; a virtual draw is counted in, without which the odds of ten wins are infinite.
    For two systems alone, the interval is those bounds in points; in general, it is what both ways together span.

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
    whole = _matrix(first.sum(axis=1)[None], second.sum(axis=1)[None], pairs, size)
    met = (whole + whole.swapaxes(1, 2)) > 0
    ratings, virtual = _rate(whole, met, anchor)
    counts = resample_counts(table.shape[1], draws, seed)
    # A sample of a whole that needs virtual draws gets them too, so that all are on one footing.
    half_draws = 0.5 * virtual[0] * judged.any(axis=1)
    won, lost = counts @ first.T + half_draws, counts @ second.T + half_draws
    sampled = [_rate(_matrix(won, lost, pairs, size), met, anchor)[0]]
    generator = numpy.random.default_rng([seed, draws])
    outcomes = [row[told].tolist() for row, told in zip(table, judged, strict=True)]
    unanimous = [pair for pair, credit in enumerate(outcomes) if len(set(credit)) == 1]
    for pair in unanimous:
        wins, n = sum(outcomes[pair]) + 0.5, len(outcomes[pair]) + 1
        rates = _drawn_rates(wins, n, draws, generator)
        won[:, pair], lost[:, pair] = rates * n, (1 - rates) * n
    if unanimous:
        sampled.append(_rate(_matrix(won, lost, pairs, size), met, anchor)[0])
    ends = [[numpy.percentile(drawn[:, system], [2.5, 97.5]) for drawn in sampled] for system in range(size)]
    return Ratings(
        ratings=ratings[0].tolist(),
        low=[float(min(low for low, _ in intervals)) for intervals in ends],
        high=[float(max(high for _, high in intervals)) for intervals in ends],
        virtual_draws=bool(virtual[0]),
    )


def resample_counts(n: int, draws: int = DRAWS, seed: int = 0) -> numpy.ndarray:
    """How often each of `n` prompts is in each bootstrap sample of `n`, [draws, n].

    Raises:
        ValueError: no prompts, or fewer than 1000 draws.
    """
    if n < 1:
        raise ValueError("there are no prompts to resample")
    if draws < MINIMUM_DRAWS:
        raise ValueError(f"draws must be at least {MINIMUM_DRAWS} for a 95% interval, got {draws}")
    return numpy.random.default_rng(seed).multinomial(n, numpy.full(n, 1 / n), size=draws)


def _matrix(won: numpy.ndarray, lost: numpy.ndarray, pairs: Sequence[tuple[int, int]], size: int) -> numpy.ndarray:
    """Tables of wins, [d, k, k], from how often the first of each pair won and lost, [d, pairs]."""
    wins = numpy.zeros((len(won), size, size))
    for index, (a, b) in enumerate(pairs):
        wins[:, a, b] += won[:, index]
        wins[:, b, a] += lost[:, index]
    return wins


def _drawn_rates(wins: float, n: int, draws: int, generator: numpy.random.Generator) -> numpy.ndarray:
    """Rates, [draws], whose log-odds are normal on either side of wins / n, with Wilson's bounds as the middle 95%."""
    bounds = numpy.array([*wilson_interval(wins, n), wins / n])
    low, high, middle = numpy.log(bounds / (1 - bounds))
    # Evenly spaced quantiles in random order: the bounds are met, and not only on average.
    normal = NormalDist()
    quantiles = numpy.array([normal.inv_cdf((i + 0.5) / draws) for i in range(draws)])
    spread = numpy.where(quantiles < 0, middle - low, high - middle) / normal.inv_cdf(0.975)
    return 1 / (1 + numpy.exp(-(middle + generator.permutation(quantiles * spread))))


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
