"""Grades of submissions whose wins, losses and ties are planted in prompts of the embedded task."""

import json
import math
from functools import partial

import pytest

from tests.support.files import write_rows
from tests.support.public_evaluation import WORDS, plan, response_rows, write_assets, write_policy, write_scores
from tests.support.refusals import assert_refused
from trl_ext.evaluation import JudgeError, Judgement, grade_submission
from trl_ext.evaluation.statistics.paired import chance_below
from trl_ext.evaluation.submissions.grading import SubmissionGrade


@pytest.fixture
def assets(tmp_path):
    return write_assets(tmp_path / "assets")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "submission"
    path.mkdir()
    return path


def only(result: SubmissionGrade):
    (grade,) = result.grades
    return grade


class TestPolicies:
    def test_by_hand(self, folder, assets):
        """5 wins, 3 ties, 2 losses: 5 / 7 where ties are dropped, (5 + 1.5) / 10 where they are halves.

        Chance to fall under 0.7 of 7 rows: fewer than 4.9, so at most 4 wins, at a rate drawn from Beta(5.5, 2.5):
        k wins have C(7, k) B(5.5 + k, 2.5 + 7 - k) / B(5.5, 2.5).
        """
        write_policy(folder, "aot", response_rows(plan(win=5, tie=3, loss=2)))
        grade = only(grade_submission(folder, {"aot": 0.7}, **assets))
        assert grade.passed
        assert (grade.figure, grade.n, grade.measure) == (pytest.approx(5 / 7), 7, "win rate")
        assert (grade.low, grade.high) == pytest.approx((0.358934, 0.917776), abs=1e-5)
        assert grade.half["rate"] == pytest.approx(0.65)
        assert grade.half["n"] == 10

        def beta(a, b):
            return math.gamma(a) * math.gamma(b) / math.gamma(a + b)

        chance = sum(math.comb(7, k) * beta(5.5 + k, 9.5 - k) / beta(5.5, 2.5) for k in range(5))
        assert grade.chance_below == pytest.approx(chance, abs=1e-9)
        # Under the other rule the chance is that of as many points among ten new rows.
        grade = only(grade_submission(folder, {"aot": 0.7}, rule="half", **assets))
        assert (grade.passed, grade.figure) == (False, pytest.approx(0.65))
        assert grade.chance_below == chance_below(5, 10, 0.7, ties=3)
        # At the threshold is passed.
        grades = [only(grade_submission(folder, {"aot": at}, rule="half", **assets)) for at in (0.65, 0.66)]
        assert [grade.passed for grade in grades] == [True, False]

    def test_what_does_not_count_and_the_order_of_showing(self, folder, assets):
        """5 wins, 2 ties of identical texts, and 3 wrong answers, of which this judge prefers the one shown first.

        Those 3 and the ties do not count: 5 of 10 rows. Both orders say the same on 7 of 10; the response shown first
        wins half of the passes there and all of them on the other 3: (7 / 2 + 3) / 10 - 1/2 = 0.15.
        """
        write_policy(folder, "aot", response_rows(plan(win=5, tie=2, loss=3)))

        def first_of_wrong_ones(prompt, a, b):
            return "A" if "wrong" in (a, b) or len(a) > len(b) else "B"

        grade = only(grade_submission(folder, {"aot": 0.7}, judge=first_of_wrong_ones, **assets))
        assert (grade.n, grade.n_total, grade.figure) == (5, 10, 1.0)
        assert (grade.agreement_rate, grade.position_bias) == (pytest.approx(0.7), pytest.approx(0.15))

    def test_empty_responses_leave_one_rule_and_lose_under_the_other(self, folder, assets):
        """4 wins, 4 losses, 2 empty: 4 / 8, and 4 / 10; each empty one is a warning by file and row_id."""
        path = write_policy(folder, "aot", response_rows(plan(win=4, loss=4, empty=2)))
        grade = only(grade_submission(folder, {"aot": 0.5}, **assets))
        assert (grade.passed, grade.figure, grade.n) == (True, 0.5, 8)
        assert grade.half["rate"] == pytest.approx(0.4)
        assert grade.warnings == [f"{path}: row_id row-{word}: the response is empty" for word in ("castle", "cat")]

    def test_nothing_settled_is_a_failure(self, folder, assets):
        write_policy(folder, "aot", response_rows(plan(tie=10)))
        grade = only(grade_submission(folder, {"aot": 0.0}, **assets))
        assert (grade.passed, grade.figure, grade.chance_below) == (False, None, None)
        assert grade.reason == "no comparison counts"
        assert grade.half["rate"] == 0.5

    def test_a_response_cut_at_the_limit_is_judged_as_cut(self, folder, assets):
        """The same answer as the base's, cut at the 9 tokens that are allowed: worse than the base's."""
        rows = response_rows(plan(tie=10))
        base = [{**row, "generated_num_tokens": 8} for row in rows]
        assets["base_jsonl"] = str(write_rows(folder.parent / "short.jsonl", base))
        write_policy(folder, "aot", rows)
        grade = only(grade_submission(folder, {"aot": 0.5}, max_new_tokens=9, **assets))
        assert (grade.figure, grade.n) == (0.0, 10)

    def test_bad_rows_fail_the_file_and_are_not_judged(self, folder, assets):
        rows = response_rows(plan(win=10))
        rows[0]["generated_num_tokens"] = 300
        rows[1]["row_id"] = rows[2]["row_id"]
        path = write_policy(folder, "aot", rows)

        def never(prompt, a, b):
            pytest.fail("a file that cannot be graded was judged")

        grade = only(grade_submission(folder, {"aot": 0.5}, judge=never, **assets))
        assert (grade.passed, grade.figure, grade.reason) == (False, None, "4 bad rows")
        assert grade.problems == [
            f"{path}: row_id row-beach: duplicate: on lines 2 and 3",
            f"{path}: row_id row-banana: missing",
            f"{path}: row_id row-axe: over the token budget: generated_num_tokens is 300, at most 256 are allowed",
            f"{path}: row_id row-beach: prompt_text is not the benchmark's for this row_id",
        ]

    def test_too_many_errors(self, folder, assets):
        write_policy(folder, "aot", response_rows(plan(win=10)))

        def fails(prompt, a, b):
            if "axe" in prompt[0]["content"] or "cat " in prompt[0]["content"]:
                raise JudgeError("no answer")
            return "A" if len(a) > len(b) else "B"

        failed = only(grade_submission(folder, {"aot": 0.5}, judge=fails, max_error_fraction=0.1, **assets))
        assert not failed.passed and "2 of 10 rows could not be judged" in failed.reason
        grade = only(grade_submission(folder, {"aot": 0.5}, judge=fails, max_error_fraction=0.2, **assets))
        assert (grade.figure, grade.n) == (1.0, 8)
        assert grade.details["win_rate"]["n_errors"] == 2
        # A judge that calls comparisons about cats unfit.

        def longer(prompt, a, b):
            return Judgement("A" if len(a) > len(b) else "B", usable="cat " not in prompt[0]["content"])

        grade = only(grade_submission(folder, {"aot": 0.5}, judge=longer, **assets))
        assert (grade.figure, grade.n, grade.half["rate"]) == (1.0, 9, 1.0)


