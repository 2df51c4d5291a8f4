"""How far a judge can be believed: its verdicts on pairs whose better response people have named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

from trl_ext.evaluation.judging.pairs import IDENTICAL, CallableJudge, judge_pairs
from trl_ext.evaluation.judging.protocol import PairwiseJudge, Usage
from trl_ext.evaluation.statistics.intervals import (
    mean_with_interval,
    rate_difference_interval,
    rate_interval,
)
from trl_ext.evaluation.submissions.labelled_pairs import LabelledPair, RecordedVerdict

# A pair on which a person or a judge names none counts as half.
VALUES = {"A": 1.0, "tie": 0.5, "B": 0.0, None: 0.5}
SWAPPED = {"A": "B", "B": "A", "tie": "tie"}
CALIBRATION_BINS = 10
CALIBRATION_DRAWS = 1000


class _Repeat:
    """A judge under another identity, so that its cached verdicts do not answer the repeated questions."""

    def __init__(self, judge: PairwiseJudge, number: int):
        self.judge = judge.judge
        for name in ("ask", "prepare", "sequential", "uses_finished", "identity"):
            if hasattr(judge, name):
                setattr(self, name, getattr(judge, name))
        if getattr(judge, "identity", None) is not None:
            self.identity = {**judge.identity, "repeat": number}


def ask_judge(
    judge: PairwiseJudge | Callable[..., Any],
    pairs: Sequence[LabelledPair],
    *,
    name: str = "judge",
    repeats: int = 1,
    **judging: Any,
) -> tuple[list[RecordedVerdict], Usage]:
    """Ask a judge about every pair in both orders.

    A judge with a method `probability(prompt, response_a, response_b)`, such as `RewardModelJudge`, has the confidence
    that follows from it.

    Args:
        judge: the judge, or a function `f(prompt, response_a, response_b)`.
        pairs: what it is asked about.
        name: its name in the verdicts.
        repeats: how often each question is asked, which shows whether the judge agrees with itself.
        judging: keyword arguments of `judge_pairs`.

    Raises:
        TooManyErrors, JudgeUnavailable, CacheError: as `judge_pairs` does.
    """
    judge = judge if hasattr(judge, "judge") else CallableJudge(judge)
    rows = [{"row_id": pair.row_id, "prompt": pair.messages} for pair in pairs]
    responses = [pair.response_a for pair in pairs], [pair.response_b for pair in pairs]
    found, usage = [], Usage()
    for number in range(repeats):
        result = judge_pairs(_Repeat(judge, number) if number else judge, rows, *responses, **judging)
        usage += result.usage
        for pair, row in zip(pairs, result.verdicts, strict=True):
            for shown, answer in (("A", row["candidate_first"]), ("B", row["base_first"])):
                verdict = confidence = None
                if answer is not None:
                    verdict = answer["verdict"] if shown == "A" else SWAPPED[answer["verdict"]]
                    confidence = answer.get("confidence")
                elif row["reason"] is not None:
                    verdict = "tie" if row["reason"] == IDENTICAL else "B"
                if answer is not None and hasattr(judge, "probability"):
                    first = judge.probability(pair.messages, pair.response_a, pair.response_b)
                    confidence = max(first, 1 - first)
                record = {"row_id": pair.row_id, "judge": name, "shown_first": shown}
                found.append(RecordedVerdict(**record, verdict=verdict, confidence=confidence))
    return found, usage


def examine_judge(pairs: Sequence[LabelledPair], verdicts: Iterable[RecordedVerdict]) -> dict[str, Any]:
    """Compare a judge's verdicts with human labels.

    A verdict agrees with a label by 1 if they name the same response, by 0 if they name opposite ones, and by 1/2 if
    one of them is a tie; two ties agree. An answer without a verdict counts as a tie. So a coin agrees by 1/2. All
    intervals have 95%, and the unit is the pair, however often it was judged.

    Args:
        pairs: the labelled pairs; those without a verdict are left out.
        verdicts: of one judge.

    Returns:
        `all`, and `kinds` by kind if there are several. Each has

        - `n`, `without_verdict` (answers), and the agreements `a_first` and `b_first` (one order), `both` (mean of the
          orders) and `agreed` (where both orders name the same response), as `rate`, `low`, `high` and `n`;
        - `order_agreement`: share of the pairs with the same verdict in both orders;
        - `position_bias`: P(the response shown first wins) - 1/2, as `mean`, `low` and `high`;
        - `self_agreement`: how often two answers to the same question are equal;
        - `longer`: the agreement of a judge that prefers the longer response, and `minus_longer`, what this judge has
          more;
        - `length_pull`: how much more often the judge prefers the longer response than people do; `longer_right` and
          `shorter_right`: its agreement where people prefer the longer and the shorter response, and
          `longer_minus_shorter`;
        - `calibration`: of its confidence; see `calibration`.

        A figure that these verdicts do not have is None.

    Raises:
        ValueError: there is no verdict on any of the pairs.
    """
    by_row: dict[str, dict[str, list[RecordedVerdict]]] = {}
    for verdict in verdicts:
        by_row.setdefault(verdict.row_id, {"A": [], "B": []})[verdict.shown_first].append(verdict)
    judged = [pair for pair in pairs if pair.row_id in by_row]
    if not judged:
        raise ValueError("there is no verdict on any of the pairs")
    kinds = dict.fromkeys(pair.kind for pair in judged if pair.kind is not None)
    found: dict[str, Any] = {"all": _figures(judged, by_row)}
    if len(kinds) > 1:
        found["kinds"] = {kind: _figures([pair for pair in judged if pair.kind == kind], by_row) for kind in kinds}
    return found


def calibration(confidence: Sequence[float], correct: Sequence[float], pair: Sequence[Any]) -> dict[str, Any]:
    """How well the confidence in verdicts says how often they are right.

    Args:
        confidence: the probability in [0, 1] that each verdict is right.
        correct: 1 if it is, else 0.
        pair: the pair that each verdict is about; verdicts on one pair are not independent.

    Returns:
        `n`; means of `confidence` and `correct`; `brier`, the mean of (confidence - correct)^2 with its interval, and
        that of a confidence that is always 1/2 (`brier_chance`) or always the share of right verdicts
        (`brier_constant`); `ece`, the expected calibration error with ten bins of equal width, and its mean
        (`ece_chance`) and 95th percentile (`ece_chance_high`) for as many verdicts that are right with exactly the
        probability that their confidence says.
    """
    confidence, correct = (numpy.asarray(values, dtype=float) for values in (confidence, correct))
    squares = (confidence - correct) ** 2
    _, index = numpy.unique(numpy.asarray(pair), return_inverse=True)
    brier = mean_with_interval(numpy.bincount(index, squares) / numpy.bincount(index))
    drawn = numpy.random.default_rng(0).random((CALIBRATION_DRAWS, len(confidence))) < confidence
    chance = _calibration_error(confidence, drawn)
    accuracy = float(correct.mean())
    return {
        "n": len(confidence),
        "confidence": float(confidence.mean()),
        "correct": accuracy,
        "brier": {**brier, "mean": float(squares.mean())},
        "brier_chance": 0.25,
        "brier_constant": accuracy * (1 - accuracy),
        "ece": float(_calibration_error(confidence, correct[None])[0]),
        "ece_chance": float(chance.mean()),
        "ece_chance_high": float(numpy.percentile(chance, 95)),
    }


def _calibration_error(confidence: numpy.ndarray, correct: numpy.ndarray) -> numpy.ndarray:
    """Of each row of outcomes: sum over bins of |sum of confidence - number correct| / n."""
    bins = numpy.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    members = numpy.eye(CALIBRATION_BINS)[bins]
    return numpy.abs((confidence - correct) @ members).sum(axis=1) / len(confidence)


def _figures(pairs: Sequence[LabelledPair], by_row: dict[str, dict[str, list[RecordedVerdict]]]) -> dict[str, Any]:
    labels = numpy.array([VALUES[pair.label] for pair in pairs])
    longer = numpy.array([0.5 + 0.5 * numpy.sign(len(p.response_a) - len(p.response_b)) for p in pairs])
    answers = [by_row[pair.row_id] for pair in pairs]
    labelled = list(zip(answers, labels, strict=True))
    # P(A is preferred) in each order, [2, n]; NaN if the order was not asked.
    values = numpy.array([[_mean(VALUES[v.verdict] for v in row[order]) for row in answers] for order in "AB"])
    asked = ~numpy.isnan(values)
    agreements = numpy.array(
        [[_mean(1 - abs(VALUES[v.verdict] - label) for v in row[order]) for row, label in labelled] for order in "AB"]
    )
    agreement, preferred = numpy.nanmean(agreements, axis=0), numpy.nanmean(values, axis=0)
    both = asked.all(axis=0)
    first = [[row[order][0].verdict if row[order] else None for order in "AB"] for row in answers]
    same = numpy.array([a == b and a is not None for a, b in first])
    named = same & numpy.array([a in ("A", "B") for a, _ in first])
    by_longer = 1 - numpy.abs(longer - labels)
    unequal = longer != 0.5
    # Preference for the longer response, by the judge and by people.
    pulls = [numpy.where(longer == 1, side, 1 - side)[unequal] for side in (preferred, labels)]
    right = {name: unequal & (labels == side) for name, side in (("longer", longer), ("shorter", 1 - longer))}
    masked = [numpy.where(right[name], agreement, numpy.nan) for name in right]
    return {
        "n": len(pairs),
        "without_verdict": sum(v.verdict is None for row in answers for order in "AB" for v in row[order]),
        "a_first": _rate(agreements[0][asked[0]]),
        "b_first": _rate(agreements[1][asked[1]]),
        "both": _rate(agreement),
        "agreed": _rate(agreement[both & named]),
        "order_agreement": _rate(same[both]),
        "position_bias": _halved(mean_with_interval((values[0] - values[1])[both], gains=True))
        if both.any()
        else None,
        "self_agreement": _rate(_self_agreement(answers)),
        "longer": _rate(by_longer),
        "minus_longer": _difference(agreement, by_longer),
        "length_pull": _difference(*pulls),
        "longer_right": _rate(agreement[right["longer"]]),
        "shorter_right": _rate(agreement[right["shorter"]]),
        "longer_minus_shorter": _difference(*masked),
        "calibration": _calibration_of(pairs, answers),
    }


def _calibration_of(pairs: Sequence[LabelledPair], answers: Sequence[dict[str, list]]) -> dict[str, Any] | None:
    rows = [
        (verdict.confidence, verdict.verdict == pair.label, pair.row_id)
        for pair, row in zip(pairs, answers, strict=True)
        for verdict in (*row["A"], *row["B"])
        if verdict.confidence is not None and {pair.label, verdict.verdict} <= {"A", "B"}
    ]
    return calibration(*zip(*rows, strict=True)) if rows else None


def _self_agreement(answers: Sequence[dict[str, list[RecordedVerdict]]]) -> list[float]:
    """Of each pair that was asked repeatedly, the share of equal verdicts among two answers to the same question."""
    shares = []
    for row in answers:
        equal = [
            a.verdict == b.verdict for order in "AB" for i, a in enumerate(row[order]) for b in row[order][i + 1 :]
        ]
        if equal:
            shares.append(sum(equal) / len(equal))
    return shares


def _rate(values: Sequence[float]) -> dict[str, float] | None:
    if not len(values):
        return None
    low, high = rate_interval(values)
    return {"rate": float(numpy.mean(values)), "low": low, "high": high, "n": len(values)}


def _difference(first: numpy.ndarray, second: numpy.ndarray) -> dict[str, float] | None:
    """Mean of the first minus that of the second; NaN where a pair does not count."""
    bounds = rate_difference_interval(first, second) if len(first) else None
    if bounds is None:
        return None
    return {"mean": float(numpy.nanmean(first) - numpy.nanmean(second)), "low": bounds[0], "high": bounds[1]}


def _halved(figure: dict[str, float]) -> dict[str, float]:
    return {name: value / 2 for name, value in figure.items()}


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")
