"""Win rates from human labels and a judge: values worked by hand, other computations, symmetries, and the command."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy
import pytest

from tests.support.files import write_rows
from tests.support.public_evaluation import (
    flags_of_course,
    one_line_error,
    plan,
    response_rows,
    run_command,
    write_policy,
)
from tests.support.refusals import assert_one_line
from trl_ext.evaluation import PairOutcome, prediction_powered
from trl_ext.evaluation.statistics.human_labels import judge_values
from trl_ext.evaluation.statistics.intervals import rate_interval

LABELS = [1, 0, 1, 1, 0, 1, 0, 1]
JUDGED = [1, 0, 1, 0, 0, 1, 1, 1]
UNLABELLED = [1] * 14 + [0] * 6
C, B, T = "candidate", "base", "tie"


class TestPredictionPowered:
    """Eight labels with mean 5/8 beside eight verdicts with mean 5/8; further verdicts 14/20.

    Cov = 4/8 - 25/64 = 0.109375; the variance of the 28 verdicts, 19 of them 1, is 19 * 9 / (28 * 27) = 0.226190.
    lambda = 0.109375 / (1.4 * 0.226190) = 0.345395.
    """

    def test_by_hand(self):
        found = prediction_powered(LABELS, JUDGED, UNLABELLED)
        assert (found.rate, found.standard_error) == pytest.approx((0.650905, 0.156844), abs=1e-6)
        assert found.effective_n == pytest.approx(8.375845, abs=1e-4)
        assert (found.n_labels, found.n_unlabelled, found.labels_only.rate) == (8, 20, 0.625)
        assert (found.weight, found.judge_rate) == (pytest.approx(0.345395, abs=1e-6), pytest.approx(19 / 28))
        assert prediction_powered(LABELS[:2], JUDGED[:2], UNLABELLED).weight == 0, "two labels cannot be fitted"

    def test_interval_of_the_labels_at_a_larger_sample(self):
        """Binary labels: Wilson's interval with z = 1.96 at 8 * 0.237654 / 0.226990 trials.

        With half a win and half a loss more, 5.5 of 9 labels are wins: variance 5.5 * 3.5 / 81 = 0.237654. Residuals
        are 1 - lambda of 4, 0 of 2, and 1 and -lambda of 1.5 each: mean 5.5 (1 - lambda) / 9 = 0.400036, mean square
        (4 * 0.428508 + 1.5 + 1.5 * 0.119298) / 9 = 0.376998, variance 0.216969. The verdicts add 8 lambda^2 0.21 / 20.
        """
        found = prediction_powered(LABELS, JUDGED, UNLABELLED)
        rate, trials, z = 0.6509046, 8 * 0.237654 / (0.216969 + 8 * 0.119298 * 0.21 / 20), 1.959964
        centre = (rate + z**2 / (2 * trials)) / (1 + z**2 / trials)
        half = z * math.sqrt(rate * (1 - rate) / trials + z**2 / (4 * trials**2)) / (1 + z**2 / trials)
        assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-5)
        assert (found.labels_only.low, found.labels_only.high) == rate_interval(LABELS)

    def test_symmetries(self):
        """Labels on the first 30 prompts of 100, and related verdicts, with ties."""
        rng = numpy.random.default_rng(0)
        true = rng.choice([0, 0.5, 1], 100, p=[0.3, 0.2, 0.5])
        judged = numpy.where(rng.random(100) < 0.7, true, rng.choice([0, 0.5, 1], 100))
        found = prediction_powered(true[:30], judged[:30], judged[30:])
        swapped = prediction_powered(1 - true[:30], 1 - judged[:30], 1 - judged[30:])
        assert (swapped.rate, swapped.low, swapped.high) == pytest.approx(
            (1 - found.rate, 1 - found.high, 1 - found.low)
        )
        assert 0 < found.weight < 1 and found.effective_n > 30
        assert found.high - found.low < found.labels_only.high - found.labels_only.low

    @pytest.mark.parametrize(
        "judged, unlabelled",
        [([0.5] * 8, [0.5] * 20), ([0.1] * 8, [0.1] * 20), ([1 - y for y in LABELS], UNLABELLED), (JUDGED, [])],
        ids=["constant", "constant, not exact in binary", "opposed", "every prompt labelled"],
    )
    def test_labels_alone_where_the_judge_says_nothing(self, judged, unlabelled):
        found = prediction_powered(LABELS, judged, unlabelled)
        assert (found.weight, found.rate, found.effective_n) == (0, 0.625, 8)
        assert (found.low, found.high) == rate_interval(LABELS)

    def test_equal_labels(self):
        """On equal labels it tells nothing of its errors: ten of them have Wilson's interval."""
        found = prediction_powered([1] * 10, [1] * 9 + [0], [1] * 40)
        assert (found.weight, found.rate, found.standard_error) == (0, 1, 0)
        assert (found.low, found.high) == pytest.approx((0.722467, 1), abs=1e-6)

    def test_few_labels_do_not_show_the_errors_of_a_good_judge(self):
        """20 labels, on which the judge is right, and 2,000 further prompts: about as good as 100 labels.

        The labels' variance is 0.25. The residuals of half a win and half a loss more are about 1 and -1, those of the
        labels 0: 1 / 21. The verdicts add 20 * 0.25 / 2,000: 20 * 0.25 / 0.0501 = 99.8.
        """
        found = prediction_powered([1, 0] * 10, [1, 0] * 10, [1] * 1100 + [0] * 900)
        assert found.rate == pytest.approx(0.55, abs=1e-3) and found.effective_n == pytest.approx(99.8, abs=0.2)