class TestRewardModels:
    def test_ties_are_wrong(self, folder, assets, caplog):
        """Margins 1, 2, 0, -1: 2 of 4. Another 4 have under 3 wins, at Beta(5/2, 5/2), with 1 less the chances of

        3: 4 (5/2 7/2 9/2)(5/2) / (5 6 7 8) = 0.234375, and of 4: (5/2 7/2 9/2 11/2) / (5 6 7 8) = 0.128906."""
        write_scores(folder, [1.0, 2.0, 0.0, -1.0])
        grade = only(grade_submission(folder, {"reward_model": 0.74}, **assets))
        assert (grade.passed, grade.figure, grade.n) == (False, 0.5, 4)
        assert grade.measure == "accuracy"
        assert grade.chance_below == pytest.approx(1 - 0.234375 - 0.128906, abs=1e-6)
        assert grade.half is grade.position_bias is None
        assert (grade.n_total, grade.details["ties"], grade.warnings) == (4, 1, [])
        # Constant scores: not the wrong way round, but no order at all; and it is said.
        write_scores(folder, [0.0] * 4)
        grade = only(grade_submission(folder, {"reward_model": 0.74}, **assets))
        (warning,) = grade.warnings
        assert "all 4 pairs are tied" in warning and (grade.passed, grade.figure) == (False, 0.0)
        assert "worse than chance" not in caplog.text and "all 4 pairs are tied" in caplog.text


class TestSubmission:
    THRESHOLDS = {"reward_model": 0.7, "dpo": 0.6, "aot": 0.6, "offline_best": 0.8, "online_best": 0.6}

    def test_an_incomplete_folder(self, folder, assets):
        write_policy(folder, "aot", response_rows(plan(win=10)))
        write_rows(folder / "part2" / "online_best.jsonl", response_rows(plan(win=7, loss=3)))
        result = grade_submission(folder, self.THRESHOLDS, **assets)
        assert {g.method: (g.passed, g.reason) for g in result.grades} == {
            "reward_model": (False, "missing"),
            "dpo": (False, "missing"),
            "aot": (True, None),
            "offline_best": (False, "missing"),
            "online_best": (True, None),
        }
        assert result.part_two is True
        # Two files of ten rows, each in both orders.
        assert result.usage["calls"] == 40
        assert result.to_dict()["passed"] == 2
        json.dumps(result.to_dict(), allow_nan=False)
        (folder / "part2" / "online_best.jsonl").rename(folder / "part2" / "offline_best.jsonl")
        (folder / "policy_generations" / "aot.jsonl").unlink()
        assert grade_submission(folder, self.THRESHOLDS, **assets).part_two is False
        result = grade_submission(folder, {"aot": 0.5}, **assets)
        assert result.part_two is result.usage is None

    def test_thresholds_of_a_file_and_a_method_of_ones_own(self, folder, assets, tmp_path):
        path = tmp_path / "thresholds.json"
        path.write_text('{"simpo": 0.5}')
        write_policy(folder, "simpo", response_rows(plan(win=6, loss=4)))
        assert only(grade_submission(folder, path, **assets)).passed

    def test_refusals(self, folder, assets):
        assert_refused(lambda: grade_submission(folder, {"aot": 0.5}, rule="strict", **assets), "rule", "agreed, half")
        messages = [{"role": "user", "content": "Who are you?"}]
        prompts = [{"row_id": f"row-{word}", "prompt_messages": messages} for word in WORDS]
        write_rows(folder.parent / "assets" / "prompts.jsonl", prompts)
        asked = partial(grade_submission, folder, {"aot": 0.5}, **assets)
        assert_refused(asked, "row_id row-axe", "embedded task")
