"""Win rates, pairwise judging, intervals, paired comparisons and length control, against values worked by hand."""

from __future__ import annotations

import math
import random
import threading

import numpy
import pytest
import scipy.stats
from scipy.special import expit
from scipy.stats import binomtest

from tests.support.refusals import assert_refused
from trl_ext.evaluation import GroundTruthJudge, PairOutcome, judge_pairs, mean_with_interval, win_rate
from trl_ext.evaluation.judging.pairs import CallableJudge
from trl_ext.evaluation.statistics.intervals import (
    mean_interval,
    rate_difference_interval,
    rate_interval,
    wilson_interval,
)
from trl_ext.evaluation.statistics.length_control import fit_logistic, length_controlled_win_rate
from trl_ext.evaluation.statistics.paired import mcnemar, paired_difference
from trl_ext.evaluation.statistics.win_rate import row_credits

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
    @pytest.mark.parametrize(("successes", "n"), [(0, 7), (1, 1), (17, 300)])
    def test_against_scipy(self, successes, n):
        expected = binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes, n) == pytest.approx(tuple(expected), abs=1e-12)
        assert wilson_interval(0, 0) == (0.0, 1.0)


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
        responses = ["c0", "c1", "c2"], ["b0", "b1", "b2"]
        outcomes = judge_pairs(judge, prompt_rows("p", "q", "s"), *responses, max_concurrency=1).outcomes
        shown = [("p", "c0", "b0"), ("p", "b0", "c0"), ("q", "c1", "b1"), ("q", "b1", "c1"), ("s", "c2", "b2")]
        assert judge.shown == [*shown, ("s", "b2", "c2")]
        found = [(outcome.row_id, outcome.first, outcome.second) for outcome in outcomes]
        assert found == [("r0", C, B), ("r1", B, B), ("r2", C, T)]

    def test_one_question_at_a_time_is_asked_in_the_callers_thread(self):
        """What torch, a database or an event loop keep by thread is there for it."""
        threads = set()
        judge = CallableJudge(lambda *_: threads.add(threading.get_ident()) or "A")
        judge_pairs(judge, prompt_rows("p"), ["c"], ["b"], max_concurrency=1)
        assert threads == {threading.get_ident()}


def test_the_higher_known_score_wins():
    """A cut response scores 0 here. The candidate's is cut in the third row, the base's in the fourth."""
    judge = GroundTruthJudge(lambda prompt, text, finished=True: float(text.count(prompt)) if finished else 0.0)
    prompts, candidate, base = ("x", "y", "z", "l", "l"), ("xx", "-", "z", "lll", "l"), ("x", "y", "z", "l", "lll")
    flags = {"candidate_finished": [True] * 3 + [False, True], "base_finished": [True] * 4 + [False]}
    outcomes = judge_pairs(judge, prompt_rows(*prompts), candidate, base, **flags).outcomes
    assert [(one.first, one.second) for one in outcomes] == [(C, C), (B, B), (T, T), (B, B), (C, C)]
    # By default it is the toy score.
    asked = prompt_rows("Sort these numbers: 7 2 9 4."), ["2 4 7 9"], ["9 9 9 9"]
    [outcome] = judge_pairs(GroundTruthJudge(), *asked).outcomes
    assert (outcome.first, outcome.second) == (C, C)


USER = [{"role": role, "content": role} for role in ("system", "user", "assistant")]


def test_the_last_user_message_is_scored():
    seen = []
    GroundTruthJudge(lambda prompt, _: seen.append(prompt) or 0.0).judge([*USER, *USER], "a", "b")
    assert seen == ["user", "user"]


def settled(*wins):
    """Outcomes on which both orders agree: 1 for a win, 0 for a loss."""
    return outcomes_of(*((C, C) if win else (B, B) for win in wins))


def values_of(found: dict) -> tuple[float, float]:
    return found["low"], found["high"]


