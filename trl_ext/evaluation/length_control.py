"""The win rate that would be measured if both systems' responses were equally long (Dubois et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from trl_ext.evaluation.bootstrap import DRAWS, percentile_interval, resample_counts, unanimous_interval

# Keeps a coefficient finite where every comparison is won, or length alone tells wins from losses: as much as one
# normal prior of standard deviation 10 on the scale of log-odds, which moves a rate over 100 prompts by under 0.001.
PRIOR_DEVIATION = 10.0
NEWTON_STEPS = 100
HALVINGS = 30


@dataclass(frozen=True)
class LengthControlledWinRate:
    """A win rate with the effect of length taken out, and what it was taken out from.

    Attributes:
        rate, low, high: the length-controlled rate and its 95% bootstrap interval over prompts; Wilson's where all
            comparisons have one outcome, which resampling cannot change.
        raw: the win rate of the same rows, ties as half.
        length_coefficient: log-odds per unit of tanh(length difference / its standard deviation); positive where the
            judge favours the longer response. None where all differences are zero.
        mean_length, base_mean_length: characters of the candidate's and of the base's responses.
        n: rows with a judgement.
        difficulty: whether the model has a term for the difficulty of each prompt.
        note: what the figure leaves out.
    """

    rate: float
    low: float
    high: float
    raw: float
    length_coefficient: float | None
    mean_length: float
    base_mean_length: float
    n: int
    difficulty: bool
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)


def length_controlled_win_rate(
    credits: Sequence[float | None],
    lengths: Sequence[int],
    base_lengths: Sequence[int],
    *,
    difficulty: Sequence[float] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> LengthControlledWinRate | None:
    """Fit how length sways the judge and predict the win rate at equal lengths.

    The model of AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475): the log-odds that the candidate wins on prompt x
    are theta + phi tanh(d_x / s) + psi gamma_x, with d_x the length of the candidate's response minus the base's, s
    the sample standard deviation of the d_x, and gamma_x a difficulty fixed in advance from many other systems, here
    standardised over the prompts, so that neither its unit nor its origin matters. The rate is the mean over prompts
    of the predicted win probability without the length term. AlpacaEval penalises the coefficients by their absolute
    values, with a cross-validated weight; here a wide normal prior stands in its place, and its two made-up
    comparisons that guard against gaming are left out.

    Args:
        credits: 1 for a win, 1/2 for a tie, 0 for a loss; None for a row without a judgement, which is left out.
        lengths, base_lengths: of both responses, in characters.
        difficulty: gamma of each prompt; None where none is known in advance, as for a benchmark judged for one class
            only: the term is then left out, and `note` says so.
        draws: bootstrap samples of the prompts, at least 1000.
        seed: of the resampling.

    Returns:
        None where no row was judged, or where the model cannot be told: the length term hardly varies, as where the
        candidate is longer on every prompt by much more than its lengths vary.

    Raises:
        ValueError: lists of different lengths, a credit outside [0, 1], or a difficulty that is not finite.
    """
    columns = {"lengths": lengths, "base_lengths": base_lengths, "difficulty": difficulty}
    for name, values in columns.items():
        if values is not None and len(values) != len(credits):
            raise ValueError(f"{name}: has {len(values)} entries for {len(credits)} comparisons; give one for each")
    judged = [index for index, credit in enumerate(credits) if credit is not None]
    if not judged:
        return None
    labels = numpy.array([credits[index] for index in judged], dtype=float)
    if not ((labels >= 0) & (labels <= 1)).all():
        raise ValueError("credits must lie between 0 and 1")
    own, other = (numpy.array([values[index] for index in judged], dtype=float) for values in (lengths, base_lengths))
    term = length_term(own - other)
    # Fisher information on the length coefficient, at most: with less, the prior would decide and not the data.
    if term is None or (term.any() and len(term) * term.var() / 4 < 0.1):
        return None
    features = [numpy.ones(len(labels)), term]
    if difficulty is not None:
        features.append(_standardised(numpy.array([difficulty[index] for index in judged], dtype=float)))
    design = numpy.stack(features, axis=1)
    equal_lengths = design.copy()
    equal_lengths[:, 1] = 0.0
    whole = numpy.ones((1, len(labels)))
    coefficients = fit_logistic(design, labels, whole)
    resampled = resample_counts(len(labels), draws, seed).astype(float)
    low, high = unanimous_interval(labels.tolist()) or percentile_interval(
        _weighted_rates(equal_lengths, fit_logistic(design, labels, resampled), resampled)
    )
    return LengthControlledWinRate(
        rate=float(_weighted_rates(equal_lengths, coefficients, whole)[0]),
        low=low,
        high=high,
        raw=float(labels.mean()),
        length_coefficient=float(coefficients[0, 1]) if term.any() else None,
        mean_length=float(own.mean()),
        base_mean_length=float(other.mean()),
        n=len(labels),
        difficulty=difficulty is not None,
        note="AlpacaEval's model" if difficulty is not None else "AlpacaEval's model without its difficulty term",
    )


def length_term(differences: numpy.ndarray) -> numpy.ndarray | None:
    """tanh(d / sample standard deviation of d), [n]; zeros where all are zero, None where they are equal and not."""
    if not differences.any():
        return numpy.zeros(len(differences))
    deviation = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    return numpy.tanh(differences / deviation) if deviation > 0 else None


def predicted_rates(design: numpy.ndarray, coefficients: numpy.ndarray) -> numpy.ndarray:
    """Win probabilities, [draws, n], of a design [n, terms] under coefficients [draws, terms]."""
    return 1 / (1 + numpy.exp(-numpy.clip(coefficients @ design.T, -500, 500)))


def fit_logistic(design: numpy.ndarray, labels: numpy.ndarray, weights: numpy.ndarray) -> numpy.ndarray:
    """Logistic regressions with soft labels and weighted rows, all at once, by Newton's method with a line search.

    Args:
        design: features, [n, terms]; a constant is one of them if wanted.
        labels: in [0, 1], [n].
        weights: of the rows in each regression, [draws, n].

    Returns:
        Coefficients, [draws, terms]: the posterior mode under independent normal priors, `PRIOR_DEVIATION` wide. The
        posterior is strictly log-concave, so the mode is unique and is found from any start.
    """
    precision = numpy.eye(design.shape[1]) / PRIOR_DEVIATION**2
    coefficients = numpy.zeros((len(weights), design.shape[1]))
    reached = _log_posterior(design, labels, weights, coefficients)
    for _ in range(NEWTON_STEPS):
        rates = predicted_rates(design, coefficients)
        gradient = (weights * (labels - rates)) @ design - coefficients @ precision
        curvature = numpy.einsum("dn,ni,nj->dij", weights * rates * (1 - rates), design, design, optimize=True)
        step = numpy.linalg.solve(curvature + precision, gradient[..., None])[..., 0]
        # Twice what a whole step gains where the posterior is a parabola.
        promised = (gradient * step).sum(axis=1)
        if promised.max() < 1e-16:
            break
        coefficients, reached = _searched(design, labels, weights, coefficients, reached, step, promised)
    return coefficients


def _searched(design, labels, weights, coefficients, reached, step, promised):
    """Coefficients after each regression's step and their log-posteriors; a step is halved until it gains enough.

    Far from the mode the curvature nearly vanishes and a whole step would overshoot.
    """
    size = numpy.ones(len(step))
    for _ in range(HALVINGS):
        moved = coefficients + size[:, None] * step
        value = _log_posterior(design, labels, weights, moved)
        # Near the mode the gain is below what rounding leaves of the sum.
        short = value < reached + 1e-4 * size * promised - 1e-12 * (1 + abs(reached))
        if not short.any():
            break
        size = numpy.where(short, size / 2, size)
    return moved, value


def _log_posterior(design, labels, weights, coefficients) -> numpy.ndarray:
    """Up to a constant, [draws]."""
    logits = coefficients @ design.T
    likelihood = (weights * (labels * logits - numpy.logaddexp(0.0, logits))).sum(axis=1)
    return likelihood - (coefficients**2).sum(axis=1) / (2 * PRIOR_DEVIATION**2)


def _standardised(values: numpy.ndarray) -> numpy.ndarray:
    """Mean 0 and standard deviation 1; zeros where all are equal. The prior on the coefficient then has a meaning."""
    if not numpy.isfinite(values).all():
        raise ValueError("difficulty must be finite numbers")
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 0 else numpy.zeros(len(values))


def _weighted_rates(design: numpy.ndarray, coefficients: numpy.ndarray, weights: numpy.ndarray) -> numpy.ndarray:
    return (predicted_rates(design, coefficients) * weights).sum(axis=1) / weights.sum(axis=1)
