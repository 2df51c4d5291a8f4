"""The recipe that evaluates: what it leaves, that it goes on after a kill, and what it refuses in one line."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.support import recipes
from tests.support.recipes import read, refused
from trl_ext.data.math import load_math
from trl_ext.evaluation.reasoning import grader
from trl_ext.evaluation.report import write_report

SHORT = ["--num_eval_prompts=10", "--generation_eval_batch_size=4", "--save_every=8"]
FILES = {"config.yaml", "generations.jsonl", "results.json"}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """A folder with a short evaluation, uninterrupted, and `printed.txt`, what it printed."""
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(io.StringIO()) as printed:
        monkeypatch.chdir(folder)
        recipes.run(monkeypatch, "evaluate_math", *SHORT, "--output_dir", "straight")
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.fixture
def straight(evaluated, monkeypatch, tmp_path) -> Path:
    """A copy of the evaluation that a test may change, in the working directory."""
    shutil.copytree(evaluated, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "straight"


def test_what_it_leaves(straight, tmp_path):
    assert {path.name for path in straight.iterdir()} == FILES
    rows, results = read(straight, "generations.jsonl"), read(straight, "results.json")
    problems = load_math("toy", "test")[:10]
    assert [(row["row_id"], row["sample"]) for row in rows] == [
        (row["row_id"], sample) for row in problems for sample in range(4)
    ]
    truths = {row["row_id"]: row for row in problems}
    rewards = [grader()(row["response_text"], truths[row["row_id"]]) for row in rows]
    summary = results["reasoning"]
    assert [row["reward"] for row in rows] == [reward["reward"] for reward in rewards]
    assert summary["accuracy"]["mean"] == pytest.approx(sum(row["answer_reward"] for row in rewards) / 40)
    assert summary["categories"]["wrong_format"] == sum(reward["format_reward"] == 0 for reward in rewards)
    # pass@4 is the share of problems with any correct one.
    solved = sum(any(row["reward"] for row in rows[start : start + 4]) for start in range(0, 40, 4))
    assert summary["pass_at"]["4"]["mean"] == pytest.approx(solved / 10)
    assert set(summary["pass_at"]) == set(summary["maj_at"]) == {"1", "2", "4"}
    assert results["run"]["sampling"]["stop"] == ["</answer>"]
    assert results["score"] == {"policy": summary["accuracy"]["mean"]}
    printed = (tmp_path / "printed.txt").read_text()
    for text in ("wrong answer", "accuracy", "pass@4", "maj@4", "10 problems, responses to each: 4"):
        assert text in printed
    summary = write_report([straight], tmp_path / "report.html")
    assert len(summary["policies"]) == 1 and not summary["problems"] and not summary["incomplete"]


@pytest.mark.parametrize("cut", [1, 2000])
def test_an_interrupted_evaluation_goes_on(cut, straight, monkeypatch, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.yaml").write_text((straight / "config.yaml").read_text().replace("straight", "broken"))
    (broken / "generations.jsonl").write_bytes((straight / "generations.jsonl").read_bytes()[:-cut])
    recipes.run(monkeypatch, "evaluate_math", *SHORT, "--output_dir", "broken")
    assert "going on in broken" in capsys.readouterr().out
    assert (broken / "generations.jsonl").read_bytes() == (straight / "generations.jsonl").read_bytes()
    assert read(broken, "results.json")["reasoning"] == read(straight, "results.json")["reasoning"]


@pytest.mark.long
def test_a_kill_loses_what_was_not_saved_and_no_more(tmp_path, monkeypatch):
    """SIGKILL at some moment behind the first save, then the same command: the file of an uninterrupted run."""
    arguments = ["--num_eval_prompts=30", "--samples_per_prompt=8", "--generation_eval_batch_size=4", "--save_every=8"]
    process = subprocess.Popen(
        recipes.launch_command("evaluate_math", *arguments),
        cwd=tmp_path,
        env=recipes.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    run = tmp_path / "runs" / "evaluate-math-toy"
    rows = run / "generations.jsonl"
    end = time.monotonic() + 180
    while not (rows.exists() and rows.stat().st_size) and time.monotonic() < end:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    assert rows.stat().st_size and not (run / "results.json").exists(), "it was killed too early, or too late"
    saved = rows.read_bytes()
    done = recipes.launch("evaluate_math", *arguments, folder=tmp_path)
    assert "going on" in done.stdout
    whole = saved.splitlines(keepends=True)
    whole = b"".join(whole[: len(whole) // 8 * 8])
    assert rows.read_bytes().startswith(whole)
    monkeypatch.chdir(tmp_path)
    recipes.run(monkeypatch, "evaluate_math", *arguments, "--output_dir", "straight")
    assert (tmp_path / "straight" / "generations.jsonl").read_bytes() == rows.read_bytes()


def test_a_folder_is_of_one_evaluation(straight, monkeypatch, capsys):
    again = ["--output_dir", "straight"]
    message = refused(monkeypatch, capsys, "evaluate_math", *SHORT, *again)
    assert "holds a finished evaluation with the same settings" in message
    (straight / "results.json").unlink()
    message = refused(monkeypatch, capsys, "evaluate_math", *SHORT, *again, "--seed", "7")
    assert "unfinished evaluation whose seed was 42, now 7" in message
    recipes.run(monkeypatch, "evaluate_math", *SHORT, *again, "--seed", "7", "--overwrite_output_dir")
    assert read(straight, "results.json")["run"]["seed"] == 7


def test_vllm_that_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "pip install 'trl_ext[vllm]'" in refused(monkeypatch, capsys, "evaluate_math", "--use_vllm", "true")
