"""How far a judge can be believed: its verdicts on pairs whose better response people have named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy

from trl_ext.evaluation.judging.pairs import EMPTY, IDENTICAL, VERDICT_VALUES, CallableJudge, judge_pairs
from trl_ext.evaluation.judging.protocol import PairwiseJudge, Usage
from trl_ext.evaluation.statistics.intervals import mean_with_interval, rate_difference_interval, rate_interval
from trl_ext.evaluation.submissions.labelled_pairs import LabelledPair, RecordedVerdict

# A pair on which a person or a judge names none counts as half.
VALUES = {**VERDICT_VALUES, None: 0.5}
SWAPPED = {"A": "B", "B": "A", "tie": "tie"}
ORDERS = "AB"
CALIBRATION_BINS = 10
CALIBRATION_DRAWS = 1000


def ask_judge(
    judge: PairwiseJudge | Callable[..., Any], pairs: Sequence[LabelledPair], *, name: str = "judge", **judging: Any
) -> tuple[list[RecordedVerdict], Usage]:
    """Ask a judge about every pair in both orders; `judging` are keyword arguments of `judge_pairs`.

    The confidence of a judge with a method `probability(prompt, response_a, response_b)`, such as `RewardModelJudge`,
    follows from it.

    Raises:
        TooManyErrors, JudgeUnavailable, CacheError: as `judge_pairs` does.
    """
    judge = judge if hasattr(judge, "judge") else CallableJudge(judge)
    rows = [{"row_id": pair.row_id, "prompt": pair.messages} for pair in pairs]
    responses = [pair.response_a for pair in pairs], [pair.response_b for pair in pairs]
    result, found = judge_pairs(judge, rows, *responses, **judging), []
    # Without a question, equal responses tie, and an empty first one loses.
    known = {None: None, IDENTICAL: "tie", EMPTY: "B"}
    for pair, row in zip(pairs, result.verdicts, strict=True):
        for shown, answer in zip(ORDERS, (row["candidate_first"], row["base_first"]), strict=True):
            verdict, confidence = known[row["reason"]], None
            if answer is not None:
                verdict = answer["verdict"] if shown == "A" else SWAPPED[answer["verdict"]]
                confidence = answer.get("confidence")
                if hasattr(judge, "probability"):
                    first = judge.probability(pair.messages, pair.response_a, pair.response_b)
                    confidence = max(first, 1 - first)
            fields = {"row_id": pair.row_id, "judge": name, "shown_first": shown}
            found.append(RecordedVerdict(**fields, verdict=verdict, confidence=confidence))
    return found, result.usage


def examine_judge(pairs: Sequence[LabelledPair], verdicts: Iterable[RecordedVerdict]) -> dict[str, Any]:
    """Compare a judge's verdicts with human labels.

    A verdict agrees with a label by 1 if they name the same response, by 0 if they name opposite ones, and by 1/2 if
    one of them is a tie; two ties agree. An answer without a verdict counts as a tie. So a coin agrees by 1/2. All
    intervals have 95%, and their unit is the pair, however often it was judged.

    Args:
        pairs: those without a verdict are left out.
        verdicts: of one judge.

    Returns:
        `all`, and `kinds` by kind if there are several. Each has

        - `n`, `without_verdict` (answers), and the agreements `both` (mean of the orders) and `agreed` (where both
          orders name the same response), as `rate`, `low`, `high` and `n`;
        - `order_agreement`: share of the pairs with the same verdict in both orders;
        - `position_bias`: P(the response shown first wins) - 1/2, as `mean`, `low` and `high`;
        - `self_agreement`: how often two answers to the same question are equal;
        - `longer`: the agreement of a judge that prefers the longer response, and `minus_longer`, what this judge has
          more;
        - `length_pull`: how much more often the judge prefers the longer response than people do; `longer_right` and
          `shorter_right`: its agreement where people prefer the longer and the shorter response;
        - `calibration`: of its confidence; see `calibration`.

        A figure that these verdicts do not have is None.

    Raises:
        ValueError: there is no verdict on any of the pairs.
    """
    by_row: dict[str, dict[str, list[RecordedVerdict]]] = {}
    for verdict in verdicts:
        by_row.setdefault(verdict.row_id, {"A": [], "B": []})[verdict.shown_first].append(verdict)
    judged = [(pair, by_row[pair.row_id]) for pair in pairs if pair.row_id in by_row]
    if not judged:
        raise ValueError("there is no verdict on any of the pairs")
    kinds = dict.fromkeys(pair.kind for pair, _ in judged if pair.kind is not None)
    found: dict[str, Any] = {"all": _figures(judged)}
    if len(kinds) > 1:
        found["kinds"] = {kind: _figures([row for row in judged if row[0].kind == kind]) for kind in kinds}
    return found


def calibration(confidence: Sequence[float], correct: Sequence[float], pair: Sequence[Any]) -> dict[str, Any]:
    """How well the confidence in verdicts says how often they are right.

    Args:
        confidence: the probability in [0, 1] that each verdict is right.
        correct: 1 if it is, else 0.
        pair: the pair that each verdict is about; verdicts on one pair are not independent.

    Returns:
        `n`; means of `confidence` and `correct`; `brier`, the mean of (confidence - correct)^2 with its interval,
        which is 1/4 for a confidence that is always 1/2; `ece`, the expected calibration error with ten bins of equal
        width, and its mean (`ece_chance`) and 95th percentile (`ece_chance_high`) for as many verdicts that are right
        with exactly the probability that their confidence says, those on one pair together.
    """
    confidence, correct = (numpy.asarray(values, dtype=float) for values in (confidence, correct))
    _, index = numpy.unique(numpy.asarray(pair), return_inverse=True)
    bins = numpy.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    # In the first row the outcomes, then drawn ones.
    drawn = numpy.random.default_rng(0).random((CALIBRATION_DRAWS, index.max() + 1))[:, index] < confidence
    excess = (confidence - numpy.vstack([correct, drawn])) @ numpy.eye(CALIBRATION_BINS)[bins]
    errors = numpy.abs(excess).sum(axis=1) / len(confidence)
    squares = (confidence - correct) ** 2
    of_pairs = numpy.bincount(index, squares) / numpy.bincount(index)
    return {
        "n": len(confidence),
        "confidence": float(confidence.mean()),
        "correct": float(correct.mean()),
        "brier": mean_with_interval(of_pairs) | {"mean": float(squares.mean())},
        "ece": float(errors[0]),
        "ece_chance": float(errors[1:].mean()),
        "ece_chance_high": float(numpy.percentile(errors[1:], 95)),
    }


def _figures(judged: Sequence[tuple[LabelledPair, dict[str, list[RecordedVerdict]]]]) -> dict[str, Any]:
    labels = numpy.array([VALUES[pair.label] for pair, _ in judged])
    longer = numpy.array([0.5 + 0.5 * numpy.sign(len(p.response_a) - len(p.response_b)) for p, _ in judged])
    # [2, n]: of each order the preference for A, which is NaN if it was not asked, and its agreement with the label.
    told = [[[VALUES[verdict.verdict] for verdict in row[order]] for _, row in judged] for order in ORDERS]
    values = numpy.array([[fmean(own or [numpy.nan]) for own in rows] for rows in told])
    agreements = [
        [fmean(1 - numpy.abs(own - label) if own else [numpy.nan]) for own, label in zip(rows, labels, strict=True)]
        for rows in told
    ]
    agreement, by_longer = numpy.nanmean(agreements, axis=0), 1 - numpy.abs(longer - labels)
    both = ~numpy.isnan(values).any(axis=0)
    first = [[row[order][0].verdict if row[order] else None for order in ORDERS] for _, row in judged]
    same = numpy.array([a == b and a is not None for a, b in first])
    named = same & numpy.array([a != "tie" for a, _ in first])
    # Preference for the longer response, by the judge and by people.
    unequal = longer != 0.5
    pulls = [numpy.where(longer == 1, v, 1 - v)[unequal] for v in (numpy.nanmean(values, axis=0), labels)]
    bias = mean_with_interval((values[0] - values[1])[both], gains=True) if both.any() else None
    answers = [(answer, pair.label) for pair, row in judged for order in ORDERS for answer in row[order]]
    confident = [
        (answer.confidence, answer.verdict == label, answer.row_id)
        for answer, label in answers
        if answer.confidence is not None and {answer.verdict, label} <= {"A", "B"}
    ]
    repeats = [
        [a.verdict == b.verdict for order in ORDERS for a, b in combinations(row[order], 2)] for _, row in judged
    ]
    return {
        "n": len(judged),
        "without_verdict": sum(answer.verdict is None for answer, _ in answers),
        "both": _rate(agreement),
        "agreed": _rate(agreement[both & named]),
        "order_agreement": _rate(same[both]),
        "position_bias": bias and {name: value / 2 for name, value in bias.items()},
        # Of each pair that was asked repeatedly, the share of equal verdicts among two answers to the same question.
        "self_agreement": _rate([fmean(equal) for equal in repeats if equal]),
        "longer": _rate(by_longer),
        "minus_longer": _difference(agreement, by_longer),
        "length_pull": _difference(*pulls),
        "longer_right": _rate(agreement[unequal & (labels == longer)]),
        "shorter_right": _rate(agreement[unequal & (labels == 1 - longer)]),
        "calibration": calibration(*zip(*confident, strict=True)) if confident else None,
    }


def _rate(values: Sequence[float]) -> dict[str, float] | None:
    if not len(values):
        return None
    low, high = rate_interval(values)
    return {"rate": float(numpy.mean(values)), "low": low, "high": high, "n": len(values)}


def _difference(first: numpy.ndarray, second: numpy.ndarray) -> dict[str, float] | None:
    """Mean of the first minus that of the second."""
    bounds = rate_difference_interval(first, second)
    if bounds is None:
        return None
    return {"mean": float(first.mean() - second.mean()), "low": bounds[0], "high": bounds[1]}
