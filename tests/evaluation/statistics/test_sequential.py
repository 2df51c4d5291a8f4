"""Stopping early: the betting sequence, the two looks, what is asked, and the command."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import numpy
import pytest
from scipy.stats import multivariate_normal

from tests.evaluation.submissions.test_grading import plan, response_rows, write_policy
from tests.support.judging import prompt_rows
from tests.support.public_evaluation import flags_of_course, one_line_error, run_command
from trl_ext.evaluation import JudgeError, confidence_sequence, decide, judge_pairs
from trl_ext.evaluation.judging.pairs import NOT_NEEDED, TooManyErrors
from trl_ext.evaluation.statistics.intervals import rate_sample, score_bounds
from trl_ext.evaluation.statistics.sequential import LOOKS_ALPHA, spending_quantiles


def capitals(values, mean: float, alpha: float) -> list[float]:
    """The gambler's capital after each value, one bet after the other, as the paper has it."""
    larger = smaller = 1.0
    total, squares, variance, found = 0.5, 0.25, 0.25, []
    for count, value in enumerate(values, start=1):
        bet = math.sqrt(2 * math.log(2 / alpha) / (variance * count * math.log(1 + count)))
        larger *= 1 + min(bet, 0.5 / mean if mean else math.inf) * (value - mean)
        smaller *= 1 - min(bet, 0.5 / (1 - mean) if mean < 1 else math.inf) * (value - mean)
        total += value
        squares += (value - total / (count + 1)) ** 2
        variance = squares / (count + 1)
        found.append(max(larger, smaller) / 2)
    return found


class TestConfidenceSequence:
    def test_against_one_bet_after_the_other(self):
        """A mean on the grid is within the bounds exactly as long as no capital against it was 1 / alpha."""
        values = numpy.random.default_rng(0).choice([0, 0.5, 1], 60, p=[0.1, 0.2, 0.7])
        low, high = confidence_sequence(values, alpha=0.05, points=100)
        kept = [numpy.maximum.accumulate(capitals(values, mean / 100, 0.05)) < 20 for mean in range(101)]
        for time in (10, 30, 59):
            means = [mean for mean in range(101) if kept[mean][time]]
            assert means == list(range(means[0], means[-1] + 1))
            expected = max(means[0] - 1, 0) / 100, min(means[-1] + 1, 100) / 100
            assert (low[time], high[time]) == pytest.approx(expected)
        assert 0.5 < low[-1] < 0.8 < high[-1] < 1 and (numpy.diff(low) >= 0).all() and (numpy.diff(high) <= 0).all()

    @pytest.mark.parametrize("rate", [0.1, 0.5])
    def test_the_error_over_every_sequence_of_twelve(self, rate):
        """The probability that the true rate is ever outside, exactly, is at most alpha."""
        error = 0.0
        for values in itertools.product([0, 1], repeat=12):
            if max(capitals(values, rate, 0.2)) >= 5:
                error += rate ** sum(values) * (1 - rate) ** (12 - sum(values))
        assert 0 < error <= 0.2

    def test_errors(self):
        with pytest.raises(ValueError, match="alpha must lie between"):
            confidence_sequence([1], alpha=0)
        with pytest.raises(ValueError, match="values must lie between 0 and 1"):
            confidence_sequence([2])


class TestSpending:
    def test_published_bounds(self):
        """Two looks, the first at half of the information, alpha 5%: 2.963 and 1.969 (Lan and DeMets 1983)."""
        assert spending_quantiles(math.sqrt(0.5), 0.05) == pytest.approx((2.963, 1.969), abs=5e-4)

    @pytest.mark.parametrize("correlation", [0.71, 0.9, 0.98])
    def test_the_joint_error(self, correlation):
        bounds = numpy.array(spending_quantiles(correlation))
        joint = multivariate_normal(cov=[[1, correlation], [correlation, 1]])
        assert 1 - joint.cdf(bounds, lower_limit=-bounds) == pytest.approx(LOOKS_ALPHA, abs=1e-5)
        assert spending_quantiles(1.0) == pytest.approx((2.004654, 2.004654), abs=1e-6)


def asking(table):
    """`ask` of a table [n, 2] of verdicts with the base and with the candidate first, and what was asked."""
    asked = []

    def ask(questions):
        asked.extend(questions)
        return [table[prompt][int(own_first)] for prompt, own_first in questions]

    return ask, asked


