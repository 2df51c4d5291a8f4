"""Tasks as rows: reading them, their checks, `trl-ext evaluate`, and results of lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import REPOSITORY
from tests.support.refusals import assert_one_line, assert_refused
from trl_ext.evaluation import OpenAIModel, Usage, write_report
from trl_ext.evaluation.reporting.results import read_harness
from trl_ext.evaluation.tasks import __main__ as command
from trl_ext.evaluation.tasks.checks import make_check
from trl_ext.evaluation.tasks.evaluate import difference
from trl_ext.evaluation.tasks.task import Task, fill, read_rows, read_task, task_names
from trl_ext.files import write_json, write_json_lines
from trl_ext.rollouts import Generation

DATA = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
ROWS = [
    {"q": "What is 2 + 3?", "a": 5.0, "tags": ["x"], "hint": None},
    {"q": "What is 12 + 30?", "a": 42.0, "tags": []},
]
TASK = 'data: rows.json\nprompt: "{q}"\nanswer: "{a}"\ncheck: contains\nmax_new_tokens: 8\n'


@pytest.fixture
def own(tmp_path) -> Path:
    """A user's task and its data."""
    write_json(tmp_path / "rows.json", ROWS)
    (tmp_path / "mine.yaml").write_text(TASK)
    return tmp_path / "mine.yaml"


def said(text: str) -> Generation:
    return Generation([1], [2], text, True)


def run(capsys, *flags) -> tuple[str, str]:
    """What the command prints and how it fails, if it does."""
    try:
        command.main([str(flag) for flag in flags])
    except SystemExit as end:
        assert end.code == 2
    captured = capsys.readouterr()
    return captured.out, captured.err


class TestRows:
    @pytest.mark.parametrize("name", task_names())
    def test_every_task_reads_its_data(self, name):
        _, task, home = read_task(name)
        if not any((folder / task.data).is_file() for folder in (home, DATA)):
            pytest.skip(f"{task.data} is not here")
        rows = read_rows(task, [home, DATA])[:3]
        assert len(rows) == 3 and len({row["row_id"] for row in rows}) == 3
        assert all(row["prompt"] for row in rows)
        if name == "svamp":
            assert (rows[0]["answer"], rows[0]["prompt"][:20]) == ("51", "Each pack of dvds co")
        if task.check != "pairs":
            answers = [row.get("answer", "") for row in rows]
            texts = [f"<answer> {a} </answer> \\boxed{{{a}}} {a}" for a in answers]
            metrics = make_check(task, rows)(rows, [said(f"</think> {text}") for text in texts])
            assert all(one.get("accuracy", 1) == 1 for one in metrics), "the right answers are right"

    def test_columns(self):
        row = {"a": 5.0, "b": 2.5, "c": "{a}", "d": [{"role": "user", "content": "Q"}], "e": ""}
        assert fill("{a} {b} {c} {x y} \\boxed{} {e}", row) == "5 2.5 {a} {x y} \\boxed{} "
        for empty, name in ((None, "null"), (float("nan"), "nan")):
            changed = {**row, "e": empty}
            assert_refused(lambda row=changed: fill("{a}{e}", row), f"the column 'e' is {name}", "give a text")
        assert fill("{d}", row) == row["d"]
        assert fill("{a} {b}", {"a": 1234567.0, "b": 1234.5678}) == "1234567 1234.5678", "no digit is lost"

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ("prompt:", "promt:", ["mine.yaml", "'promt'", "did you mean 'prompt'?"]),
            ("max_new_tokens: 8", "max_new_tokens: many", ["max_new_tokens", "valid integer"]),
            ("check: contains\n", "", ["mine.yaml", "check: Field required"]),
            ("contains", "contain", ["check", "'contain'", "did you mean 'contains'?", "Known: r1_zero"]),
            ("{q}", "{question}", ["rows.json: row 1", "no column 'question'", "q, a, tags, hint"]),
            ("{q}", "{q} {hint}", ["rows.json: row 1", "'hint' is null", "give a text"]),
            ('answer: "{a}"\n', "", ["contains needs the key answer"]),
            ("rows.json", "none.json", ["no file none.json in"]),
            ("contains", "rubric", ["rubric needs the key judge"]),
            ("contains", "pairs", ["pairs needs chosen and rejected in every row"]),
            ("contains", "countdown", ["countdown needs numbers in every row"]),
            (TASK, "- 1", ["a task is a mapping of data, layout"]),
        ],
    )
    def test_refusals(self, own, capsys, old, new, words):
        own.write_text(TASK.replace(old, new))
        _, error = run(capsys, "toy", "--task", own, "--output_dir", own.parent / "out")
        assert_one_line(error, ["error: ", *words])
        assert not (own.parent / "out").exists()