def test_credits_of_each_kind_of_row():
    rows = [
        *outcomes_of((C, C), (B, B), (C, B), (T, T)),
        PairOutcome("4", C, C, usable=False),
        PairOutcome("5", None, None, error="timeout"),
        PairOutcome("6", C, C, empty=True),
    ]
    assert row_credits(rows, "agreed") == [1.0, 0.0, None, None, None, None, None]
    assert row_credits(rows, "half") == [1.0, 0.0, 0.5, 0.5, 1.0, None, 0.0]


# ---- Intervals ----


def test_intervals_of_means_by_hand():
    """1, 2, 3 have the deviation 1: 2 -+ 4.302653 / sqrt 3. Equal values have no width.

    With c = skewness / sqrt n, t + c t^2 / 3 + c^2 t^3 / 27 + c / 6 is -+ 2.776445 at the t of the ends.
    """
    assert mean_interval([1, 2, 3]) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)
    assert mean_interval([0.3] * 4) == mean_interval([0.3]) == (0.3, 0.3)
    values = numpy.array([0.0, 0.0, 1.0, 2.0, 9.0])
    error, c = values.std(ddof=1) / math.sqrt(5), scipy.stats.skew(values) / math.sqrt(5)
    for end, expected in zip(mean_interval(values), (2.776445, -2.776445), strict=True):
        t = (values.mean() - end) / error
        assert t + c * t**2 / 3 + c**2 * t**3 / 27 + c / 6 == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("gains", "low", "high", "precision"),
    [
        # 21 pairs, of which 1 gains and 7 lose (Bentur et al. 2009): the interval in Fagerland et al. 2014.
        ([1] + [-1] * 7 + [0] * 13, -0.508, -0.013, 5e-4),
        # No pair of 6 differs: z sqrt(2 / 8 / 8). All of 5 gain: 6 of 7 gain and 1 loses, 5/7 - z sqrt(24 / 343).
        ([0.0] * 6, -0.346476, 0.346476, 1e-6),
        ([1.0] * 5, 0.195836, 1.0, 1e-6),
    ],
)
def test_intervals_of_gains(gains, low, high, precision):
    assert values_of(mean_with_interval(gains, gains=True)) == pytest.approx((low, high), abs=precision)
    mirrored = mean_with_interval([-gain for gain in gains], gains=True)
    assert values_of(mirrored) == pytest.approx((-high, -low), abs=precision)


@pytest.mark.parametrize("chances", [(0.05, 0.8, 0.15), (0.1, 0.6, 0.3), (0.2, 0.6, 0.2), (0.05, 0.05, 0.9)])
def test_exact_coverage_of_five_gains(chances):
    """Over all 21 outcomes of five differences of -1, 0 and 1. The normal interval covers 41 to 93%."""
    covered = 0.0
    for lost in range(6):
        for gained in range(6 - lost):
            found = mean_with_interval([-1] * lost + [0] * (5 - lost - gained) + [1] * gained, gains=True)
            if found["low"] - 1e-12 <= chances[2] - chances[0] <= found["high"] + 1e-12:
                covered += scipy.stats.multinomial.pmf([lost, 5 - lost - gained, gained], 5, chances)
    assert covered >= 0.93


def test_intervals_of_rates_by_hand():
    """1, 1/2, 0: the variance is that of 3 zeros and ones, and t has two degrees of freedom, t^2 = 18.512822:
    1/2 -+ t sqrt(1 / 12 + t^2 / 36) / (1 + t^2 / 3) = 1/2 -+ 4.302653 x 0.773032 / 7.170940.

    Zeros and ones, and equal values, have Wilson's: for 0 of 10, to z^2 / (n + z^2) = 3.841459 / 13.841459.
    """
    assert rate_interval([1, 0.5, 0]) == pytest.approx((0.036171, 0.963829), abs=1e-6)
    assert rate_interval([1, 0, 1, 1]) == wilson_interval(3, 4)
    assert rate_interval([0.5] * 10) == pytest.approx(wilson_interval(5, 10))
    assert values_of(mean_with_interval([0.0] * 10)) == pytest.approx((0.0, 0.277533), abs=1e-6)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ((36, 12, 2, 0), (0.050892, 0.333724)),
        ((59, 6, 16, 80), (-0.119499, -0.003201)),
        ((36, 4, 0, 0), (-0.015381, 0.205857)),
    ],
)
def test_intervals_of_paired_rates(table, expected):
    """Both won, b only the first, c only the second, neither: with p = (b + 1) / (n + 2) and q = (c + 1) / (n + 2)
    it is p - q -+ z sqrt((p + q - (p - q)^2) / (n + 2)). Of 40 wins against 36, McNemar's p is 0.125, and the
    interval holds 0."""
    first, second = (numpy.repeat(wins, table).tolist() for wins in ([1, 1, 0, 0], [1, 0, 1, 0]))
    assert rate_difference_interval(first, second) == pytest.approx(expected, abs=1e-6)
    assert rate_difference_interval(second, first) == pytest.approx((-expected[1], -expected[0]), abs=1e-6)


