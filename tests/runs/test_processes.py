"""Runs of recipes as processes: order, failures, interrupts, checks before anything runs, and notices to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import recipes
from tests.support.recipes import wait_until
from trl_ext import cli
from trl_ext.resilience.checkpoints import MARKER
from trl_ext.runs import training_run
from trl_ext.runs.arguments import argument_types
from trl_ext.studies import processes
from trl_ext.studies.processes import Run, check_runs, launcher_options, run_all

# A recipe that takes --value and --output_dir, writes results, and fails where it is told to.
RECIPE = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("value", "fail", "config", "output_dir", "resume_from_checkpoint", "overwrite_output_dir"):
    parser.add_argument(f"--{name}")
given = parser.parse_args()
folder = pathlib.Path(given.output_dir)
with (folder / "calls.txt").open("a") as calls:
    calls.write(json.dumps([given.value, given.resume_from_checkpoint, given.overwrite_output_dir]) + "\\n")
if given.fail and pathlib.Path(given.fail).exists():
    (folder / pathlib.Path(given.fail).read_text()).touch()
    sys.exit(3)
(folder / "results.json").write_text("{}")
"""


@pytest.fixture
def runs(monkeypatch, tmp_path) -> list[Run]:
    """Three runs of the stand-in; the second fails while there is a file `broken`, which names what it leaves."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "stand_in.py").write_text(RECIPE)
    monkeypatch.setattr(processes, "RECIPES", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    own = {"one": {"value": 1}, "two": {"value": 2, "fail": "broken"}, "three": {"value": 3}}
    launcher = launcher_options(None)
    return [Run("stand_in", Path("runs") / name, arguments, launcher) for name, arguments in own.items()]


def calls(name: str) -> list:
    path = Path("runs") / name / "calls.txt"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_failure_does_not_keep_the_others_from_running(runs, capfd):
    Path("broken").write_text("metrics.jsonl")
    assert run_all(runs) == ["two"]
    printed, errors = capfd.readouterr()
    assert "two failed with exit status 1" in printed
    assert "CalledProcessError" not in errors and "not passed to `accelerate launch`" not in errors
    assert [len(calls(name)) for name in ("one", "two", "three")] == [1, 1, 1]
    # The second time, only the one that failed runs, anew, as it has updates and no checkpoint.
    Path("broken").unlink()
    assert run_all(runs) == []
    assert calls("one") == [["1", None, None]]
    assert calls("two") == [["2", None, None], ["2", None, "true"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "second"),
    [
        # Responses are kept in the folder, where `--overwrite_output_dir` would remove them.
        ("generations.jsonl", ["2", None, None]),
        ("metrics.jsonl", ["2", "last", None]),
    ],
)
def test_an_interrupted_run_is_resumed(left, second, runs):
    Path("broken").write_text(left)
    run_all(runs[1:2])
    if left == "metrics.jsonl":
        marker = Path("runs/two/checkpoint-4") / MARKER
        marker.parent.mkdir()
        marker.touch()
    run_all(runs[1:2])
    assert calls("two") == [["2", None, None], second]


def test_a_folder_of_other_arguments_is_refused(runs, tmp_path):
    run = runs[0]
    run.folder.mkdir(parents=True)
    (run.folder / "notes.txt").touch()
    with pytest.raises(ValueError, match="runs/one holds something that no study started"):
        check_runs([run])
    (run.folder / processes.RECORD_NAME).write_text(json.dumps(run.record()))
    check_runs([run])
    with pytest.raises(ValueError, match="runs/one was run with value 1, and now it is 7: take that back"):
        check_runs([Run("stand_in", run.folder, {"value": 7})])


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"learnin_rate": 0.1}, "the run two of recipes/dpo.py: unknown flag --learnin_rate; did you mean 'learning_"),
        ({"learning_rate": "fast"}, "the run two of recipes/dpo.py: argument --learning_rate"),
        ({"loss_kwargs": {"a": 1}, "use_cpu": True, "weighting": ["wpo", "confidence"]}, None),
    ],
)
def test_arguments_are_checked_before_anything_runs(own, expected, tmp_path):
    found = [Run("dpo", tmp_path / name, arguments) for name, arguments in (("one", {"beta": 0.1}), ("two", own))]
    if expected is None:
        check_runs(found)
        return
    with pytest.raises(ValueError) as error:
        check_runs(found)
    assert expected in str(error.value)


@pytest.mark.parametrize("recipe", sorted({*cli.recipes()} - {*recipes.OTHERS}))
def test_arguments_are_checked_against_what_the_recipe_reads(recipe, monkeypatch):
    """What the check finds in the script against what the script reads when it runs, as another module."""
    read = []

    def parse(types, **options):
        read.extend(kind.__name__ for kind in types)
        raise SystemExit

    monkeypatch.setattr(training_run, "parse_arguments", parse)
    with pytest.raises(SystemExit):
        recipes.run(monkeypatch, recipe)
    assert read == [kind.__name__ for kind in argument_types(recipe)]


# ---- Notices ----


DRIVER = """
import json, signal, sys
from trl_ext.studies.processes import run_or_stop
# Whoever runs the tests may ignore them, in the background or under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    code = run_or_stop(json.loads(sys.argv[1]))
except (KeyboardInterrupt, SystemExit) as stopped:
    code = getattr(stopped, "code", "interrupted")
