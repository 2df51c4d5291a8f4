"""The win rate that would be measured if both systems' responses were equally long (Dubois et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from scipy.special import expit

from trl_ext.evaluation.intervals import rate_interval

# Keeps a coefficient finite where every comparison is won, or length alone tells wins from losses: as much as one
# normal prior of standard deviation 10 on the scale of log-odds, which moves a rate over 100 prompts by under 0.001.
PRIOR_DEVIATION = 10.0


@dataclass(frozen=True)
class LengthControlledWinRate:
    """A win rate with the effect of length taken out, and what it was taken out from.

    Attributes:
        rate, low, high: the length-controlled rate and its 95% interval over prompts; Wilson's where all
            comparisons have one outcome.
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
    coefficients = fit_logistic(design, labels)
    rate = float(expit(equal_lengths @ coefficients).mean())
    # Where all are won or lost the fit is all but certain; Wilson's interval is not.
    certain = labels.min() == labels.max()
    low, high = rate_interval(labels if certain else rate + _influence(design, equal_lengths, labels, coefficients))
    return LengthControlledWinRate(
        rate=rate,
        low=low,
        high=high,
        raw=float(labels.mean()),
        length_coefficient=float(coefficients[1]) if term.any() else None,
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


def fit_logistic(design: numpy.ndarray, labels: numpy.ndarray) -> numpy.ndarray:
    """The logistic regression with soft labels in [0, 1], [n], on features [n, terms]: its coefficients, [terms].

    They are the mode of the posterior under independent normal priors, `PRIOR_DEVIATION` wide. The posterior is
    strictly log-concave, so the mode is unique.
    """
    from scipy.optimize import minimize

    def loss(coefficients: numpy.ndarray) -> tuple[float, numpy.ndarray]:
        logits = design @ coefficients
        value = (numpy.logaddexp(0.0, logits) - labels * logits).sum()
        gradient = (expit(logits) - labels) @ design
        prior = coefficients / PRIOR_DEVIATION**2
        return value + coefficients @ prior / 2, gradient + prior

    found = minimize(
        loss,
        numpy.zeros(design.shape[1]),
        jac=True,
        hess=lambda coefficients: _curvature(design, expit(design @ coefficients)),
        method="trust-exact",
        options={"gtol": 1e-9},
    )
    return found.x


def _curvature(design: numpy.ndarray, rates: numpy.ndarray) -> numpy.ndarray:
    """Of the log-posterior, with its sign turned, [terms, terms]."""
    return (design.T * (rates * (1 - rates))) @ design + numpy.eye(design.shape[1]) / PRIOR_DEVIATION**2


def _influence(
    design: numpy.ndarray, equal_lengths: numpy.ndarray, labels: numpy.ndarray, coefficients: numpy.ndarray
) -> numpy.ndarray:
    """What each comparison moves the mean rate at equal lengths by, times their number, to first order, [n].

    Their variance over n is that of the rate: the sandwich estimate, which does not take the model for true.
    """
    rates, equal_rates = expit(design @ coefficients), expit(equal_lengths @ coefficients)
    slope = (equal_rates * (1 - equal_rates)) @ equal_lengths
    through_fit = (labels - rates) * (design @ numpy.linalg.solve(_curvature(design, rates), slope))
    return equal_rates - equal_rates.mean() + through_fit - through_fit.mean()


def _standardised(values: numpy.ndarray) -> numpy.ndarray:
    """Mean 0 and standard deviation 1; zeros where all are equal. The prior on the coefficient then has a meaning."""
    if not numpy.isfinite(values).all():
        raise ValueError("difficulty must be finite numbers")
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 0 else numpy.zeros(len(values))
