"""Win rates from many verdicts of a judge and a few human labels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from trl_ext.evaluation.statistics.intervals import rate_interval, rate_sample, score_bounds
from trl_ext.evaluation.statistics.win_rate import OUTCOME_VALUES, Interval, PairOutcome

# A weight is fitted to the labels; with two, the judge explains every label.
LEAST_TO_WEIGH = 3


@dataclass(frozen=True)
class PredictionPowered:
    """A win rate from human labels and a judge's verdicts on the same prompts, and on further ones.

    Attributes:
        rate: the estimate, in [0, 1].
        low, high: its 95% interval.
        standard_error: of the estimate, with population variances, as in the authors' package.
        weight: lambda, what a verdict counts; at 0 the estimate is the mean of the labels.
        n_labels: labelled prompts.
        n_unlabelled: prompts with the judge's verdict alone.
        effective_n: number of labels that alone would have an interval as narrow; at most the number of prompts.
        labels_only: the mean of the labels, with its interval.
        judge_rate: mean of the judge's verdicts on all prompts, which has the judge's bias.
    """

    rate: float
    low: float
    high: float
    standard_error: float
    weight: float
    n_labels: int
    n_unlabelled: int
    effective_n: float
    labels_only: Interval
    judge_rate: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and dictionaries, ready for JSON."""
        return dataclasses.asdict(self)


def judge_values(outcomes: Sequence[PairOutcome]) -> list[float]:
    """For each prompt the mean of the verdicts in both orders; ties are 1/2, empty responses 0.

    A prompt without a verdict has 1/2. The estimate remains valid, as the rule is the same with and without a label.
    """

    def value(outcome: PairOutcome) -> float:
        if outcome.error is not None:
            return 0.5
        return 0.0 if outcome.empty else (OUTCOME_VALUES[outcome.first] + OUTCOME_VALUES[outcome.second]) / 2

    return [value(outcome) for outcome in outcomes]


def prediction_powered(
    labels: Sequence[float], judged: Sequence[float], unlabelled: Sequence[float]
) -> PredictionPowered:
    """Win rate by prediction-powered inference with power tuning, PPI++ (2311.01453; PPI: 2301.09633).

    The estimate is lambda * mean(f~) + mean(Y - lambda * f), and its variance lambda^2 Var(f~)/N +
    Var(Y - lambda * f)/n, with labels Y and verdicts f on n prompts and verdicts f~ on N further ones. lambda has the
    least variance: Cov(Y, f) / ((1 + n/N) Var(f)), limited to [0, 1]. It is 0, so that the labels count alone, if the
    judge is constant or there are fewer than three labels. The labelled prompts must be a random sample of all, and
    the judge must be asked in the same way about each.

    The interval is `rate_interval` of the labels at a sample size multiplied by what the judge saves. Few labels may
    not show the errors of a good judge. So what it saves is computed with half a win more that it calls a loss, and
    half a loss more that it calls a win.

    Args:
        labels: Y in [0, 1]: 1 for a win of the candidate, 1/2 for a tie, 0 for a loss.
        judged: f in [0, 1], in the same order; see `judge_values`.
        unlabelled: f~ in [0, 1].
    """
    labels, judged, unlabelled = (numpy.asarray(values, float) for values in (labels, judged, unlabelled))
    n, further = len(labels), len(unlabelled)
    verdicts, weight = numpy.concatenate([judged, unlabelled]), 0.0
    if n >= LEAST_TO_WEIGH and further and (variance := float(verdicts.var(ddof=1))) > 1e-12:
        covariance = float(numpy.cov(labels, judged, ddof=0)[0, 1])
        weight = min(max(covariance / ((1 + n / further) * variance), 0.0), 1.0)
    mean, size, quantile = rate_sample(labels)
    rate, residuals, of_judge = mean, labels, 0.0
    if weight:
        residuals = labels - weight * judged
        rate = min(max(float(weight * unlabelled.mean() + residuals.mean()), 0.0), 1.0)
        of_judge = weight**2 * float(unlabelled.var()) / further
    # Labels on every prompt would be the best.
    saved = min(_variance(labels, 1, 0) / (_variance(residuals, 1, -weight) + n * of_judge), (n + further) / n)
    low, high = score_bounds(rate, size * saved, quantile)
    return PredictionPowered(
        rate=rate,
        low=low,
        high=high,
        standard_error=math.sqrt(float(residuals.var()) / n + of_judge),
        weight=weight,
        n_labels=n,
        n_unlabelled=further,
        effective_n=n * saved,
        labels_only=Interval(mean, *rate_interval(labels), n),
        judge_rate=float(verdicts.mean()),
    )


def _variance(values: numpy.ndarray, *two: float) -> float:
    """The population variance of values and of two more that count half."""
    values, counts = numpy.append(values, two), numpy.append(numpy.ones(len(values)), [0.5, 0.5])
    return float(numpy.cov(values, aweights=counts, ddof=0))
