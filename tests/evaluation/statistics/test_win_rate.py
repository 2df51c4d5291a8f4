"""Win rates, intervals and pairwise judging, against values worked by hand."""

import math
import random
import threading

import pytest
from scipy.stats import binomtest

from tests.support.refusals import assert_refused
from trl_ext.evaluation import (
    GroundTruthJudge,
    PairOutcome,
    compare,
    wilson_interval,
    win_rate,
)
from trl_ext.evaluation.judging.pairs import CallableJudge

C, B, T = "candidate", "base", "tie"


def outcomes_of(*verdicts):
    return [PairOutcome(str(number), *verdict) for number, verdict in enumerate(verdicts)]


def course_example():
    """Six rows: two agreed wins, one agreed loss, a disagreement, an unusable win and an error."""
    return [
        *outcomes_of((C, C), (C, C), (B, B), (C, B)),
        PairOutcome("4", C, C, usable=False),
        PairOutcome("5", None, None, error="timeout"),
    ]


class TestWilson:
    @pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
    @pytest.mark.parametrize(("successes", "n"), [(0, 7), (1, 1), (17, 300)])
    def test_against_scipy(self, successes, n, confidence):
        expected = binomtest(successes, n).proportion_ci(confidence, method="wilson")
        assert wilson_interval(successes, n, confidence) == pytest.approx(tuple(expected), abs=1e-12)
        assert wilson_interval(0, 0, confidence) == (0.0, 1.0)


class TestWinRate:
    def test_course_example(self):
        """Three rows agree, are usable and have no error; the candidate wins two of them.

        As halves 1 + 1 + 0 + 1/2 + 1 = 3.5 over the five rows without an error. Four of the five agree. The response
        shown first wins once in each agreed row and twice in the disagreement: 6 of 10.
        """
        result = win_rate(course_example())
        assert result.agreed.rate == pytest.approx(2 / 3, abs=1e-12)
        assert (result.agreed.n, result.n_counted, result.n_total, result.n_errors) == (3, 3, 6, 1)
        assert (result.agreed.low, result.agreed.high) == wilson_interval(2, 3)
        assert (result.half.rate, result.half.n, result.n_ties) == (pytest.approx(0.7, abs=1e-12), 5, 1)
        assert (result.half.low, result.half.high) == wilson_interval(3.5, 5)
        assert (result.agreement_rate, result.position_bias) == pytest.approx((0.8, 0.1))

    def test_always_the_first_answer(self):
        result = win_rate(outcomes_of(*[(C, B)] * 7))
        assert result.position_bias == 0.5
        assert result.half.rate == 0.5
        assert (result.agreed.rate, result.agreed.low, result.agreed.high, result.agreed.n) == (0.0, 0.0, 1.0, 0)

    def test_ties(self):
        """(tie, tie) agrees but names no system; (candidate, tie) disagrees: 1/2 each, beside one win: 2 / 3."""
        result = win_rate(outcomes_of((T, T), (C, T), (C, C)))
        assert result.half.rate == pytest.approx(2 / 3)
        assert (result.n_ties, result.n_counted, result.agreed.rate) == (2, 1, 1.0)
        assert result.agreement_rate == pytest.approx(2 / 3)
        # Passes won by the response shown first: 1/2 + 1/2, then 1 + 1/2, then 1 + 0, of six.
        assert result.position_bias == pytest.approx(3.5 / 6 - 0.5)

    def test_an_empty_response_loses_under_half_and_leaves_agreed(self):
        rows = [*outcomes_of((C, C)), PairOutcome("x", C, C, empty=True), PairOutcome("y", C, B, empty=True)]
        result = win_rate(rows)
        assert (result.half.rate, result.half.n) == (pytest.approx(1 / 3), 3)
        assert (result.agreed.rate, result.agreed.n) == (1.0, 1)
        assert result.n_ties == 0

    @pytest.mark.parametrize("rows", [[], [PairOutcome("a", None, None, error="refused")]])
    def test_nothing_judged(self, rows):
        result = win_rate(rows)
        for interval in (result.agreed, result.half):
            assert (interval.rate, interval.low, interval.high, interval.n) == (0.0, 0.0, 1.0, 0)
        assert (result.agreement_rate, result.position_bias, result.n_errors) == (0.0, 0.0, len(rows))

    def test_swapping_the_systems(self):
        """The base's outcome has the roles exchanged and, as it is now the candidate, the passes too."""
        other = {C: B, B: C, T: T}
        generator = random.Random(1)
        for _ in range(50):
            verdicts = [tuple(generator.choices([C, B, T], k=2)) for _ in range(generator.randint(1, 30))]
            swapped = [(other[second], other[first]) for first, second in verdicts]
            result, mirror = win_rate(outcomes_of(*verdicts)), win_rate(outcomes_of(*swapped))
            assert mirror.half.rate == pytest.approx(1 - result.half.rate)
            assert (mirror.half.low, mirror.half.high) == pytest.approx((1 - result.half.high, 1 - result.half.low))
            assert mirror.position_bias == pytest.approx(result.position_bias)
            assert mirror.agreement_rate == pytest.approx(result.agreement_rate)
            assert mirror.n_counted == result.n_counted
            if result.n_counted:
                assert mirror.agreed.rate == pytest.approx(1 - result.agreed.rate)


