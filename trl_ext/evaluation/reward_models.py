"""How good a reward model is: its ranking of pairs, its calibration, and what best-of-n gains by it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from trl_ext.evaluation.intervals import wilson_interval
from trl_ext.evaluation.judge import last_user_text

logger = logging.getLogger(__name__)

CALIBRATION_BINS = 10
ALL_TIED = "all %d pairs are tied: the scores do not tell chosen from rejected responses at all"


def reward_metrics(
    chosen_scores: Sequence[float], rejected_scores: Sequence[float], *, bins: int = CALIBRATION_BINS
) -> dict[str, Any]:
    """Ranking and calibration of a reward model on pairs, of which the model says P(chosen wins) = sigmoid(margin).

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
        ValueError: no pairs, lists of different length, a score that is no number, or fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    margins = _margins(chosen_scores, rejected_scores)
    n, correct = len(margins), sum(margin > 0 for margin in margins)
    low, high = wilson_interval(correct, n)
    ties = margins.count(0.0)
    if ties == n:
        logger.warning(ALL_TIED, n)
    # Ties count as wrong in the accuracy, but of scores that rank nothing none is the wrong way round.
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
        "margin": _mean(margins),
        "nll": _mean([_softplus(-margin) for margin in margins]),
        "brier": _mean([_sigmoid(-margin) ** 2 for margin in margins]),
        "ece": sum(gaps) / n,
        "calibration": calibration,
    }


def true_order_metrics(
    chosen_scores: Sequence[float],
    rejected_scores: Sequence[float],
    true_chosen: Sequence[float],
    true_rejected: Sequence[float],
) -> dict[str, Any]:
    """Accuracy against a known quality of the responses, rather than against labels, which may be wrong.

    Returns:
        `n` pairs whose true qualities differ, and `ties`, those left out because they do not; `accuracy`, the share of
        the n that the scores rank as their quality does (equal scores count as wrong), with its Wilson 95% interval
        `low` and `high`; and `label_agreement`, the share that the labels rank so, the ceiling for a model that
        reproduces the labels. The rates are None where every pair is a tie.

    Raises:
        ValueError: as for `reward_metrics`.
    """
    margins, true_margins = _margins(chosen_scores, rejected_scores), _margins(true_chosen, true_rejected)
    if len(margins) != len(true_margins):
        raise ValueError(f"{len(margins)} pairs of scores for {len(true_margins)} pairs of true qualities")
    told = [(margin, true) for margin, true in zip(margins, true_margins, strict=True) if true != 0]
    n, correct = len(told), sum(margin * true > 0 for margin, true in told)
    low, high = wilson_interval(correct, n)
    return {
        "n": n,
        "ties": len(margins) - n,
        "accuracy": correct / n if n else None,
        "low": low,
        "high": high,
        "label_agreement": sum(true > 0 for _, true in told) / n if n else None,
    }


def best_of_n(proxy: Sequence, gold: Sequence, n: int) -> dict[str, float]:
    """What the best of n samples by a proxy score is worth, averaged over every choice of n out of the N samples.

    The average is computed in closed form, the sum over i of C(i-1, n-1) / C(N, n) times the quality of the sample of
    rank i by proxy, and is unbiased for n fresh samples (Nakano et al. 2021, arXiv 2112.09332). Of equal proxy scores
    one is picked at random.

    Args:
        proxy: scores of the N samples of one prompt, or a list of such lists, one for each prompt.
        gold: known qualities, of the same shape.
        n: how many samples the best is picked from, between 1 and N.

    Returns:
        Means over prompts: `gold` and `proxy` of the pick, `oracle`, the gold of the pick by gold itself, and
        `regret`, oracle minus gold.

    Raises:
        ValueError: shapes that differ, no samples, or an n outside its range.
    """
    proxies, golds = _rows(proxy), _rows(gold)
    if [len(row) for row in proxies] != [len(row) for row in golds] or not proxies:
        raise ValueError("proxy and gold must hold the same number of samples for each of one or more prompts")
    for row in proxies:
        if not 1 <= n <= len(row):
            raise ValueError(f"n must lie between 1 and the number of samples, {len(row)}, got {n}")
    if not all(math.isfinite(value) for row in (*proxies, *golds) for value in row):
        raise ValueError("proxy and gold must be finite: no order exists between other numbers")
    figures = {
        "gold": _mean([_expected_best(p, g, n) for p, g in zip(proxies, golds, strict=True)]),
        "proxy": _mean([_expected_best(p, p, n) for p in proxies]),
        "oracle": _mean([_expected_best(g, g, n) for g in golds]),
    }
    return {**figures, "regret": figures["oracle"] - figures["gold"]}