class TestDecide:
    def test_every_win_stops_early(self):
        """Against 1/2 the bet is 1 and a win multiplies by 1.5: 1.5^14 / 2 = 146 and 1.5^15 / 2 = 219 > 200."""
        ask, asked = asking([[1, 1]] * 400)
        found = decide(ask, 400, batch_size=1)
        assert (found.decision, found.n_prompts, found.stopped, found.rate) == ("above", 15, "early", 1)
        assert found.n_verdicts == len(asked) == 15 + 2 and found.n_all == 800 and 0.5 < found.low < found.high == 1
        assert decide(asking([[0, 0]] * 400)[0], 400, batch_size=1).decision == "below"
        assert decide(asking([[0, 0]] * 400)[0], 400, batch_size=1, threshold=0.3).high < 0.3

    def test_orders_that_agree_are_not_asked_twice(self):
        """200 wins of 400: every prompt once, an eighth of them twice, and an interval nearly as if once for all."""
        ask, asked = asking([[1, 1], [0, 0]] * 200)
        found = decide(ask, 400)
        assert (found.decision, found.stopped, found.n_verdicts) == ("undecided", "one order", 450)
        assert len(set(asked)) == 450 and {prompt for prompt, _ in asked} == set(range(400))
        # Noise 0.125 / 51 of variance 0.25: the correlation is 0.996, rounded to 1.
        assert (found.low, found.high) == pytest.approx(score_bounds(0.5, 400, 2.004654), abs=1e-6)

    def test_second_orders_decide(self):
        """Orders disagree on three of four prompts, and of the others the candidate wins all: 5/8 with both orders.

        With both orders of every prompt the mean is exactly 0.625, whose standard deviation is 0.2165.
        """
        table = [[1, 1], [1, 0], [0, 1], [1, 0]] * 15
        found = decide(asking(table)[0], 60, batch_size=60)
        assert (found.decision, found.stopped, found.rate, found.n_verdicts) == ("above", "both orders", 0.625, 120)
        rate, size, quantile = rate_sample([1, 0.5, 0.5, 0.5] * 15)
        low, _ = score_bounds(rate, size, quantile)
        assert 0.5 < found.low < low

    def test_rows_without_a_verdict_are_left_out(self):
        found = decide(asking([[1, None], [1, 1]] * 40)[0], 80, batch_size=80)
        assert found.decision == "above" and 40 < found.n_prompts < 80 and found.rate == 1
        with pytest.raises(ValueError, match="no prompt has a verdict"):
            decide(asking([[None, None]] * 4)[0], 4)
        with pytest.raises(ValueError, match="threshold in"):
            decide(asking([])[0], 4, threshold=1)

    @pytest.mark.parametrize("disagreeing", [0.1, 0.6])
    def test_error_and_coverage(self, disagreeing):
        """400 samples at a true rate of 1/2: decided in 5%, and covered in 95%, up to 2.2% by chance."""
        rng, decided, covered = numpy.random.default_rng(0), 0, 0
        for seed in range(400):
            first = rng.random(150) < 0.5
            second = numpy.where(rng.random(150) < disagreeing, rng.random(150) < 0.5, first)
            found = decide(asking(numpy.stack([first, second], axis=1).astype(float))[0], 150, seed=seed)
            decided += found.decision != "undecided"
            covered += found.low <= 0.5 <= found.high
        assert decided == 400 - covered and 0.015 < decided / 400 < 0.075


class TestJudging:
    ROWS, OWN, OTHER = prompt_rows(64), ["cc"] * 64, [f"b{n}" for n in range(64)]

    def judge(self, fails: int = 0):
        def verdict(prompt, response_a, response_b):
            if int(prompt[0]["content"].split()[-1]) >= 64 - fails:
                raise JudgeError("no answer")
            return "A" if response_a == "cc" else "B"

        return SimpleNamespace(judge=verdict, identity={"kind": "mine"})

    def test_the_cache_answers_the_same_questions(self, tmp_path):
        """32 prompts and four second orders: 1.5^32 / 2 is far beyond 200."""
        calls = []
        for _ in range(2):
            given = self.judge(), self.ROWS, self.OWN, self.OTHER
            result = judge_pairs(*given, cache=tmp_path / "cache.sqlite", threshold=0.5)
            assert (result.decision.decision, result.decision.n_verdicts) == ("above", 36)
            calls.append((result.usage.calls, result.usage.cached))
        assert calls == [(36, 0), (0, 36)]
        errors = [outcome.error for outcome in result.outcomes]
        assert errors.count(None) == 4 and errors.count(NOT_NEEDED) == 60

    def test_known_rows_and_errors(self):
        """An empty response loses and an equal one ties, and neither is asked about."""
        for own, expected in (([""] * 64, ("below", 0)), (self.OTHER, ("undecided", 0.5))):
            result = judge_pairs(self.judge(), self.ROWS, own, self.OTHER, threshold=0.5)
            assert (result.decision.decision, result.decision.rate) == expected and result.usage.calls == 0
        with pytest.raises(TooManyErrors, match="of 64 rows could not be judged"):
            judge_pairs(self.judge(fails=40), self.ROWS, self.OWN, self.OTHER, threshold=0.5)


def test_command(capsys, monkeypatch, tmp_path):
    """Ten wins of ten prompts, two of which were asked in both orders."""
    monkeypatch.chdir(tmp_path)
    path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
    flags = ["judge", "--candidate", path, *flags_of_course(tmp_path)["judging"], "--stop_when_decided"]
    code, out, err = run_command(capsys, *flags, "--json", "--out", "o.json", "--verdicts", "v.jsonl")
    assert code == 0, err
    [found] = json.loads(out)["decisions"]
    assert json.loads((tmp_path / "o.json").read_text()) == json.loads(out)
    assert (found["name"], found["decision"], found["n_verdicts"], found["n_all"]) == ("aot", "above", 12, 20)
    assert len((tmp_path / "v.jsonl").read_text().splitlines()) == 10
    assert "aot        above        1.000  [" in run_command(capsys, *flags)[1]
    assert "aot        undecided" in run_command(capsys, *flags, "0.9")[1]
    assert "--stop_when_decided 1.0: a win rate lies between 0 and 1" in one_line_error(
        run_command(capsys, *flags, "1")
    )
    assert "leave out --stop_when_decided" in one_line_error(run_command(capsys, *flags, "--human_labels", "l.jsonl"))
