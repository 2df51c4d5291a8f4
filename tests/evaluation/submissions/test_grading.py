"""Rows and files of submissions, and their grades when wins, losses and ties are planted."""

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.files import write_rows
from tests.support.public_evaluation import (
    WORDS,
    plan,
    response,
    response_rows,
    write_assets,
    write_policy,
    write_prompts,
    write_scores,
)
from tests.support.refusals import assert_refused
from trl_ext.evaluation import JudgeError, grade_submission
from trl_ext.evaluation.submissions.assets import (
    load_base,
    load_pairs,
    load_prompts,
    load_thresholds,
    read_pair_scores,
    read_responses,
)
from trl_ext.evaluation.submissions.submission import generate_submission_file

GOOD = {name: response(name) for name in ("cat", "dog", "owl", "fox")}
PROMPTS = [{"row_id": name, "prompt_text": row["prompt_text"]} for name, row in GOOD.items()]
COUNT = "generated_num_tokens: Input should be"
BUDGET = "over the token budget of 10: generated_num_tokens is"


class TestReadResponses:
    @pytest.mark.parametrize(
        "name, row, message",
        [
            ("cat", response("cat", tokens=11), f"row_id cat: {BUDGET} 11"),
            ("new", GOOD["dog"], "line 5: row_id dog: row_id: already used on line 2"),
            ("new", response("emu"), "line 5: row_id emu: foreign: none of the 4 rows"),
            ("new", {"prompt_text": "no id"}, "line 5: foreign: none of the 4 rows"),
            ("new", "[1]", "line 5: bad JSON: expected an object, got list"),
            ("fox", None, "row_id fox: missing"),
            (
                "owl",
                response("owl", prompt_text="?"),
                "row_id owl: prompt_text is not the benchmark's",
            ),
            (
                "cat",
                GOOD["cat"] | {"response_text": None},
                "line 1: row_id cat: response_text: Input should",
            ),
            ("dog", response("dog", tokens="7"), f"line 2: row_id dog: {COUNT} a valid integer"),
            ("dog", response("dog", tokens=-1), f"line 2: row_id dog: {COUNT} greater than or equal to 0"),
        ],
    )
    def test_every_problem_is_named(self, tmp_path, name, row, message):
        rows = [one for one in {**GOOD, name: row}.values() if one is not None]
        found = read_responses(write_rows(tmp_path / "aot.jsonl", rows), PROMPTS, max_new_tokens=10)
        assert [problem.startswith(message) for problem in found.problems] == [True] and not found.warnings

    def test_good_rows_in_the_order_of_the_prompts(self, tmp_path):
        """At the limit of 10 tokens a response is truncated."""
        tokens = {"fox": 9, "cat": 9, "owl": 10, "dog": 9}
        rows = [response(name, f"{name} {name}", tokens[name]) for name in tokens]
        responses, *problems = read_responses(write_rows(tmp_path / "aot.jsonl", rows), PROMPTS, max_new_tokens=10)
        assert [(r.row_id, r.finished) for r in responses] == [("cat", 1), ("dog", 1), ("owl", 0), ("fox", 1)]
        assert responses[3].text == "fox fox" and problems == [[], []]


def test_scores_and_their_problems(tmp_path):
    scores = {"b": (1, -0.5), "a": (math.nan, 1), "c": (0.5, "1"), "e": (2, 3)}
    rows = [{"row_id": name, "chosen_score": own, "rejected_score": other} for name, (own, other) in scores.items()]
    found, problems, _ = read_pair_scores(write_rows(tmp_path / "scores.jsonl", rows), list("eabc"))
    assert found == ([2, 1], [3, -0.5])
    assert problems == [
        "line 2: row_id a: chosen_score: Input should be a finite number",
        "line 3: row_id c: rejected_score: Input should be a valid number",
    ]


class TestAssets:
    def test_embedded(self):
        """The embedded base ends every greedy response itself."""
        prompts, base = load_prompts(), load_base(load_prompts())
        assert len(prompts) == len(load_pairs()) == 400 and all(one.finished for one in base)
        expected = [(row["row_id"], row["reference_response_text"]) for row in prompts]
        assert [(one.row_id, one.text) for one in base] == expected

    def test_embedded_base_is_its_models_own(self, tmp_path):
        """Texts and token counts of the embedded base responses are what its model generates for them."""
        prompts = load_prompts()[:20]
        rows = [{"row_id": row["row_id"], "prompt_messages": row["prompt"]} for row in prompts]
        path = write_rows(tmp_path / "prompts.jsonl", rows)
        found = generate_submission_file("toy", tmp_path / "base.jsonl", prompts_jsonl=path, max_new_tokens=48)
        generated = [(row["response_text"], row["generated_num_tokens"]) for row in found]
        assert generated == [(r.text, r.tokens) for r in load_base(load_prompts(path))]

    def test_refusals(self, tmp_path):
        path = write_prompts(tmp_path / "prompts.jsonl", ["Why?", "How?"])
        prompts = load_prompts(path)
        base = write_rows(tmp_path / "base.jsonl", [response("p1", prompt_text="How?")])
        for call, words in (
            (lambda: load_base(prompts), ["row_id p0", "embedded", "--base_jsonl"]),
            (lambda: load_base(prompts, base), ["base.jsonl: row_id p0: missing"]),
            (lambda: load_pairs(path), ["holds prompts", "preference pairs"]),
            (lambda: load_thresholds(write_rows(tmp_path / "t.json", [{"aot": 72}])), ["t.json: aot", "equal to 1"]),
            (lambda: load_thresholds(write_rows(tmp_path / "e.json", [{}])), ["e.json", "at least 1 item"]),
        ):
            assert_refused(call, *words)