def reward_mistakes(
    rows: Iterable[Mapping[str, Any]],
    chosen_scores: Sequence[float],
    rejected_scores: Sequence[float],
    k: int | None = None,
) -> list[dict[str, Any]]:
    """The pairs that a reward model ranks against their label or does not rank, the most clearly wrong first.

    Args:
        rows: preference rows, with `row_id`, `prompt`, `chosen` and `rejected` as messages or text.
        chosen_scores, rejected_scores: one score for each row.
        k: the most to return; None for all.

    Returns:
        JSON-ready rows: `row_id`, `prompt_text`, `chosen_text`, `rejected_text`, both scores and their `margin`, <= 0.

    Raises:
        ValueError: as for `reward_metrics`, or a number of rows that is not that of the scores.
    """
    rows, margins = list(rows), _margins(chosen_scores, rejected_scores)
    if len(rows) != len(margins):
        raise ValueError(f"{len(rows)} rows for the scores of {len(margins)} pairs")
    wrong = sorted((i for i, margin in enumerate(margins) if margin <= 0), key=lambda i: margins[i])
    return [
        {
            "row_id": rows[i]["row_id"],
            "prompt_text": last_user_text(rows[i]["prompt"]),
            "chosen_text": _response_text(rows[i]["chosen"]),
            "rejected_text": _response_text(rows[i]["rejected"]),
            "chosen_score": float(chosen_scores[i]),
            "rejected_score": float(rejected_scores[i]),
            "margin": margins[i],
        }
        for i in wrong[:k]
    ]


def _margins(chosen: Sequence[float], rejected: Sequence[float]) -> list[float]:
    if len(chosen) != len(rejected):
        raise ValueError(f"{len(chosen)} scores of chosen responses for {len(rejected)} of rejected ones")
    if not len(chosen):
        raise ValueError("there are no pairs to measure")
    margins = [float(c) - float(r) for c, r in zip(chosen, rejected, strict=True)]
    for index, margin in enumerate(margins):
        if not math.isfinite(margin):
            raise ValueError(f"the scores of pair {index} are {float(chosen[index])} and {float(rejected[index])}")
    return margins


def _calibration(margins: list[float], bins: int) -> list[dict[str, Any]]:
    members: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for margin in margins:
        confidence = _sigmoid(abs(margin))
        # The last bin is closed above.
        members[min(int((confidence - 0.5) * 2 * bins), bins - 1)].append((confidence, margin > 0))
    return [
        {
            "low": 0.5 + 0.5 * index / bins,
            "high": 0.5 + 0.5 * (index + 1) / bins,
            "n": len(pairs),
            "confidence": _mean([confidence for confidence, _ in pairs]) if pairs else None,
            "accuracy": _mean([float(correct) for _, correct in pairs]) if pairs else None,
        }
        for index, pairs in enumerate(members)
    ]


def _expected_best(proxy: list[float], gold: list[float], n: int) -> float:
    """Mean gold of the sample with the highest proxy, over all subsets of n."""
    expected, rank, total = 0.0, 0, math.comb(len(proxy), n)
    for _, group in groupby(sorted(zip(proxy, gold, strict=True), key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        tied = [value for _, value in group]
        subsets = math.comb(rank + len(tied), n) - math.comb(rank, n)
        # Of whole numbers, which may be too large for doubles, the ratio is exact.
        expected += subsets / total * _mean(tied)
        rank += len(tied)
    return expected


def _rows(values: Sequence) -> list[list[float]]:
    """One prompt's samples, or several prompts', as lists of lists."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    rows = [values] if values and isinstance(values[0], (int, float)) else values
    return [[float(value) for value in row] for row in rows]


def _response_text(response: Sequence[Mapping[str, Any]] | str) -> str:
    return response if isinstance(response, str) else response[-1]["content"]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