def test_rates_on_other_prompts_are_independent():
    """3 of 4 and 1 of 2 with no prompt in common, and two prompts that both have: 4 of 6 and 2 of 4.

    A prompt's influence on the first rate is (1 - 2/3) / 6 = 1/18 or -1/9, and on the second 1/8 or -1/8. On the
    two prompts that both have it is 1/18 + 1/8 and -1/9 - 1/8.
    """
    found = rate_difference_interval([1, 1, 1, 0, None, None], [None] * 4 + [1, 0])
    squares = 3 / 18**2 + 1 / 9**2 + 2 / 8**2 + (1 / 18 + 1 / 8) ** 2 + (1 / 9 + 1 / 8) ** 2
    half_width = 1.959964 * squares**0.5
    assert found == pytest.approx((1 / 6 - half_width, 1 / 6 + half_width), abs=1e-6)
    assert rate_difference_interval([1, 0], [None, None]) is None


# ---- Paired comparisons ----


def test_what_prompts_share_cancels():
    """100 prompts, easy or hard for both: 60 both win, 30 both lose, 8 only the first, 2 only the second.

    The difference is (68 - 62) / 100 = 0.06. With one prompt more for each it is 6 / 102, 1 on 9 and -1 on 3: the
    standard error is sqrt((12 / 102 - (6 / 102)^2) / 102) = 0.0335. Two independent rates would have one of 0.067.
    """
    first = settled(*([1] * 60 + [0] * 30 + [1] * 8 + [0] * 2))
    second = settled(*([1] * 60 + [0] * 30 + [0] * 8 + [1] * 2))
    result = paired_difference(first, second)
    assert (result.difference, result.low, result.high) == pytest.approx((0.06, -0.006754, 0.124401), abs=1e-6)
    assert (result.mcnemar.only_first, result.mcnemar.only_second) == (8, 2)
    assert result == paired_difference(first, second[::-1]), "the order of rows does not matter"
    # 11 of 12 against 1 of 12: 10/12 - 1.959964 sqrt((1 - 100/144) / 12); differences above 1 there are none.
    result = paired_difference(settled(*[1] * 10), settled(*[0] * 10))
    assert (result.difference, result.low, result.high) == pytest.approx((1.0, 0.520580, 1.0), abs=1e-6)
    assert result.mcnemar.p_value == pytest.approx(2 / 1024), "the two-sided chance of ten of ten"


def test_rows_that_are_settled_under_either_rule():
    """Of five rows the first candidate alone wins two, one has a tie, two are the same for both. The second candidate
    of the other four settles one row and wins it: 1 / 1 against 2 / 4."""
    first = outcomes_of((C, C), (C, C), (C, B), (C, C), (B, B))
    second = outcomes_of((B, B), (B, B), (B, B), (C, C), (B, B))
    for rule in ("agreed", "half"):
        test = paired_difference(first, second, rule).mcnemar
        assert (test.only_first, test.only_second, test.p_value) == (2, 0, 0.5)
    first, second = settled(1, 1, 0, 0), outcomes_of((C, C), (C, B), (C, B), (C, B))
    result = paired_difference(first, second)
    assert (result.first, result.second) == (0.5, 1.0)
    assert paired_difference(first, second, "half").second == pytest.approx((1 + 3 * 0.5) / 4)


