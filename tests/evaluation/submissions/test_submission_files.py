"""Rows and files of submissions and benchmarks: what is read, how a file resumes, and what is said of damaged rows."""

import json
from functools import partial

import pytest

from tests.support.files import read_rows, write_rows
from tests.support.public_evaluation import response, write_prompts
from tests.support.refusals import assert_refused
from trl_ext.evaluation.submissions.assets import load_base, load_pairs, load_prompts, load_thresholds, token_counter
from trl_ext.evaluation.submissions.row_files import RowFile
from trl_ext.evaluation.submissions.rows import ScoreRow, read_pair_scores, read_responses
from trl_ext.evaluation.submissions.submission import generate_submission_file

PROMPTS = [{"row_id": name, "prompt_text": f"Say {name} twice."} for name in ("cat", "dog", "owl", "fox")]


class TestReadResponses:
    def read(self, tmp_path, rows, **keywords):
        path = write_rows(tmp_path / "aot.jsonl", rows)
        responses, problems = read_responses(path, PROMPTS, **{"max_new_tokens": 10, **keywords})
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
        rows = [response(name) for name in ("cat", "dog", "owl", "fox")]
        rows[0]["response_text"] = "word " * 14
        rows[1]["response_text"] = "word " * 15
        _, problems = self.read(tmp_path, rows, count_tokens=lambda text: len(text.split()))
        message = "over the token budget: the text has 15 tokens, at most 10 are allowed"
        assert problems == [("dog", message, True)]


class TestReadScores:
    def test_order_and_problems(self, tmp_path):
        path = tmp_path / "scores.jsonl"
        path.write_text(
            '{"row_id": "b", "chosen_score": 1, "rejected_score": -0.5}\n'
            '{"row_id": "a", "chosen_score": NaN, "rejected_score": 2.0}\n'
            '{"row_id": "c", "chosen_score": 0.5, "rejected_score": "1"}\n'
            '{"row_id": "d", "chosen_score": Infinity}\n'
            '{"row_id": "e", "chosen_score": 2, "rejected_score": 3}\n'
        )
        scores, problems = read_pair_scores(path, list("eabcd"))
        assert scores == ([2, 1], [3, -0.5])
        assert [str(problem) for problem in problems] == [
            f"{path}: row_id a: chosen_score: Input should be a finite number, got nan",
            f"{path}: row_id c: rejected_score: Input should be a valid number, got '1'",
            f"{path}: row_id d: chosen_score: Input should be a finite number, got inf",
            f"{path}: row_id d: rejected_score: Field required",
        ]


def score_row(row_id, chosen=1.0):
    return {"row_id": row_id, "chosen_score": chosen, "rejected_score": 0.5}


class TestRowFile:
    def test_resumes_and_refuses(self, tmp_path):
        path, settings = tmp_path / "rows.jsonl", {"model": "m", "model_sha256": "a" * 64, "max_new_tokens": 4}
        first = RowFile(path, ScoreRow, settings, ["x", "y", "z"])
        first.add([score_row("z", 3)])
        free = {"model": "the same from elsewhere", "batch_size": 8}
        again = RowFile(path, ScoreRow, {**settings, **free}, ["x", "y", "z"])
        assert again.missing == ["x", "y"]
        again.add([score_row("x", 1), score_row("y", 2)])
        assert [row["chosen_score"] for row in read_rows(path)] == [1, 2, 3]
        for changes, words in (
            ({"max_new_tokens": 8}, ["made with max_new_tokens 4", "not with max_new_tokens 8"]),
            ({"model": "n", "model_sha256": "b" * 64}, ["the model m (aaaaaaaaaaaa)", "not with the model n (bbb"]),
        ):
            other = partial(RowFile, path, ScoreRow, {**settings, **changes}, ["x", "y", "z"])
            assert_refused(other, *words, error=FileExistsError)
        assert len(read_rows(path)) == 3
        path.with_name("rows.settings.json").unlink()
        unknown = partial(RowFile, path, ScoreRow, settings, ["x"])
        assert_refused(unknown, "rows.settings.json", "choose another --out", error=FileExistsError)
        assert RowFile(path, ScoreRow, {"max_new_tokens": 8}, ["x"], overwrite=True).missing == ["x"]
        assert not path.exists()

    @pytest.mark.parametrize(
        "content, words",
        [
            ('{"row_id": "x"}\n', ["row_id x", "chosen_score: Field required"]),
            (json.dumps(score_row("x")) + '\n{"row', ["line 2: bad JSON"]),
            (json.dumps(score_row("x")) + "\n" + json.dumps(score_row("x")), ["row_id x", "lines 1 and 2"]),
            (json.dumps(score_row("y")), ["row_id y", "line 1: foreign"]),
        ],
    )
    def test_damage(self, tmp_path, content, words):
        path = tmp_path / "rows.jsonl"
        RowFile(path, ScoreRow, {}, ["x"]).add([score_row("x")])
        path.write_text(content)
        assert_refused(lambda: RowFile(path, ScoreRow, {}, ["x"]), str(path), *words, "--overwrite")


