"""Quality of a reward model: its ranking of pairs, its calibration, and the gain from best-of-n."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from scipy.special import expit

from trl_ext.evaluation.statistics.intervals import mean_with_interval, wilson_interval

logger = logging.getLogger(__name__)

CALIBRATION_BINS = 10
FIGURES = ("proxy", "gold", "oracle", "regret")
ALL_TIED = "all %d pairs are tied: the scores do not tell chosen from rejected responses at all"


def reward_metrics(
    chosen_scores: Sequence[float], rejected_scores: Sequence[float], *, bins: int = CALIBRATION_BINS
) -> dict[str, Any]:
    """Ranking and calibration of a reward model on pairs, with P(chosen wins) = sigmoid(margin).

    Args:
        chosen_scores: B scores; numbers, or a tensor of shape [B].
        rejected_scores: B scores.
        bins: intervals of equal width into which confidences, in [1/2, 1], are sorted.

    Returns:
        `n`; `accuracy`, the share of positive margins, with its Wilson 95% interval `low` and `high`; `ties`, which
        count as wrong; `margin`, the mean of chosen minus rejected; `nll`, the mean of -log P(chosen wins), in nats;
        `brier`, the mean of (1 - P)^2; `ece`, the mean over pairs of |confidence - accuracy| of the pair's bin, where
        confidence is max(P, 1 - P) (Guo et al. 2017, arXiv 1706.04599; noisy below some 500 pairs); and
        `calibration`, each bin's `low`, `high`, `n`, mean `confidence` and `accuracy` (None if empty).

    Raises:
        ValueError: a score is not finite.
    """
    margins = _margins(chosen_scores, rejected_scores)
    n, correct, ties = len(margins), int((margins > 0).sum()), int((margins == 0).sum())
    low, high = wilson_interval(correct, n)
    if ties == n:
        logger.warning(ALL_TIED, n)
    # Ties count as wrong in the accuracy, but equal scores do not rank any pair the wrong way round.
    elif correct < n - ties - correct:
        logger.warning(
            "accuracy %.3f on %d pairs is below one half, worse than chance: are chosen and rejected the wrong way "
            "round, or is the model not the one that was trained?",
            correct / n,
            n,
        )
    calibration = _calibration(margins, bins)
    gaps = [row["n"] * abs(row["confidence"] - row["accuracy"]) for row in calibration if row["n"]]
    return {
        "n": n,
        "accuracy": correct / n,
        "low": low,
        "high": high,
        "ties": ties,
        "margin": float(margins.mean()),
        "nll": float(numpy.logaddexp(0.0, -margins).mean()),
        "brier": float((expit(-margins) ** 2).mean()),
        "ece": math.fsum(gaps) / n,
        "calibration": calibration,
    }


def true_order_metrics(
    chosen_scores: Sequence[float],
    rejected_scores: Sequence[float],
    true_chosen: Sequence[float],
    true_rejected: Sequence[float],
) -> dict[str, Any]:
    """Accuracy against a known quality of the responses instead of their labels, which may be wrong.

    Returns:
        `n` pairs whose true qualities differ, and `ties`, the pairs left out because they do not; `accuracy`, the
        share of the n pairs that the scores rank in the order of quality (equal scores count as wrong), with its
        Wilson 95% interval `low` and `high`; and `label_agreement`, the same share for the labels, which is the
        ceiling for a model that reproduces them. The rates are None if every pair is a tie.
    """
    margins, true_margins = _margins(chosen_scores, rejected_scores), _margins(true_chosen, true_rejected)
    told = true_margins != 0
    n, correct = int(told.sum()), int((margins * numpy.sign(true_margins) > 0).sum())
    low, high = wilson_interval(correct, n)
    return {
        "n": n,
        "ties": len(margins) - n,
        "accuracy": correct / n if n else None,
        "low": low,
        "high": high,
        "label_agreement": int((true_margins > 0).sum()) / n if n else None,
    }


def best_of_n(proxy: Sequence, gold: Sequence, n: int) -> dict[str, float]:
    """The expected quality of the best of n samples by a proxy score, over every choice of n out of the N samples.

    The average is computed in closed form, the sum over i of C(i-1, n-1) / C(N, n) times the quality of the sample of
    rank i by proxy, and is unbiased for n fresh samples (Nakano et al. 2021, arXiv 2112.09332). Of equal proxy scores
    one is picked at random.

    Args:
        proxy: scores of the N samples of one prompt, [N], or of P prompts, [P, N].
        gold: known qualities, of the same shape.
        n: number of samples from which the best is picked, between 1 and N.

    Returns:
        Means over prompts: `gold` and `proxy` of the pick; `oracle`, the gold of the pick by gold itself; and
        `regret`, oracle minus gold.

    Raises:
        ValueError: n is out of range.
    """
    proxies, golds = (_rows(values) for values in (proxy, gold))
    if not 1 <= n <= proxies.shape[1]:
        raise ValueError(f"n must lie between 1 and the number of samples, {proxies.shape[1]}, got {n}")
    picks = {"gold": (proxies, golds), "proxy": (proxies, proxies), "oracle": (golds, golds)}
    figures = {
        name: math.fsum(_expected_best(by, of, n) for by, of in zip(*pair, strict=True)) / len(proxies)
        for name, pair in picks.items()
    }
    return {**figures, "regret": figures["oracle"] - figures["gold"]}


def best_of_n_curve(samples: Sequence[Sequence[Mapping[str, Any]]], ns: Sequence[int]) -> dict[str, Any]:
    """The expected reward and quality of the best of n for each n, unbiased, with 95% intervals over prompts.

    A prompt's figure is the mean over all choices of n of its responses that have a reward (`best_of_n`). Every n uses
    the same prompts: those with at least as many rewards as the largest n.

    Args:
        samples: for each prompt its responses with `reward` (None for none) and, if known, `score`, the gold.
        ns: numbers of responses, each at least 1.

    Returns:
        JSON-ready: `n_prompts`; `left_out`, the number of prompts with too few rewards; `curve`, one row per n in
        ascending order with `n`, `kl_bound` in nats, `proxy`, and, if gold is known, `gold`, `oracle`, `regret` and
        `gain` (gold minus that of the first n), each with `mean`, `low`, `high`; and `peak`, if gold is known: the `n`
        with the highest gold, and `change`, gold at the largest n minus gold at the peak. The peak is chosen on the
        same prompts, so an interval of the change below 0 slightly overstates the evidence.

    Raises:
        ValueError: no prompt has enough rewards.
    """
    from trl_ext.rollouts.best_of_n import kl_bound  # loads torch

    ns = sorted(set(ns))
    scored = [[row for row in group if row["reward"] is not None] for group in samples]
    kept = [group for group in scored if len(group) >= ns[-1]]
    if not kept:
        raise ValueError(f"no prompt has {ns[-1]} responses with a reward: sample more, or ask for a smaller n")
    has_gold = all(row.get("score") is not None for group in kept for row in group)
    names = FIGURES if has_gold else FIGURES[:1]
    keys = ("reward", "score" if has_gold else "reward")
    proxies, golds = ([[row[key] for row in group] for group in kept] for key in keys)
    values = {}
    for n in ns:
        found = [best_of_n(*pair, n) for pair in zip(proxies, golds, strict=True)]
        values[n] = {name: numpy.array([one[name] for one in found]) for name in names}
    curve = [
        {"n": n, "kl_bound": kl_bound(n), **{name: mean_with_interval(values[n][name]) for name in names}} for n in ns
    ]
    peak = None
    if has_gold:
        for row in curve:
            row["gain"] = mean_with_interval(values[row["n"]]["gold"] - values[ns[0]]["gold"], gains=True)
        best = max(ns, key=lambda n: values[n]["gold"].mean())
        change = mean_with_interval(values[ns[-1]]["gold"] - values[best]["gold"], gains=True)
        peak = {"n": best, "change": change}
    return {"n_prompts": len(kept), "left_out": len(samples) - len(kept), "curve": curve, "peak": peak}


def _margins(chosen: Sequence[float], rejected: Sequence[float]) -> numpy.ndarray:
    own, other = (numpy.array([float(score) for score in scores]) for scores in (chosen, rejected))
    for index in numpy.flatnonzero(~numpy.isfinite(own - other)):
        raise ValueError(f"the scores of pair {index} are {own[index]} and {other[index]}")
    return own - other


def _calibration(margins: numpy.ndarray, bins: int) -> list[dict[str, Any]]:
    confidences, correct = expit(numpy.abs(margins)), margins > 0
    # The last bin includes its upper end.
    places = numpy.minimum((confidences - 0.5) * 2 * bins, bins - 1).astype(int)
    rows = []
    for index in range(bins):
        own = places == index
        means = [float(values[own].mean()) if own.any() else None for values in (confidences, correct)]
        bounds = {"low": 0.5 + 0.5 * index / bins, "high": 0.5 + 0.5 * (index + 1) / bins}
        rows.append({**bounds, "n": int(own.sum()), "confidence": means[0], "accuracy": means[1]})
    return rows


def _rows(values: Sequence) -> numpy.ndarray:
    """The samples of one or several prompts, [P, N]; a tensor may be on a GPU, in bfloat16 or with gradient."""
    return numpy.atleast_2d(numpy.asarray(values.tolist() if hasattr(values, "tolist") else values, dtype=float))


def _expected_best(proxy: numpy.ndarray, gold: numpy.ndarray, n: int) -> float:
    """Mean gold of the sample with the highest proxy, over all subsets of n."""
    _, group, counts = numpy.unique(proxy, return_inverse=True, return_counts=True)
    ends = [0, *counts.cumsum().tolist()]
    # The ratio of integers, which may be too large for doubles, is exact.
    subsets = [math.comb(end, n) for end in ends]
    chances = [(after - before) / subsets[-1] for before, after in zip(subsets, subsets[1:], strict=False)]
    return float((numpy.array(chances) / counts)[group] @ gold)