def test_mcnemar_by_hand():
    """Of 2^13 sequences 1 + 13 + 78 + 286 = 378 have at most three of the rarer kind: 2 x 378 / 8192."""
    assert mcnemar(10, 3).p_value == mcnemar(3, 10).p_value == 756 / 8192
    assert (mcnemar(5, 0).p_value, mcnemar(0, 0).p_value) == (0.0625, 1.0)


# ---- Length control ----


def test_length_control_recovers_a_planted_effect():
    """4000 comparisons, theta 0.2, length coefficient 1, gap 300 -+ 400 characters.

    The rate without the effect of length is known; the raw rate is more than 5 points above it.
    """
    generator = numpy.random.default_rng(0)
    gap, true = generator.normal(300, 400, 4000), expit(0.2)
    wins = (generator.random(4000) < expit(0.2 + numpy.tanh(gap / gap.std(ddof=1)))).astype(float)
    result = length_controlled_win_rate(wins.tolist(), 1000 + gap, [1000] * 4000)
    assert wins.mean() - true > 0.05
    assert abs(result.rate - true) < 0.02
    assert result.low < true < result.high
    assert result.length_coefficient == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("kind", ["mixed", "halves", "all won", "told by the feature"])
def test_the_fit_is_where_the_posterior_is_highest(kind, scale):
    """The gradient of the log-posterior, X'(y - p) - theta / 10^2, is 0 in units of each feature's scale."""
    generator = numpy.random.default_rng(3)
    feature = generator.normal(size=4000)
    labels = {
        "mixed": (generator.random(4000) < 1 / (1 + numpy.exp(-0.6 * feature))).astype(float),
        "halves": generator.choice([0.0, 0.5, 1.0], size=4000),
        "all won": numpy.ones(4000),
        "told by the feature": (feature > 0).astype(float),
    }[kind]
    design = numpy.stack([numpy.ones(4000), scale * feature], axis=1)
    fitted = fit_logistic(design, labels)
    gradient = design.T @ (labels - expit(design @ fitted)) - fitted / 10.0**2
    assert gradient / [1, max(scale, 1)] == pytest.approx(numpy.zeros(2), abs=1e-6)


def test_the_edges_of_length_control():
    """Without any difference it is the raw rate: the prior alone moves 75 of 100 by less than 0.001. Where all are won
    it is finite: Wilson's lower bound of 100 of 100 is 100 / 103.841459. Rows without judgement are left out."""
    assert length_controlled_win_rate([1.0, 0.0], [30, 31], [20, 21]) is None, "equal differences, or quality?"
    result = length_controlled_win_rate([1.0] * 75 + [0.0] * 25, [20] * 100, [20] * 100)
    assert result.rate == pytest.approx(0.75, abs=0.001) and result.length_coefficient is None
    result = length_controlled_win_rate([1.0] * 100, list(range(100, 200)), [150] * 100)
    assert 0.99 < result.rate < 1.0
    assert (result.low, result.high) == (pytest.approx(0.963007, abs=1e-6), 1.0)
    whole = length_controlled_win_rate([1.0, 0.0, 0.5, 1.0], [5, 9, 7, 6], [6, 6, 6, 8])
    assert length_controlled_win_rate([1.0, None, 0.0, 0.5, 1.0], [5, 99, 9, 7, 6], [6, 6, 6, 6, 8]) == whole
    assert length_controlled_win_rate([None], [5], [6]) is None


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: GroundTruthJudge(lambda *_: math.nan).judge("p", "a", "b"), ["nan", "'p'"]),
        (lambda: GroundTruthJudge(lambda *_: 0.0).judge(USER[:1], "a", "b"), ["no user message"]),
        (lambda: mean_interval([]), ["no values"]),
        (lambda: paired_difference(settled(1, 0), settled(1)), ["row_id 1", "only one"]),
    ],
)
def test_refusals(refused, words):
    assert_refused(refused, *words)
