"""The win rate that would be measured if both systems' responses had equal length (Dubois et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.special import expit

from trl_ext.evaluation.statistics.intervals import rate_interval

# Keeps coefficients finite if every comparison is won, or if length alone separates wins from losses. It is a normal
# prior with a standard deviation of 10 in log-odds, which changes a rate over 100 prompts by less than 0.001.
PRIOR_DEVIATION = 10.0


@dataclass(frozen=True)
class LengthControlledWinRate:
    """A win rate at equal lengths.

    Attributes:
        rate, low, high: the length-controlled rate and its 95% interval over prompts; Wilson's if all comparisons have
            the same outcome.
        length_coefficient: log-odds per unit of tanh(length difference / its standard deviation); positive if the
            judge favours longer responses. None if all differences are zero.
        n: rows with a judgement.
    """

    rate: float
    low: float
    high: float
    length_coefficient: float | None
    n: int


def length_controlled_win_rate(
    credits: Sequence[float | None], lengths: Sequence[int], base_lengths: Sequence[int]
) -> LengthControlledWinRate | None:
    """Fit the effect of length on the judge, and predict the win rate at equal lengths.

    The model is that of AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475) without its term for the difficulty of a
    prompt: the log-odds that the candidate wins on prompt x are theta + phi tanh(d_x / s), with d_x the length of the
    candidate's response minus the base's, and s the sample standard deviation of the d_x. The rate is sigmoid(theta).
    AlpacaEval penalises the coefficients by their absolute values, with a cross-validated weight, and adds two made-up
    comparisons that guard against gaming. Here a wide normal prior replaces both.

    Args:
        credits: 1 for a win, 1/2 for a tie, 0 for a loss; None for a row without a judgement, which is left out.
        lengths, base_lengths: lengths of both responses, in characters.

    Returns:
        None if no row was judged, or if the length term hardly varies, so that its coefficient cannot be estimated. An
        example is a candidate whose response is longer on every prompt, by much more than its lengths vary.
    """
    table = numpy.array([credits, lengths, base_lengths], dtype=float)
    labels, own, other = table[:, ~numpy.isnan(table[0])]
    if not len(labels):
        return None
    term = length_term(own - other)
    # Upper bound on the length coefficient's Fisher information; if it is too small, the prior decides, not the data.
    if term is None or (term.any() and len(term) * term.var() / 4 < 0.1):
        return None
    design = numpy.stack([numpy.ones(len(labels)), term], axis=1)
    coefficients = fit_logistic(design, labels)
    rate = float(expit(coefficients[0]))
    # First-order influence of each comparison on the rate, times their number. Its variance over n is the variance of
    # the rate: the sandwich estimate, which does not assume that the model is true.
    fitted = expit(design @ coefficients)
    influence = (labels - fitted) * (design @ numpy.linalg.inv(_curvature(design, fitted))[0]) * rate * (1 - rate)
    # If all are won or lost, the fit is nearly certain; Wilson's interval is not.
    certain = labels.min() == labels.max()
    low, high = rate_interval(labels if certain else rate + len(labels) * (influence - influence.mean()))
    slope = float(coefficients[1]) if term.any() else None
    return LengthControlledWinRate(rate, low, high, slope, len(labels))


def length_term(differences: numpy.ndarray) -> numpy.ndarray | None:
    """tanh(d / sample standard deviation of d), [n]; zeros if all are zero, None if they are equal and non-zero."""
    if not differences.any():
        return numpy.zeros(len(differences))
    deviation = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    return numpy.tanh(differences / deviation) if deviation > 0 else None


def fit_logistic(design: numpy.ndarray, labels: numpy.ndarray) -> numpy.ndarray:
    """Coefficients, [terms], of the logistic regression with soft labels in [0, 1], [n], on features [n, terms].

    They are the mode of the posterior under independent normal priors, `PRIOR_DEVIATION` wide. The posterior is
    strictly log-concave, so the mode is unique.
    """
    from scipy.optimize import minimize  # takes a second to import

    def loss(coefficients: numpy.ndarray) -> tuple[float, numpy.ndarray]:
        logits, prior = design @ coefficients, coefficients / PRIOR_DEVIATION**2
        value = (numpy.logaddexp(0.0, logits) - labels * logits).sum() + coefficients @ prior / 2
        return value, (expit(logits) - labels) @ design + prior

    def curvature(coefficients: numpy.ndarray) -> numpy.ndarray:
        return _curvature(design, expit(design @ coefficients))

    start, options = numpy.zeros(design.shape[1]), {"gtol": 1e-9}
    return minimize(loss, start, jac=True, hess=curvature, method="trust-exact", options=options).x


def _curvature(design: numpy.ndarray, rates: numpy.ndarray) -> numpy.ndarray:
    """Negative Hessian of the log-posterior, [terms, terms]."""
    return (design.T * (rates * (1 - rates))) @ design + numpy.eye(design.shape[1]) / PRIOR_DEVIATION**2
