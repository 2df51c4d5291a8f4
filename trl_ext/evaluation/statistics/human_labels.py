"""Win rates from many verdicts of a judge and a few human labels, or from the judge's known error rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from trl_ext.evaluation.statistics.intervals import NORMAL_95, rate_interval, rate_sample, score_bounds
from trl_ext.evaluation.statistics.win_rate import Interval, PairOutcome

OUTCOME_VALUES = {"candidate": 1.0, "tie": 0.5, "base": 0.0}
LEAST_YOUDEN = 0.2
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


@dataclass(frozen=True)
class CorrectedRate:
    """A judge's rate corrected for its error rates.

    Attributes:
        rate, low, high: the estimate and its 95% interval, in [0, 1].
        standard_error: by the delta method.
        truncated: True if the estimate was outside [0, 1]; then the error rates do not fit these prompts.
    """

    rate: float
    low: float
    high: float
    standard_error: float
    truncated: bool


def judge_values(outcomes: Sequence[PairOutcome]) -> list[float]:
    """For each prompt the mean of the verdicts in both orders; ties are 1/2, empty responses 0.

    A prompt without a verdict has 1/2. The estimate remains valid, as the rule is the same with and without a label.
    """
    return [_judge_value(outcome) for outcome in outcomes]


def tuned_weight(labels: Sequence[float], judged: Sequence[float], unlabelled: Sequence[float]) -> float:
    """The weight with the least variance: Cov(Y, f) / ((1 + n/N) Var(f)), limited to [0, 1].

    It is 0, so that the labels count alone, if the judge is constant or there are fewer than three labels.
    """
    labels, judged, unlabelled = _checked(labels, judged, unlabelled)
    if len(labels) < LEAST_TO_WEIGH or not len(unlabelled):
        return 0.0
    variance = float(numpy.concatenate([judged, unlabelled]).var(ddof=1))
    return float(_weights(float(numpy.cov(labels, judged, ddof=0)[0, 1]), variance, len(labels) / len(unlabelled)))


def prediction_powered(
    labels: Sequence[float], judged: Sequence[float], unlabelled: Sequence[float], *, weight: float | None = None
) -> PredictionPowered:
    """Win rate by prediction-powered inference with power tuning, PPI++ (2311.01453; PPI: 2301.09633).

    The estimate is weight * mean(f~) + mean(Y - weight * f), and its variance weight^2 Var(f~)/N +
    Var(Y - weight * f)/n, with labels Y and verdicts f on n prompts and verdicts f~ on N further ones. The labelled
    prompts must be a random sample of all, and the judge must be asked in the same way about each.

    The interval is `rate_interval` of the labels at a sample size multiplied by what the judge saves. Few labels may
    not show the errors of a good judge. So what it saves is computed with half a win more that it calls a loss, and
    half a loss more that it calls a win. `python -m benchmarks.judge_bias` measures the coverage.

    Args:
        labels: Y in [0, 1]: 1 for a win of the candidate, 1/2 for a tie, 0 for a loss.
        judged: f in [0, 1], in the same order; see `judge_values`.
        unlabelled: f~ in [0, 1].
        weight: in [0, 1]; None for `tuned_weight`. 1 is PPI, which can be less precise than the labels alone.

    Raises:
        ValueError: there are no labels, a value is outside [0, 1], or the labels and their verdicts differ in number.
    """
    weight = tuned_weight(labels, judged, unlabelled) if weight is None else weight
    labels, judged, unlabelled = _checked(labels, judged, unlabelled)
    if not 0 <= weight <= 1 or (weight and not len(unlabelled)):
        raise ValueError(f"weight must lie between 0 and 1, and be 0 without further verdicts, got {weight}")
    n, further = len(labels), len(unlabelled)
    mean, size, quantile = rate_sample(labels)
    rate, residuals, of_judge = mean, labels, 0.0
    if weight:
        residuals = labels - weight * judged
        rate = min(max(float(weight * unlabelled.mean() + residuals.mean()), 0.0), 1.0)
        of_judge = weight**2 * float(unlabelled.var()) / further
    alone = _variance_and_two(labels, 1, 0)
    variance = _variance_and_two(residuals, 1, -weight) + n * of_judge
    # Labels on every prompt would be the best.
    saved = min(alone / variance, (n + further) / n)
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
        judge_rate=float(numpy.concatenate([judged, unlabelled]).mean()),
    )


def labels_needed(labels: Sequence[float], judged: Sequence[float], unlabelled: Sequence[float], width: float) -> int:
    """About how many further labels narrow the 95% interval to `width`, if the next are like these.

    The labels are taken from the unlabelled prompts. A number larger than these needs further prompts as well.

    Raises:
        ValueError: see `prediction_powered`; or the width is not positive, or all labels are equal.
    """
    if not width > 0:
        raise ValueError(f"width must be positive, got {width}")
    labels, judged, unlabelled = _checked(labels, judged, unlabelled)
    if labels.min() == labels.max():
        raise ValueError(
            f"all {len(labels)} labels are equal, which does not show how much they vary: label more first"
        )
    n, total, target = len(labels), len(labels) + len(unlabelled), (width / (2 * NORMAL_95)) ** 2
    own, covariance = float(labels.var()), float(numpy.cov(labels, judged, ddof=0)[0, 1])
    of_judge = float(numpy.concatenate([judged, unlabelled]).var())
    counts = numpy.arange(n, total)
    weights = _weights(covariance, of_judge, counts / (total - counts))
    residuals = own - 2 * weights * covariance + weights**2 * of_judge
    enough = numpy.flatnonzero(residuals / counts + weights**2 * of_judge / (total - counts) <= target)
    return int(counts[enough[0]]) - n if len(enough) else max(math.ceil(own / target), total) - n


def corrected_rate(
    rate: float,
    n: int,
    sensitivity: float,
    specificity: float,
    *,
    n_wins: int | None = None,
    n_losses: int | None = None,
) -> CorrectedRate:
    """A judge's win rate corrected for its error rates: Rogan and Gladen (1978); for judges 2511.21140.

    The estimate is (rate + specificity - 1) / J with J = sensitivity + specificity - 1. The error rates must be
    measured on the same two systems, as they change with the length and style of responses. The interval is that of
    Lang and Reiczigel (2014, "Confidence limits for prevalence of disease adjusted for estimated sensitivity and
    specificity"), which has a width at rates of 0 and 1 too.

    Args:
        rate: share of the `n` prompts that the judge calls a win.
        sensitivity: P(the judge calls it a win | it is one), on `n_wins` labelled wins.
        specificity: P(the judge calls it a loss | it is one), on `n_losses` labelled losses.
        n_wins, n_losses: None if the error rate is known exactly.

    Raises:
        ValueError: a rate is outside [0, 1], a count is not positive, or J is below 0.2.
    """
    for name, value in (("rate", rate), ("sensitivity", sensitivity), ("specificity", specificity)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    for name, count in (("n", n), ("n_wins", n_wins), ("n_losses", n_losses)):
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    youden = sensitivity + specificity - 1
    if youden < LEAST_YOUDEN:
        raise ValueError(
            f"sensitivity + specificity - 1 is {youden:.3f}, below {LEAST_YOUDEN}: this judge says too little"
        )
    rates = ((rate, n), (sensitivity, n_wins), (specificity, n_losses))
    found, error, _ = _rogan_gladen(*rates)
    # For the interval alone, half of z^2 successes and failures are added to the rate, and one to the error rates.
    added = (NORMAL_95**2 / 2, 1.0, 1.0)
    rates = [((p * n + k) / (n + 2 * k), n + 2 * k) if n else (p, n) for (p, n), k in zip(rates, added, strict=True)]
    centre, half_width, skewness = _rogan_gladen(*rates)
    kept, centre = (min(max(x, 0.0), 1.0) for x in (found, centre + 2 * NORMAL_95**2 * skewness))
    low, high = max(centre - NORMAL_95 * half_width, 0.0), min(centre + NORMAL_95 * half_width, 1.0)
    return CorrectedRate(kept, min(low, kept), max(high, kept), error, truncated=kept != found)


def _rogan_gladen(*rates: tuple[float, float | None]) -> tuple[float, float, float]:
    """The corrected rate, its standard error by the delta method, and what shifts its interval's centre."""
    (rate, _), (sensitivity, _), (specificity, _) = rates
    of_rate, of_wins, of_losses = (p * (1 - p) / n if n else 0.0 for p, n in rates)
    youden = sensitivity + specificity - 1
    found = (rate + specificity - 1) / youden
    error = math.sqrt(of_rate + found**2 * of_wins + (1 - found) ** 2 * of_losses) / youden
    return found, error, found * of_wins - (1 - found) * of_losses


def _judge_value(outcome: PairOutcome) -> float:
    if outcome.error is not None:
        return 0.5
    return 0.0 if outcome.empty else (OUTCOME_VALUES[outcome.first] + OUTCOME_VALUES[outcome.second]) / 2


def _checked(*columns: Sequence[float]) -> list[numpy.ndarray]:
    """Labels, their verdicts and the further verdicts as arrays."""
    labels, judged, unlabelled = columns = [numpy.asarray(values, dtype=float) for values in columns]
    if not len(labels) or len(labels) != len(judged):
        raise ValueError(f"each label needs the judge's verdict, got {len(labels)} labels and {len(judged)} verdicts")
    if not all(((values >= 0) & (values <= 1)).all() for values in columns):
        raise ValueError("labels and verdicts must lie between 0 and 1")
    return columns


def _variance_and_two(values: numpy.ndarray, *two: float) -> float:
    """The population variance of values and of two more that count half."""
    values, counts = numpy.append(values, two), numpy.append(numpy.ones(len(values)), [0.5, 0.5])
    return float(numpy.cov(values, aweights=counts, ddof=0))


def _weights(covariance: float, variance: float, ratio: Any) -> Any:
    """`tuned_weight` for ratios of labelled to further prompts."""
    return numpy.clip(covariance / ((1 + ratio) * variance), 0.0, 1.0) if variance > 1e-12 else 0.0 * ratio