class TestChecks:
    def test_built_in(self):
        for check, answer, text, expected in (
            ("exact", "forty two", " forty  Two", {"accuracy": 1}),
            ("exact", "forty two", "forty two.", {"accuracy": 0}),
            ("contains", "forty two", "It is FORTY two.", {"accuracy": 1}),
            ("gsm8k", "42", "40 and then 2", {"accuracy": 0, "format": 1}),
        ):
            task = Task(data="", prompt="", check=check, answer="{a}")
            assert make_check(task, [])([{"answer": answer}], [said(text)]) == [expected]

    def test_pairs_in_sum_and_per_token(self):
        """Chosen -1 -1 -1 and rejected -2: less likely in sum, likelier per token."""
        check = make_check(Task(data="", prompt="", check="pairs"), [])
        pair = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0])
        assert check([{}], [pair]) == [{"summed": 0.0, "per token": 1.0}]

    def test_a_function_of_a_file(self, tmp_path):
        (tmp_path / "own.py").write_text("def short(text, row):\n    return len(text) < row['limit']\n")
        check = make_check(Task(data="", prompt="", check=f"{tmp_path / 'own.py'}:short"), [])
        assert check([{"limit": 3}] * 2, [said("ab"), said("abc")]) == [{"accuracy": 1}, {"accuracy": 0}]

    def test_a_judge_with_a_rubric(self, monkeypatch):
        def complete(self, instructions, question, schema, read):
            return read(json.dumps({"reason": "", "met": "polite" in question})), Usage()

        monkeypatch.setattr(OpenAIModel, "complete", complete)
        rubric = {"judge": "m", "base_url": "http://x/v1", "rubric": ["is kind", "is polite"]}
        task = Task(data="", prompt="", check="rubric", **rubric)
        rows = [{"prompt": "Q"}, {"prompt": "Q", "rubric": ["is polite"]}]
        assert make_check(task, rows)(rows, [said("Hi"), said("Ho")]) == [{"rubric": 0.5}, {"rubric": 1.0}]


def test_differences_are_of_the_rows_that_both_have():
    """Row b has no score before, and row c is new: only a is compared."""
    columns = {"a": 1, "b": None}, {"a": 0, "b": 1, "c": 1}
    rows = [[{"row_id": row_id, "reward/score": one} for row_id, one in scores.items()] for scores in columns]
    found = difference(*rows)["score"]
    assert (found["mean"], found["n"]) == (-1, 1)


