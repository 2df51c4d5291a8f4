"""Rows and files of submissions, and their grades when wins, losses and ties are planted."""

import math

from tests.support.files import write_rows
from tests.support.public_evaluation import (
    response,
)
from trl_ext.evaluation.submissions.rows import read_pair_scores, read_responses

PROMPTS = [{"row_id": name, "prompt_text": f"Say {name} twice."} for name in ("cat", "dog", "owl", "fox")]


class TestReadResponses:
    def read(self, tmp_path, rows, **keywords):
        path = write_rows(tmp_path / "aot.jsonl", rows)
        responses, problems = read_responses(path, PROMPTS, max_new_tokens=10, **keywords)
        return responses, [(p.row_id, p.message, p.fatal) for p in problems]

    def test_good_rows_in_the_order_of_the_prompts(self, tmp_path):
        """At the limit of 10 tokens a response is cut."""
        tokens = {"fox": 9, "cat": 9, "owl": 10, "dog": 9}
        responses, problems = self.read(tmp_path, [response(name, f"{name} {name}", tokens[name]) for name in tokens])
        assert [(r.row_id, r.finished) for r in responses] == [("cat", 1), ("dog", 1), ("owl", 0), ("fox", 1)]
        assert responses[3].text == "fox fox"
        assert problems == []

    def test_every_problem_is_named(self, tmp_path):
        rows = [
            response("cat", tokens=11),
            response("dog", text="  "),
            response("dog", text="again"),
            response("emu"),
            response("owl", prompt_text="Say something else."),
            {"prompt_text": "no id"},
        ]
        responses, problems = self.read(tmp_path, rows)
        assert problems == [
            ("dog", "duplicate: on lines 2 and 3", True),
            ("emu", "line 4: foreign: none of the 4 rows", True),
            ("None", "line 6: foreign: none of the 4 rows", True),
            ("fox", "missing", True),
            ("cat", "over the token budget: generated_num_tokens is 11, at most 10 are allowed", True),
            ("dog", "the response is empty", False),
            ("owl", "prompt_text is not the benchmark's for this row_id", True),
        ]
        assert [r.row_id for r in responses] == ["dog"]

    def test_damaged_rows(self, tmp_path):
        """Of the four prompts, each with a wrong value; and lines that are no rows."""
        cases = {
            "cat": ("response_text", None, "a valid string, got None"),
            "dog": ("generated_num_tokens", "7", "a valid integer, got '7'"),
            "owl": ("generated_num_tokens", -1, "greater than or equal to 0, got -1"),
            "fox": ("generated_num_tokens", True, "a valid integer, got True"),
        }
        rows = [{**response(name), field: value} for name, (field, value, _) in cases.items()]
        _, problems = self.read(tmp_path, rows)
        messages = [(name, f"{field}: Input should be {told}", True) for name, (field, _, told) in cases.items()]
        assert problems == messages
        _, problems = self.read(tmp_path, ['{"row_id": "cat"', "[1]"])
        assert problems[0][1].startswith("line 1: bad JSON")
        assert problems[1][1] == "line 2: bad JSON: expected an object, got list"

    def test_tokens_are_counted_where_a_tokenizer_is_known(self, tmp_path):
        """Ten tokens are allowed and four of slack; the row says three. One word is one token here."""
        words = {"cat": 14, "dog": 15, "owl": 1, "fox": 1}
        rows = [response(name, "word " * count) for name, count in words.items()]
        _, problems = self.read(tmp_path, rows, count_tokens=lambda text: len(text.split()))
        message = "over the token budget: the text has 15 tokens, at most 10 are allowed"
        assert problems == [("dog", message, True)]


def score_row(row_id, chosen=1.0, rejected=0.5):
    return {"row_id": row_id, "chosen_score": chosen, "rejected_score": rejected}


def test_scores_and_their_problems(tmp_path):
    rows = [score_row("b", 1, -0.5), score_row("a", math.nan), score_row("c", 0.5, "1"), score_row("e", 2, 3)]
    path = write_rows(tmp_path / "scores.jsonl", [*rows, {"row_id": "d", "chosen_score": math.inf}])
    scores, problems = read_pair_scores(path, list("eabcd"))
    assert scores == ([2, 1], [3, -0.5])
    assert [str(problem).removeprefix(f"{path}: row_id ") for problem in problems] == [
        "a: chosen_score: Input should be a finite number, got nan",
        "c: rejected_score: Input should be a valid number, got '1'",
        "d: chosen_score: Input should be a finite number, got inf",
        "d: rejected_score: Field required",
    ]