@pytest.fixture
def assets(tmp_path):
    return write_assets(tmp_path / "assets")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "submission"
    path.mkdir()
    return path


def only(result: dict) -> SimpleNamespace:
    (grade,) = result["grades"]
    return SimpleNamespace(**grade)


class TestPolicies:
    def test_by_hand(self, folder, assets):
        """5 wins, 3 ties, 2 losses: 5 / 7 where ties are dropped, (5 + 1.5) / 10 where they are halves."""
        write_policy(folder, "aot", response_rows(plan(win=5, tie=3, loss=2)))
        grade = only(grade_submission(folder, {"aot": 0.7}, **assets))
        assert grade.passed
        assert (grade.figure, grade.n, grade.measure) == (pytest.approx(5 / 7), 7, "win rate")
        assert (grade.low, grade.high) == pytest.approx((0.358934, 0.917776), abs=1e-5)
        assert (grade.half["rate"], grade.half["n"]) == (pytest.approx(0.65), 10)
        # At the threshold is passed.
        grades = [only(grade_submission(folder, {"aot": at}, **assets)) for at in (5 / 7, 0.72)]
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
        write_policy(folder, "aot", response_rows(plan(win=4, loss=4, empty=2)))
        grade = only(grade_submission(folder, {"aot": 0.5}, **assets))
        assert (grade.passed, grade.figure, grade.n, grade.half["rate"]) == (True, 0.5, 8, pytest.approx(0.4))
        assert grade.warnings == [f"row_id row-{word}: the response is empty" for word in ("castle", "cat")]

    def test_nothing_settled_is_a_failure(self, folder, assets):
        write_policy(folder, "aot", response_rows(plan(tie=10)))
        grade = only(grade_submission(folder, {"aot": 0.0}, **assets))
        found = (grade.passed, grade.figure, grade.reason, grade.half["rate"])
        assert found == (False, None, "no comparison counts", 0.5)

    def test_a_response_cut_at_the_limit_is_judged_as_cut(self, folder, assets):
        """The same answer as the base's, cut at the 9 tokens that are allowed: worse than the base's."""
        rows = response_rows(plan(tie=10))
        base = [{**row, "generated_num_tokens": 8} for row in rows]
        assets["base_jsonl"] = str(write_rows(folder.parent / "short.jsonl", base))
        write_policy(folder, "aot", rows)
        grade = only(grade_submission(folder, {"aot": 0.5}, max_new_tokens=9, **assets))
        assert (grade.figure, grade.n) == (0.0, 10)

    def test_too_many_errors(self, folder, assets):
        write_policy(folder, "aot", response_rows(plan(win=10)))

        def fails(prompt, a, b):
            if "axe" in prompt[0]["content"] or "cat " in prompt[0]["content"]:
                raise JudgeError("no answer")
            return "A" if len(a) > len(b) else "B"

        failed = only(grade_submission(folder, {"aot": 0.5}, judge=fails, max_error_fraction=0.1, **assets))
        assert not failed.passed and "2 of 10 rows could not be judged" in failed.reason
        grade = only(grade_submission(folder, {"aot": 0.5}, judge=fails, max_error_fraction=0.2, **assets))
        assert (grade.figure, grade.n, grade.half["n"]) == (1.0, 8, 8)


class TestRewardModels:
    def test_ties_are_wrong(self, folder, assets, caplog):
        """Margins 1, 2, 0, -1: 2 of 4."""
        write_scores(folder, [1.0, 2.0, 0.0, -1.0])
        grade = only(grade_submission(folder, {"reward_model": 0.74}, **assets))
        assert (grade.passed, grade.figure, grade.n) == (False, 0.5, 4)
        assert grade.measure == "accuracy"
        assert grade.half is grade.position_bias is None
        assert (grade.n_total, grade.warnings) == (4, [])
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
        assert {g["method"]: (g["passed"], g["reason"]) for g in result["grades"]} == {
            "reward_model": (False, "missing"),
            "dpo": (False, "missing"),
            "aot": (True, None),
            "offline_best": (False, "missing"),
            "online_best": (True, None),
        }
        assert result["part_two"] is True
        # Two files of ten rows, each in both orders.
        assert result["usage"]["calls"] == 40
        assert result["passed"] == 2
        json.dumps(result, allow_nan=False)
        (folder / "part2" / "online_best.jsonl").rename(folder / "part2" / "offline_best.jsonl")
        (folder / "policy_generations" / "aot.jsonl").unlink()
        assert grade_submission(folder, self.THRESHOLDS, **assets)["part_two"] is False
        result = grade_submission(folder, {"aot": 0.5}, **assets)
        assert result["part_two"] is result["usage"] is None

    def test_thresholds_of_a_file_and_a_method_of_ones_own(self, folder, assets, tmp_path):
        path = write_rows(tmp_path / "thresholds.json", [{"simpo": 0.5}])
        write_policy(folder, "simpo", response_rows(plan(win=6, loss=4)))
        assert only(grade_submission(folder, load_thresholds(path), **assets)).passed

    def test_refusals(self, folder, assets):
        write_prompts(folder.parent / "assets" / "prompts.jsonl", {f"row-{word}": "Who are you?" for word in WORDS})
        asked = partial(grade_submission, folder, {"aot": 0.5}, **assets)
        assert_refused(asked, "row_id row-axe", "embedded task")
