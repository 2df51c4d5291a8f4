"""A run that is killed and resumed, of every trainer and wherever it is killed, ends as one that never was.

Equal are the parameters, the optimizer's state and the random state to the last bit, every line of metrics but for
times, and the choice of the best checkpoint.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import REPOSITORY, recipes
from tests.support.files import read_rows
from tests.support.resume_once import KINDS, differences, environment, metrics, run_jobs, save_models
from tests.support.train_once import launch

pytestmark = pytest.mark.slow

# Lives of a run until its last, each of which begins at the checkpoint that the one before left. Checkpoints are at 3,
# 6 and 9 of 11 steps, and lines of metrics at 4 and 8. Epochs of `preference` end at steps 4 and 8.
LIVES = {
    "preference": {
        "before any checkpoint": [["step_end", 2]],
        "four times": [["step_end", 4], ["saved", 6], ["step_end", 7], ["mid_save", 9]],
        "before a checkpoint has its marker": [["before_mark", 6]],
        "when a checkpoint has its marker": [["marked", 6]],
        "after the last checkpoint": [["saved", 11]],
        "asked to end, twice": [["notice", 4], ["interrupt", 8]],
    },
    "preference_lora": {
        "in a second epoch": [["step_end", 5]],
        # With no evaluation at its end: what the last window gathered stands in the last line of metrics.
        "after the last checkpoint": [["saved", 11]],
    },
    "preference_moving": {"with a reference that has moved": [["step_end", 7]]},
    "reward": {
        "with its best checkpoint behind it": [["step_end", 8]],
        "asked to end off the schedule": [["notice", 3], ["interrupt", 7]],
    },
    # 4 updates to a rollout and 8 to an epoch; checkpoints at 4, 8 and 12 of 14.
    "policy": {
        "in a second epoch": [["step_end", 13]],
        "asked to end in a rollout": [["notice", 5]],
        "after the last checkpoint": [["saved", 14]],
    },
    # 2 updates to a rollout, which is an epoch.
    "policy_batch": {"in the middle of a rollout": [["step_end", 7]]},
    "policy_resampled": {"in the middle of an epoch": [["step_end", 7]]},
    "kto": {"in the middle of an epoch": [["step_end", 7]]},
    "sft": {"with its best checkpoint behind it": [["step_end", 8]]},
    "sft_by_length": {"in a second epoch": [["step_end", 8]]},
    # Its rounds end at steps 4, 8 and 13.
    "expert": {"in a third round": [["step_end", 10]], "in saving a round": [["before_mark", 8]]},
}


def named(kind: str, case: str) -> str:
    return f"{kind}-{case}".replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder for each kind's straight run, and for each of its cases."""
    folder = tmp_path_factory.mktemp("resume")
    jobs = [{"kind": kind, "folder": str(folder / kind), "kills": []} for kind in KINDS]
    for kind, cases in LIVES.items():
        jobs += [{"kind": kind, "folder": str(folder / named(kind, n)), "kills": kills} for n, kills in cases.items()]
    run_jobs(jobs, folder)
    return folder


def assert_same(one: Path, other: Path) -> None:
    found = differences(one, other)
    assert set(found.values()) == {0.0}, found
    assert metrics(one) == metrics(other)


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in LIVES.items() for case in cases])
def test_a_broken_run_ends_as_the_straight_one(kind, case, runs):
    assert_same(runs / kind, runs / named(kind, case))


def test_the_same_checkpoints_are_left(runs):
    for kind, cases in LIVES.items():
        for case in cases:
            straight, broken = (
                sorted(path.name for path in (runs / name / "run").iterdir()) for name in (kind, named(kind, case))
            )
            # A checkpoint that was asked for is one more than the schedule's, and the newest but one may be it.
            if "asked" not in case:
                assert straight == broken, (kind, case)


def test_what_would_differ_is_there(runs):
    """The runs see dropout, several epochs and windows of metrics that checkpoints lie in."""
    lines = metrics(runs / "preference")
    assert [row["step"] for row in lines if "loss" in row] == [4, 8]
    assert [row["step"] for row in lines if "eval_loss" in row] == [3, 6, 9, 11]
    assert lines[-1]["train_loss"] > 0 and lines[-1]["epoch"] > 2
    assert {row["num_tokens"] for row in metrics(runs / "policy") if "num_tokens" in row} != {0}


# ---- Several processes ----


def together(kind: str, models: Path, folder: Path, kill: list | None = None, engine: str | None = None):
    """One life in two processes on the CPU, under plain data parallelism or DeepSpeed."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [kind, str(models), str(folder), *([json.dumps(kill)] if kill else [])]
    return launch(engine, ["-m", "tests.support.resume_once", *arguments], folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "engine", "kill"),
    [
        # The second process is killed, and the launcher ends the first.
        ("preference", None, ["mid_save", 6, 1]),
        # The second process alone is told; both use the rollout up and save at the same step.
        ("policy", None, ["notice", 5, 1]),
        pytest.param("sft_by_length", "zero2", ["step_end", 5, 0], marks=pytest.mark.long),
    ],
)
def test_two_processes(kind, engine, kill, models, tmp_path):
    pytest.importorskip("deepspeed") if engine else None
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = together(kind, models, straight, engine=engine)
    assert done.returncode == 0, done.stderr[-4000:]
    ended = together(kind, models, broken, kill, engine)
    assert ended.returncode != 0 and not (broken / "end.safetensors").exists()
    if kill[0] == "notice":
        assert re.search(r"exitcode *: 143", ended.stderr)
        assert (broken / "run" / "checkpoint-8").is_dir()
    done = together(kind, models, broken, engine=engine)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same(straight, broken)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_recipe_that_is_told_to_end(number, code, tmp_path):
    """After the first checkpoint; the same command with --resume_from_checkpoint finishes it."""
    quick = ["--max_steps=40", "--save_steps=2", "--save_total_limit=1", "--logging_steps=1", "--eval_strategy=no"]
    quick += ["--generation_eval_every=0", "--num_eval_prompts=4", "--max_new_tokens=8", "--output_dir=run"]
    # Launchers give exit codes of their own.
    command = [sys.executable, str(recipes.RECIPES / "dpo.py"), *quick]
    options = {"cwd": tmp_path, "env": {**recipes.environment(), "OMP_NUM_THREADS": "1"}, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options) as process:
        deadline = time.monotonic() + 240
        while not list((tmp_path / "run").glob("checkpoint-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == code
    (line,) = [line for line in printed.splitlines() if line.startswith("ended at step ")]
    step = int(line.removeprefix("ended at step ").partition(";")[0])
    assert 2 <= step < 40 and (tmp_path / "run" / f"checkpoint-{step}").is_dir()
    assert not (tmp_path / "run" / "results.json").exists()
    done = subprocess.run([*command, "--resume_from_checkpoint"], capture_output=True, timeout=400, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))


@pytest.mark.long
def test_runs_killed_at_random_moments_end_as_the_straight_one():
    """A few of the kills of `benchmarks/kills.py`, at other moments each time; a failure names the seed."""
    seed = str(int(time.time()))
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "6", "--trainers", "preference", "policy"]
    options = {"cwd": REPOSITORY, "env": environment(), "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run([*command, "--seed", seed], **options)
    same = "3 kills, largest difference 0, 0 runs with other metrics"
    found = [line for line in done.stdout.splitlines() if "kills" in line]
    assert found == [f"preference: {same}", f"policy: {same}"], f"{seed}: {done.stdout[-500:]} {done.stderr[-4000:]}"