def test_values_of_verdicts():
    """Both orders are averaged: a win and a tie are 3/4. Without a verdict 1/2, and an empty response loses."""
    rows = [(C, C), (B, B), (C, B), (T, T), (C, T)]
    outcomes = [PairOutcome(str(number), *verdicts) for number, verdicts in enumerate(rows)]
    outcomes += [PairOutcome("5", None, None, error="timeout"), PairOutcome("6", B, B, empty=True)]
    assert judge_values(outcomes) == [1, 0, 0.5, 0.5, 0.75, 0.5, 0]


class TestCommand:
    """`public_eval.judge --human_labels` on ten prompts, of which the judge gives the candidate 5 wins and 3 ties."""

    @pytest.fixture
    def judge(self, capsys, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=5, tie=3, loss=2)))
        return partial(run_command, capsys, "judge", "--candidate", path, *flags_of_course(tmp_path)["judging"])

    @pytest.fixture
    def row_ids(self):
        return [row["row_id"] for row in response_rows(plan(win=10))]

    def test_figures(self, judge, row_ids, tmp_path):
        """The judge calls the four labelled rows two wins, a tie and a loss; a person only the first a win."""
        told = {0: C, 1: B, 5: B, 9: B}
        rows = [{"row_id": row_ids[i], "outcome": outcome} for i, outcome in told.items()]
        path = write_rows(tmp_path / "labels.jsonl", rows)
        code, out, err = judge("--human_labels", path, "--json")
        assert code == 0, err
        expected = prediction_powered([1, 0, 0, 0], [1, 1, 0.5, 0], [1, 1, 1, 0.5, 0.5, 0])
        found = json.loads(out)["candidates"][0]["human_labels"]
        assert found == expected.to_dict()
        assert 0 < found["weight"] < 1 and found["judge_rate"] == pytest.approx(0.65)
        code, out, _ = judge("--human_labels", path)
        assert f"human labels and judge: {expected.rate:.3f} [{expected.low:.3f}, {expected.high:.3f}]" in out
        assert f"like {expected.effective_n:.0f} labels; 4 labels alone: 0.250 [" in out
        assert "judge alone: 0.650 over 10 prompts" in out

    @pytest.mark.parametrize(
        "rows, words",
        [
            ([], ["l.jsonl", "empty"]),
            ([{"row_id": 0, "outcome": "win"}], ["row-axe", "outcome", "'candidate', 'base' or 'tie'"]),
            ([{"row_id": "elsewhere", "outcome": C}], ["row_id elsewhere", "line 1", "10 rows"]),
            ([{"row_id": 0, "outcome": C}] * 2, ["row-axe", "line 2", "already used on line 1"]),
        ],
    )
    def test_errors_come_before_judging(self, judge, row_ids, tmp_path, monkeypatch, rows, words):
        monkeypatch.setattr("public_eval.judge.judge_candidate", None)
        rows = [{**row, "row_id": row_ids[0] if row["row_id"] == 0 else row["row_id"]} for row in rows]
        line = one_line_error(judge("--human_labels", write_rows(tmp_path / "l.jsonl", rows)))
        assert_one_line(line, words)

    def test_of_several_candidates(self, judge, tmp_path):
        both = partial(judge, "--candidate", write_policy(tmp_path, "dpo", response_rows(plan(win=10))))
        own = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        assert_one_line(
            one_line_error(both(own, "--human_labels", "l.jsonl")), ["one --candidate", "judge each alone"]
        )