handler = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print(json.dumps([code, handler]))
"""
# As accelerate's: it starts a training process, waits, and does nothing about signals.
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.Popen([sys.executable, *sys.argv[1:]]).wait())
"""
# It listens, or loads for a while; a second passes for saving; what it was told goes into `saved`.
WORKER = """
import pathlib, signal, sys, time
asked = []
if sys.argv[1] != "listening":
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(100)
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(signal.Signals(number).name))
pathlib.Path("listening").touch()
try:
    while not asked:
        time.sleep(0.05)
except KeyboardInterrupt:
    asked.append("SIGINT")
time.sleep(1)
pathlib.Path("saved").write_text(asked[0])
sys.exit(143)
"""


class Stage:
    """The driver, a launcher and a training process, each a process of its own."""

    def __init__(self, folder: Path, worker: str = "listening"):
        for name, code in (("driver", DRIVER), ("launcher", LAUNCHER), ("worker", WORKER)):
            (folder / f"{name}.py").write_text(code)
        self.folder = folder
        command = [sys.executable, "driver.py", json.dumps([sys.executable, "launcher.py", "worker.py", worker])]
        pipe = subprocess.PIPE
        self.driver = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        wait_until((folder / worker).exists, self.driver)
        # The driver looks for the launcher's children every 0.2 s, and has to know the worker before anything ends.
        time.sleep(1)
        self.launcher, self.worker = psutil.Process(self.driver.pid).children(recursive=True)

    def end(self) -> tuple[int | str, str | None]:
        """How the driver ended, and what the worker had saved by then; no process is left."""
        out, err = self.driver.communicate(timeout=60)
        assert self.driver.returncode == 0, err
        code, handler = json.loads(out.splitlines()[-1])
        assert handler, "the handlers are those from before"
        assert not [process for process in (self.launcher, self.worker) if is_alive(process)]
        saved = self.folder / "saved"
        return code, saved.read_text() if saved.exists() else None


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


# Who is told what, what the worker does by then, how the driver ends, and what the worker has saved.
NOTICES = {
    "TERM to the pipeline alone": (("driver",), signal.SIGTERM, "listening", (143, "SIGTERM")),
    "HUP to the pipeline alone": (("driver",), signal.SIGHUP, "listening", (129, "SIGTERM")),
    # The launcher ends by it at once, and the training process is waited for all the same.
    "TERM to every process": (("driver", "launcher", "worker"), signal.SIGTERM, "listening", (143, "SIGTERM")),
    # It has nothing to save, and no handler: the signal ends it.
    "TERM before it trains": (("driver",), signal.SIGTERM, "loading", (143, None)),
    "INT, as from a terminal": (("driver",), signal.SIGINT, "listening", ("interrupted", "SIGINT")),
    "QUIT ends all at once": (("driver",), signal.SIGQUIT, "listening", (131, None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTICES)
def test_a_notice_lets_the_stage_save(name, tmp_path):
    told, number, worker, expected = NOTICES[name]
    stage = Stage(tmp_path, worker)
    for process in told:
        getattr(stage, process).send_signal(number)
    assert stage.end() == expected