class TestAssets:
    def test_embedded(self):
        prompts = load_prompts()
        base = load_base(prompts)
        assert len(prompts) == len(base) == 400
        assert [r.row_id for r in base] == [row["row_id"] for row in prompts]
        assert base[0].text == prompts[0]["reference_response_text"]
        assert all(r.finished for r in base), "the embedded base ends every greedy response itself"
        assert len(load_pairs()) == 400

    def test_embedded_base_is_its_models_own(self, tmp_path):
        """Texts and token counts of the embedded base responses are what its model generates for them."""
        prompts = load_prompts()[:20]
        rows = [{"row_id": row["row_id"], "prompt_messages": row["prompt"]} for row in prompts]
        path = write_rows(tmp_path / "prompts.jsonl", rows)
        file = generate_submission_file("toy", tmp_path / "base.jsonl", prompts_jsonl=path, max_new_tokens=48)
        generated = [(row["response_text"], row["generated_num_tokens"]) for row in file.rows.values()]
        assert generated == [(r.text, r.tokens) for r in load_base(load_prompts(path))]

    def test_counting_tokens(self, tiny_model_path):
        assert token_counter(tiny_model_path)("abc é") == 6, "bytes: é has two"
        assert token_counter("toy")("cat, dog, fox, bear.") > 0

    def test_refusals(self, tmp_path):
        path = write_prompts(tmp_path / "prompts.jsonl", ["Why?", "How?"])
        prompts = load_prompts(path)
        base = write_rows(tmp_path / "base.jsonl", [response("p1", prompt_text="How?")])
        for call, words in (
            (lambda: load_base(prompts), ["row_id p0", "embedded", "--base_jsonl"]),
            (lambda: load_base(prompts, base), ["base.jsonl: row_id p0: missing"]),
            (lambda: load_pairs(path), ["holds prompts", "preference pairs"]),
            (lambda: load_thresholds({"aot": 72}), ["aot", "less than or equal to 1"]),
            (lambda: load_thresholds({"aot": True}), ["aot", "valid number"]),
            (lambda: load_thresholds({"../aot": 0.5}), ["../aot", "match pattern"]),
            (lambda: load_thresholds({}), ["at least 1 item"]),
        ):
            assert_refused(call, *words)
        for call in (
            lambda: read_responses(tmp_path / "x", PROMPTS, max_new_tokens=1),
            lambda: token_counter("./no.json"),
        ):
            assert_refused(call, "no ", error=FileNotFoundError)

    def test_the_courses_files(self, wildchat):
        """128 prompts, their base responses, of which 59 were cut at 256 tokens, and 256 pairs."""
        prompts = load_prompts(wildchat / "public_test_gen_prompts_128.jsonl")
        base = load_base(prompts, wildchat / "public_test_gen_base_responses_128.jsonl")
        assert len(prompts) == len(base) == 128
        assert sum(not r.finished for r in base) == 59
        assert len(load_pairs(wildchat / "public_test_prefs_256.jsonl")) == 256
