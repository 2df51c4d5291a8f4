"""Tasks as rows: reading them, their checks, and `trl-ext evaluate`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.recipes import wait_until
from tests.support.refusals import assert_one_line, assert_refused
from trl_ext.data.math import load_math, load_prompt_template, render
from trl_ext.evaluation import write_report
from trl_ext.evaluation.tasks import __main__ as command
from trl_ext.evaluation.tasks import evaluate as tasks
from trl_ext.evaluation.tasks.evaluate import difference, make_check
from trl_ext.evaluation.tasks.task import Task, fill, read_rows, read_task, task_names
from trl_ext.files import write_json
from trl_ext.rewards.verified import VerifiedGrader
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
        answers = [row.get("answer", "") for row in rows]
        texts = [f"<answer> {a} </answer> \\boxed{{{a}}} {a}" for a in answers]
        metrics = make_check(task, rows)(rows, [said(f"</think> {text}") for text in texts])
        assert all(one.get("reward/accuracy", 1) == 1 for one in metrics), "the right answers are right"

    def test_columns(self):
        row = {"a": 5.0, "b": 2.5, "c": "{a}", "d": [{"role": "user", "content": "Q"}], "e": ""}
        assert fill("{a} {b} {c} {x y} \\boxed{} {e}", row) == "5 2.5 {a} {x y} \\boxed{} "
        for empty, name in ((None, "None"), (float("nan"), "nan")):
            changed = {**row, "e": empty}
            assert_refused(lambda row=changed: fill("{a}{e}", row), f"the column 'e' is {name}", "give a text")
        assert fill("{d}", row) == row["d"]
        assert fill("{a} {b}", {"a": 1234567.0, "b": 1234.5678}) == "1234567 1234.5678", "no digit is lost"

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ("prompt:", "promt:", ["mine.yaml", "prompt: Field required"]),
            ("check:", "chek: x\ncheck:", ["mine.yaml", "chek: Extra inputs"]),
            ("max_new_tokens: 8", "max_new_tokens: many", ["max_new_tokens", "valid integer"]),
            ("check: contains\n", "", ["mine.yaml", "check: Field required"]),
            ("contains", "contain", ["check", "'contain'", "did you mean 'contains'?", "Known: r1_zero"]),
            ("{q}", "{question}", ["rows.json: row 1", "no column 'question'", "q, a, tags, hint"]),
            ("{q}", "{q} {hint}", ["rows.json: row 1", "'hint' is None", "give a text"]),
            ('answer: "{a}"\n', "", ["contains needs the key answer"]),
            ("rows.json", "none.json", ["no file", "none.json", "--data"]),
            ("max_new_tokens: 8", "samples: 2", ["samples 2 at temperature 0 would all be the same"]),
            ("contains", "countdown", ["countdown needs numbers in every row"]),
            (TASK, "- 1", ["mine.yaml", "valid dictionary"]),
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
            ("exact", "forty two", " forty  Two", {"reward/accuracy": 1}),
            ("exact", "forty two", "forty two.", {"reward/accuracy": 0}),
            ("contains", "forty two", "It is FORTY two.", {"reward/accuracy": 1}),
            ("gsm8k", "42", "40 and then 2", {"reward/accuracy": 0, "reward/format": 1, "category": "wrong_answer"}),
        ):
            task = Task(data="", prompt="", check=check, answer="{a}")
            [found] = make_check(task, [])([{"answer": answer}], [said(text)])
            assert found.items() >= expected.items()

    def test_a_function_of_a_file(self, tmp_path):
        (tmp_path / "own.py").write_text("def short(text, row):\n    return len(text) < row['limit']\n")
        check = make_check(Task(data="", prompt="", check=f"{tmp_path / 'own.py'}:short"), [])
        assert check([{"limit": 3}] * 2, [said("ab"), said("abc")]) == [{"reward/accuracy": 1}, {"reward/accuracy": 0}]


def test_differences_are_of_the_rows_that_both_have():
    """Row b has no score before, and row c is new: only a is compared."""
    columns = {"a": 1, "b": None}, {"a": 0, "b": 1, "c": 1}
    rows = [[{"row_id": row_id, "reward/score": one} for row_id, one in scores.items()] for scores in columns]
    found = difference(*rows)["score"]
    assert (found["mean"], found["n"]) == (-1, 1)


class TestRun:
    def test_samples_of_verified_answers(self, tmp_path, capsys):
        """Ten problems with four sampled responses each, graded and counted again."""
        flags = ["toy", "--task", "additions", "--limit", 10, "--output_dir", tmp_path / "run"]
        out, error = run(capsys, *flags)
        rows = [json.loads(line) for line in (tmp_path / "run" / "responses.jsonl").read_text().splitlines()]
        problems = load_math("toy", "test")[:10]
        assert [(row["row_id"], row["sample"]) for row in rows] == [
            (p["row_id"], n) for p in problems for n in range(4)
        ]
        truths = {problem["row_id"]: problem for problem in problems}
        rewards = [VerifiedGrader()(row["response_text"], truths[row["row_id"]]) for row in rows]
        assert [row["reward"] for row in rows] == [reward["reward"] for reward in rewards], error
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        metrics, summary = results["tasks"]["additions"], results["reasoning"]
        assert metrics["accuracy"]["mean"] == pytest.approx(sum(reward["answer_reward"] for reward in rewards) / 40)
        assert summary["categories"]["wrong_format"] == sum(reward["format_reward"] == 0 for reward in rewards)
        # pass@4 is the share of problems with any correct one.
        solved = sum(any(row["reward"] for row in rows[start : start + 4]) for start in range(0, 40, 4))
        assert metrics["pass@4"]["mean"] == pytest.approx(solved / 10)
        assert set(metrics) == {"accuracy", "format", *(f"{kind}@{k}" for kind in ("pass", "maj") for k in (1, 2, 4))}
        assert "pass@4" in out and "wrong answer" in out
        found = write_report([tmp_path / "run"], tmp_path / "report.html")
        assert len(found["policies"]) == 1 and not found["problems"] and not found["incomplete"]
        _, error = run(capsys, *flags, "--seed", 7)
        assert "made with seed 0, not 7" in error

    def test_a_template_makes_plain_text(self, own, monkeypatch):
        asked = []

        def load_engine(model, settings, **options):
            return lambda prompts, **_: asked.extend(prompts) or [said("5")] * len(prompts), None

        monkeypatch.setattr(tasks, "load_engine", load_engine)
        own.write_text(TASK + "template: r1_zero\n")
        tasks.evaluate("toy", str(own), own.parent / "out")
        assert asked[0] == render(load_prompt_template("r1_zero"), "What is 2 + 3?")

    @pytest.mark.long
    def test_a_kill_loses_what_was_not_saved_and_no_more(self, tmp_path):
        """SIGKILL at some moment after the first save, then the same call: the file of an uninterrupted one."""
        call = "import sys; from pathlib import Path; from trl_ext.evaluation.tasks.evaluate import evaluate; "
        call += "evaluate('toy', 'additions', Path(sys.argv[1]), limit=60, batch_size=4, save_every=8)"
        process = subprocess.Popen([sys.executable, "-c", call, tmp_path / "broken"], start_new_session=True)
        rows = tmp_path / "broken" / "responses.jsonl"
        wait_until(lambda: rows.exists() and rows.stat().st_size, process, seconds=180)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        assert rows.stat().st_size and not (tmp_path / "broken" / "results.json").exists(), "killed too early or late"
        whole = rows.read_bytes().splitlines(keepends=True)
        options = {"limit": 60, "batch_size": 4, "save_every": 8}
        found = [tasks.evaluate("toy", "additions", tmp_path / name, **options) for name in ("broken", "straight")]
        assert rows.read_bytes().startswith(b"".join(whole[: len(whole) // 8 * 8]))
        assert rows.read_bytes() == (tmp_path / "straight" / "responses.jsonl").read_bytes()
        assert found[0] == found[1]

    def test_a_killed_run_goes_on_and_is_compared(self, own, monkeypatch, capsys):
        folder = own.parent
        monkeypatch.setattr(tasks, "evaluate", partial(tasks.evaluate, save_every=1))
        flags = ["toy", "--task", own, "--output_dir"]
        out, error = run(capsys, *flags, folder / "all", "--json")
        results = json.loads(out)
        assert results == json.loads((folder / "all" / "results.json").read_text()), error
        assert results["tasks"]["mine"]["accuracy"]["n"] == 2
        whole = (folder / "all" / "responses.jsonl").read_bytes()
        shutil.copytree(folder / "all", folder / "killed")
        first, second = whole.splitlines(keepends=True)
        (folder / "killed" / "responses.jsonl").write_bytes(first + second[:20])
        table, _ = run(capsys, *flags, folder / "killed", "--compare", folder / "all")
        assert (folder / "killed" / "responses.jsonl").read_bytes() == whole
        assert "accuracy" in table and f"minus {folder / 'all'}" in table and "truncated at the token limit" in table
        # A finished run is read again without the model.
        monkeypatch.setattr("trl_ext.evaluation.tasks.evaluate.load_engine", lambda *_, **__: pytest.fail("loaded"))
        assert run(capsys, *flags, folder / "killed", "--compare", folder / "all")[0] == table
        _, error = run(capsys, *flags, folder / "killed", "--max_new_tokens", 9)
        assert "made with max_new_tokens 8, not 9: choose another file" in error
        _, error = run(capsys, *flags, folder / "new", "--max_new_tokens", 9, "--compare", folder / "all")
        assert "its max_new_tokens is 8, not 9" in error and not (folder / "new").exists()
        write_json(folder / "rows.json", [ROWS[0], {**ROWS[1], "a": 43}])
        assert "made with data_sha256" in run(capsys, *flags, folder / "killed")[1], "no stale figures"

    def test_a_limit_may_be_raised_and_not_lowered(self, own, capsys):
        folder = own.parent / "out"
        flags = ["toy", "--task", own, "--batch_size", 1, "--output_dir", folder, "--json"]
        first = json.loads(run(capsys, *flags, "--limit", 1)[0])
        assert first["tasks"]["mine"]["accuracy"]["n"] == 1
        begun = (folder / "responses.jsonl").read_bytes()
        for limit in (2, 3):
            whole = json.loads(run(capsys, *flags, "--limit", limit)[0])
            assert whole["tasks"]["mine"]["accuracy"]["n"] == 2
        assert (folder / "responses.jsonl").read_bytes().startswith(begun)
        assert "responses.jsonl holds 2 rows, and this call has 1" in run(capsys, *flags, "--limit", 1)[1]
        assert json.loads((folder / "results.json").read_text()) == whole
