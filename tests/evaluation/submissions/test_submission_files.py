"""Rows and files of submissions and benchmarks: what is read, how a file resumes, and what is said of damaged rows."""

import json

import pytest

from tests.support.files import read_rows, write_rows
from tests.support.public_evaluation import response, write_prompts
from trl_ext.evaluation.submissions.assets import load_base, load_pairs, load_prompts, load_thresholds, token_counter
from trl_ext.evaluation.submissions.row_files import RowFile
from trl_ext.evaluation.submissions.rows import ScoreRow, read_pair_scores, read_responses
from trl_ext.evaluation.submissions.submission import generate_submission_file, submission_file

PROMPTS = [{"row_id": name, "prompt_text": f"Say {name} twice."} for name in ("cat", "dog", "owl", "fox")]


class TestReadResponses:
    def read(self, tmp_path, rows, **keywords):
        path = write_rows(tmp_path / "aot.jsonl", rows)
        responses, problems = read_responses(path, PROMPTS, **{"max_new_tokens": 10, **keywords})
        return responses, [(p.row_id, p.message, p.fatal) for p in problems]

    def test_good_rows_in_the_order_of_the_prompts(self, tmp_path):
        rows = [response(name, f"{name} {name}") for name in ("fox", "cat", "owl", "dog")]
        responses, problems = self.read(tmp_path, rows)
        assert [r.row_id for r in responses] == ["cat", "dog", "owl", "fox"]
        assert responses[3].text == "fox fox"
        assert problems == []

    def test_cut_at_the_limit(self, tmp_path):
        rows = [response(name, tokens=10 if name == "owl" else 9) for name in ("cat", "dog", "owl", "fox")]
        responses, _ = self.read(tmp_path, rows)
        assert [r.finished for r in responses] == [True, True, False, True]

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

    @pytest.mark.parametrize(
        "field, value, message",
        [
            ("response_text", None, "response_text: Input should be a valid string, got None"),
            ("generated_num_tokens", "7", "generated_num_tokens: Input should be a valid integer, got '7'"),
            ("generated_num_tokens", -1, "generated_num_tokens: Input should be greater than or equal to 0, got -1"),
            ("generated_num_tokens", True, "generated_num_tokens: Input should be a valid integer, got True"),
        ],
    )
    def test_wrong_types(self, tmp_path, field, value, message):
        rows = [response(name) for name in ("cat", "dog", "owl", "fox")]
        rows[2][field] = value
        _, problems = self.read(tmp_path, rows)
        assert problems == [("owl", message, True)]

    def test_tokens_are_counted_where_a_tokenizer_is_known(self, tmp_path):
        """Ten tokens are allowed and four of slack; the row says three. One word is one token here."""
        rows = [response(name) for name in ("cat", "dog", "owl", "fox")]
        rows[0]["response_text"] = "word " * 14
        rows[1]["response_text"] = "word " * 15
        _, problems = self.read(tmp_path, rows, count_tokens=lambda text: len(text.split()))
        message = "over the token budget: the text has 15 tokens, at most 10 are allowed"
        assert problems == [("dog", message, True)]

    def test_lines_that_do_not_parse(self, tmp_path):
        path = tmp_path / "aot.jsonl"
        path.write_text('{"row_id": "cat"\n[1]\n')
        _, problems = read_responses(path, PROMPTS, max_new_tokens=10)
        assert "line 1: bad JSON" in str(problems[0])
        assert str(problems[0]).startswith(str(path))
        assert problems[1].message == "line 2: bad JSON: expected an object, got list"

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no file"):
            read_responses(tmp_path / "x.jsonl", PROMPTS, max_new_tokens=10)


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
        with pytest.raises(FileExistsError, match="made with max_new_tokens 4, not with max_new_tokens 8"):
            RowFile(path, ScoreRow, {**settings, "max_new_tokens": 8}, ["x", "y", "z"])
        with pytest.raises(
            FileExistsError, match=r"made with the model m \(aaaaaaaaaaaa\), not with the model n \(bbb"
        ):
            RowFile(path, ScoreRow, {**settings, "model": "n", "model_sha256": "b" * 64}, ["x", "y", "z"])
        assert len(read_rows(path)) == 3
        assert RowFile(path, ScoreRow, {"max_new_tokens": 8}, ["x"], overwrite=True).missing == ["x"]
        assert not path.exists()

    def test_rows_of_unknown_origin(self, tmp_path):
        path = write_rows(tmp_path / "rows.jsonl", [score_row("x")])
        with pytest.raises(FileExistsError, match=r"no rows.settings.json says how it was made: choose another --out"):
            RowFile(path, ScoreRow, {}, ["x"])

    @pytest.mark.parametrize(
        "content, message",
        [
            ('{"row_id": "x"}\n', "row_id x: chosen_score: Field required"),
            (json.dumps(score_row("x")) + '\n{"row', "line 2: bad JSON"),
            (json.dumps(score_row("x")) + "\n" + json.dumps(score_row("x")), "duplicate: on lines 1 and 2"),
            (json.dumps(score_row("y")), "row_id y: line 1: foreign"),
        ],
    )
    def test_damage(self, tmp_path, content, message):
        path = tmp_path / "rows.jsonl"
        RowFile(path, ScoreRow, {}, ["x"]).add([score_row("x")])
        path.write_text(content)
        with pytest.raises(ValueError, match=f"rows.jsonl: .*{message}.*; replace the file with --overwrite"):
            RowFile(path, ScoreRow, {}, ["x"])


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

    def test_other_prompts_need_their_base(self, tmp_path):
        path = write_prompts(tmp_path / "prompts.jsonl", ["Why?"])
        with pytest.raises(ValueError, match="row_id p0 is not one of the embedded prompts: .* --base_jsonl"):
            load_base(load_prompts(path))

    def test_wrong_kind_of_file(self, tmp_path):
        path = write_prompts(tmp_path / "prompts.jsonl", ["Why?"])
        with pytest.raises(ValueError, match="holds prompts; expected preference pairs"):
            load_pairs(path)

    def test_bad_base(self, tmp_path):
        prompts = load_prompts(write_prompts(tmp_path / "prompts.jsonl", ["Why?", "How?"]))
        path = write_rows(tmp_path / "base.jsonl", [response("p1", prompt_text="How?")])
        with pytest.raises(ValueError, match=r"base.jsonl: row_id p0: missing"):
            load_base(prompts, path)

    def test_counting_tokens(self, tiny_model_path):
        assert token_counter(tiny_model_path)("abc é") == 6, "bytes: é has two"
        assert token_counter("toy")("cat, dog, fox, bear.") > 0
        with pytest.raises(FileNotFoundError, match="no tokenizer"):
            token_counter("./nowhere.json")

    @pytest.mark.parametrize(
        "thresholds, message",
        [
            ({"aot": 72}, "aot: Input should be less than or equal to 1"),
            ({"aot": True}, "aot: Input should be a valid number"),
            ({"../aot": 0.5}, "../aot.*: String should match pattern"),
            ({}, "Dictionary should have at least 1 item"),
        ],
    )
    def test_bad_thresholds(self, thresholds, message):
        with pytest.raises(ValueError, match=message):
            load_thresholds(thresholds)

    def test_the_courses_files(self, wildchat):
        """128 prompts, their base responses, of which 59 were cut at 256 tokens, and 256 pairs."""
        prompts = load_prompts(wildchat / "public_test_gen_prompts_128.jsonl")
        base = load_base(prompts, wildchat / "public_test_gen_base_responses_128.jsonl")
        assert len(prompts) == len(base) == 128
        assert sum(not r.finished for r in base) == 59
        assert len(load_pairs(wildchat / "public_test_prefs_256.jsonl")) == 256


def test_submission_files():
    assert submission_file("reward_model") == "reward_model/public_test_pref_scores.jsonl"
    assert submission_file("online_best") == "part2/online_best.jsonl"
    assert submission_file("drgrpo") == "policy_generations/drgrpo.jsonl"