def prompt_rows(*texts):
    return [
        {"row_id": f"r{number}", "prompt": [{"role": "user", "content": text}]} for number, text in enumerate(texts)
    ]


class ScriptedJudge:
    """Answers from a list and remembers what it was shown."""

    def __init__(self, *answers):
        self.answers, self.shown = list(answers), []

    def judge(self, prompt, response_a, response_b):
        self.shown.append((prompt[-1]["content"], response_a, response_b))
        return self.answers.pop(0)


class TestCompare:
    def test_both_orders_and_labels_mapped_back(self):
        judge = ScriptedJudge("A", "A", "B", "A", "A", "tie")
        outcomes = compare(judge, prompt_rows("p", "q", "s"), ["c0", "c1", "c2"], ["b0", "b1", "b2"])
        shown = [("p", "c0", "b0"), ("p", "b0", "c0"), ("q", "c1", "b1"), ("q", "b1", "c1"), ("s", "c2", "b2")]
        assert judge.shown == [*shown, ("s", "b2", "c2")]
        found = [(outcome.row_id, outcome.first, outcome.second) for outcome in outcomes]
        assert found == [("r0", C, B), ("r1", B, B), ("r2", C, T)]

    def test_the_judge_is_called_from_the_callers_thread(self):
        """What torch, a database or an event loop keep by thread is there for it."""
        threads = set()
        compare(CallableJudge(lambda *_: threads.add(threading.get_ident()) or "A"), prompt_rows("p"), ["c"], ["b"])
        assert threads == {threading.get_ident()}


def test_the_higher_known_score_wins():
    """A cut response scores 0 here. The candidate's is cut in the third row, the base's in the fourth."""
    judge = GroundTruthJudge(lambda prompt, text, finished=True: float(text.count(prompt)) if finished else 0.0)
    prompts, candidate, base = ("x", "y", "z", "l", "l"), ("xx", "-", "z", "lll", "l"), ("x", "y", "z", "l", "lll")
    flags = {"candidate_finished": [True] * 3 + [False, True], "base_finished": [True] * 4 + [False]}
    outcomes = compare(judge, prompt_rows(*prompts), candidate, base, **flags)
    assert [(one.first, one.second) for one in outcomes] == [(C, C), (B, B), (T, T), (B, B), (C, C)]
    # By default it is the toy score.
    [outcome] = compare(GroundTruthJudge(), prompt_rows("Sort these numbers: 7 2 9 4."), ["2 4 7 9"], ["9 9 9 9"])
    assert (outcome.first, outcome.second) == (C, C)


USER = [{"role": role, "content": role} for role in ("system", "user", "assistant")]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        *((lambda counts=counts: wilson_interval(*counts), ["must"]) for counts in ((-1, 5), (6, 5), (1, 2.5))),
        (lambda: wilson_interval(1, 2, confidence=1.5), ["confidence"]),
        (lambda: PairOutcome("r7", C, "A"), ["row_id r7, second", "candidate, base, tie", "'A'"]),
        (lambda: GroundTruthJudge(lambda *_: math.nan).judge("p", "a", "b"), ["nan", "'p'"]),
        (lambda: GroundTruthJudge(lambda *_: 0.0).judge(USER[:1], "a", "b"), ["no user message"]),
    ],
)
def test_refusals(refused, words):
    assert_refused(refused, *words)


def test_the_last_user_message_is_scored():
    seen = []
    GroundTruthJudge(lambda prompt, _: seen.append(prompt) or 0.0).judge([*USER, *USER], "a", "b")
    assert seen == ["user", "user"]