class TestRun:
    def test_a_killed_run_goes_on_and_is_compared(self, own, monkeypatch, capsys):
        folder = own.parent
        flags = ["toy", "--task", own, "--batch_size", 1, "--output_dir"]
        out, error = run(capsys, *flags, folder / "all", "--json")
        results = json.loads(out)
        assert results == json.loads((folder / "all" / "results.json").read_text()), error
        assert results["tasks"]["mine"]["accuracy"]["n"] == 2
        whole = (folder / "all" / "generations.jsonl").read_bytes()
        shutil.copytree(folder / "all", folder / "killed")
        first, second = whole.splitlines(keepends=True)
        (folder / "killed" / "generations.jsonl").write_bytes(first + second[:20])
        table, _ = run(capsys, *flags, folder / "killed", "--compare", folder / "all")
        assert (folder / "killed" / "generations.jsonl").read_bytes() == whole
        assert "accuracy" in table and f"minus {folder / 'all'}" in table and "cut at the token limit" in table
        # A finished run is read again without the model.
        monkeypatch.setattr("trl_ext.evaluation.tasks.evaluate.load_policy", lambda *_: pytest.fail("it was loaded"))
        assert run(capsys, *flags, folder / "killed", "--compare", folder / "all")[0] == table
        _, error = run(capsys, *flags, folder / "killed", "--max_new_tokens", 9)
        assert "an evaluation of another model, task or data: give another --output_dir" in error
        _, error = run(capsys, *flags, folder / "new", "--max_new_tokens", 9, "--compare", folder / "all")
        assert "its max_new_tokens is 8, not 9" in error and not (folder / "new").exists()
        write_json(folder / "rows.json", [ROWS[0], {**ROWS[1], "a": 43}])
        assert "another model, task or data" in run(capsys, *flags, folder / "killed")[1], "no stale figures"

    def test_a_limit_may_be_raised_and_not_lowered(self, own, capsys):
        folder = own.parent / "out"
        flags = ["toy", "--task", own, "--batch_size", 1, "--output_dir", folder, "--json"]
        first = json.loads(run(capsys, *flags, "--limit", 1)[0])
        assert first["tasks"]["mine"]["accuracy"]["n"] == 1
        begun = (folder / "generations.jsonl").read_bytes()
        for limit in (2, 3):
            whole = json.loads(run(capsys, *flags, "--limit", limit)[0])
            assert whole["tasks"]["mine"]["accuracy"]["n"] == 2
        assert (folder / "generations.jsonl").read_bytes().startswith(begun)
        assert f"{folder} holds 2 rows, more than --limit 1: raise it, or" in run(capsys, *flags, "--limit", 1)[1]
        assert json.loads((folder / "results.json").read_text()) == whole

    def test_pairs_and_the_report(self, tmp_path, capsys):
        """Under the embedded model, the right answer is likelier than letters; equal texts tie."""
        messages = [{"role": "user", "content": "Sort these numbers: 3 1."}]
        rows = [{"p": messages, "chosen": "1 3", "rejected": "q q q"}, {"p": messages, "chosen": "1", "rejected": "1"}]
        write_json_lines(tmp_path / "pairs.jsonl", rows)
        (tmp_path / "likely.yaml").write_text('data: pairs.jsonl\nprompt: "{p}"\ncheck: pairs\n')
        out, error = run(capsys, "toy", "--task", tmp_path / "likely.yaml", "--output_dir", tmp_path / "run" / "pairs")
        saved = [json.loads(line) for line in (tmp_path / "run" / "pairs" / "scores.jsonl").read_text().splitlines()]
        assert [row["reward/summed"] for row in saved] == [1, 0.5] and saved[0]["margin"] > 0, error
        write_report(tmp_path / "run", tmp_path / "report.html")
        assert "| likely: summed | pairs | toy | 0.750" in (tmp_path / "report.md").read_text().replace("\\", "")

    def test_results_of_the_harness(self, tmp_path):
        """0.5 -+ 1.959964 * 0.1 is 0.304 to 0.696; a metric without an error has no interval."""
        found = {"alias": "mine", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1.0, "em_stderr,strict": "N/A"}
        path = tmp_path / "m" / "results_2026-01-01T00-00-00.json"
        samples = {"mine": {"original": 9, "effective": 4}}
        write_json(path, {"results": {"mine": found}, "n-samples": samples, "model_name": "runs/dpo"})
        metrics = read_harness(path).tasks["mine"]
        low, high = (pytest.approx(bound, abs=1e-3) for bound in (0.304, 0.696))
        assert metrics["acc"].figure() == {"value": 0.5, "low": low, "high": high, "n": 4}
        assert (metrics["em (strict)"].value, metrics["em (strict)"].low) == (1, None)
        summary = write_report(tmp_path, tmp_path / "report.html")
        assert summary["policies"][0]["tasks"]["mine"]["acc"]["value"] == 0.5
        assert "mine: acc" in (tmp_path / "report.html").read_text()
        write_json(path, {"results": [1]})
        assert_refused(lambda: read_harness(path), "these are no results of lm-evaluation-harness")
