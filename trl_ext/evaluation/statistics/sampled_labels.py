"""Labels where they say most: prompts drawn by a judge's uncertainty, and a win rate that undoes the unequal chances.

Active inference (Zrnic and Candes 2024, arXiv 2403.03208) labels a prompt with a probability in proportion to the
judge's expected error on it, and weighs the label by the inverse. Here the prompts are drawn by priority sampling
(Duffield, Lund and Thorup 2007): their order is fixed in advance, and any number of the first is a sample with known
probabilities, so that a person can stop at any time. When to stop must not depend on the labels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy

from trl_ext.evaluation.statistics.human_labels import LEAST_TO_WEIGH, PredictionPowered, _checked
from trl_ext.evaluation.statistics.intervals import rate_sample, score_bounds
from trl_ext.evaluation.statistics.win_rate import Interval


def uncertainty(wins: Sequence[float], verdicts: Sequence[int]) -> list[float]:
    """The standard deviation of each prompt's label, if each verdict were a label of it: sqrt(p (1 - p)).

    p is (wins + 1/2) / (verdicts + 1), so that judges who agree are not taken to be right for certain.

    Args:
        wins: sum of the verdicts for the candidate in both orders and by all judges; a tie is 1/2.
        verdicts: their number.
    """
    shares = [(won + 0.5) / (count + 1) for won, count in zip(wins, verdicts, strict=True)]
    return [math.sqrt(share * (1 - share)) for share in shares]


def draw_order(sizes: Mapping[str, float], seed: int) -> dict[str, float]:
    """The priority size / u of each row, in falling order, with u uniform in (0, 1] by the seed and the row's id.

    Sizes must be positive: the estimate would lack a row that cannot be drawn.
    """
    priorities = {row: size / (1 - random.Random(f"{seed}:{row}").random()) for row, size in sizes.items()}
    return dict(sorted(priorities.items(), key=lambda item: -item[1]))


def draw_weights(sizes: Mapping[str, float], order: Mapping[str, float], drawn: Sequence[str]) -> dict[str, float]:
    """1 / probability of each drawn row, if these are the first of `order`: max(1, threshold / size).

    The threshold is the priority of the next row, 0 after the last. Rows that were passed over count as no rows of
    the population.
    """
    last = min((order[row] for row in drawn), default=math.inf)
    threshold = max((priority for priority in order.values() if priority < last), default=0.0)
    return {row: max(1.0, threshold / sizes[row]) for row in drawn}


def weighted_prediction_powered(
    labels: Sequence[float],
    judged: Sequence[float],
    unlabelled: Sequence[float],
    sampling_weights: Sequence[float],
    *,
    weight: float | None = None,
) -> PredictionPowered:
    """`prediction_powered` for labels that were drawn with unequal probabilities.

    The estimate is lambda mean(f) + sum(w (Y - lambda f)) / sum(w), with the verdicts f on all prompts, and w the
    inverse probability of each label: augmented inverse probability weighting, with weights that are normalized. With
    equal weights it is `prediction_powered` at the weight lambda N / (n + N). Its variance is the mean square of
    lambda (f - mean f) + labelled * w (Y - lambda f - mean) over the number of prompts, and the default of lambda
    minimizes it. The interval allows for errors that few labels do not show, as that of `prediction_powered` does.

    Args:
        labels, judged, unlabelled: see `prediction_powered`.
        sampling_weights: 1 / probability of each label, as `draw_weights` returns them.
        weight: lambda in [0, 1]; None for the best.

    Raises:
        ValueError: see `prediction_powered`; or a weight is missing or below 1.
    """
    labels, judged, unlabelled = _checked(labels, judged, unlabelled)
    w = numpy.asarray(sampling_weights, dtype=float)
    if w.shape != labels.shape or not (w >= 1).all() or not numpy.isfinite(w).all():
        raise ValueError("each label needs a sampling weight of 1 or more, which is 1 / its probability")
    if weight is not None and not 0 <= weight <= 1:
        raise ValueError(f"weight must lie between 0 and 1, got {weight}")
    n, everywhere = len(labels), numpy.concatenate([judged, unlabelled])
    # The inverse probabilities add up to the number of prompts on average only.
    w = w * len(everywhere) / w.sum()
    if weight is None:
        own, of_judge = w * (labels - _mean(labels, w)), w * (judged - _mean(judged, w)) - (judged - everywhere.mean())
        square = float((of_judge**2).sum() + ((unlabelled - everywhere.mean()) ** 2).sum())
        usable = n >= LEAST_TO_WEIGH and len(unlabelled) and square > 1e-12
        weight = float(numpy.clip((own * of_judge).sum() / square, 0, 1)) if usable else 0.0
    # A win more that the judge calls a loss, and a loss that it calls a win; each counts half.
    counts = numpy.append(numpy.ones(n), [0.5, 0.5]) * n / (n + 1)
    with_two = (numpy.append(labels, [1, 0]), numpy.append(judged, [0, 1]), numpy.append(w, [w.mean()] * 2))
    share = _mean(with_two[0], with_two[2] * counts)
    alone = _mean((with_two[0] - share) ** 2, with_two[2] * counts)

    def estimate(by: float) -> tuple[float, float, float, float]:
        """Rate and bounds at a lambda, and the number of random labels alone that would vary as much."""
        rate = float(by * everywhere.mean() + _mean(labels - by * judged, w))
        rate = min(max(rate, 0.0), 1.0)
        effective = min(alone / _variance(*with_two, counts, everywhere, by), len(everywhere))
        # The interval is Wilson's, at the number of zeros and ones whose mean would vary as much.
        return rate, *score_bounds(rate, effective * share * (1 - share) / alone, rate_sample(labels)[2]), effective

    rate, low, high, effective = estimate(weight)
    return PredictionPowered(
        rate=rate,
        low=low,
        high=high,
        standard_error=math.sqrt(_variance(labels, judged, w, numpy.ones(n), everywhere, weight)),
        weight=weight,
        n_labels=n,
        n_unlabelled=len(unlabelled),
        effective_n=effective,
        labels_only=Interval(*estimate(0.0)[:3], n),
        judge_rate=float(everywhere.mean()),
    )


def _mean(values: numpy.ndarray, weights: numpy.ndarray) -> float:
    return float((weights * values).sum() / weights.sum())


def _variance(labels, judged, weights, counts, everywhere, by: float) -> float:
    """The variance of the estimate; `counts` is how often each label counts."""
    residuals = labels - by * judged
    residuals = weights * (residuals - _mean(residuals, weights * counts))
    shifted = by * (judged - everywhere.mean())
    square = (counts * (residuals**2 + 2 * residuals * shifted)).sum() + by**2 * len(everywhere) * everywhere.var()
    return float(max(square, 0.0)) / len(everywhere) ** 2
