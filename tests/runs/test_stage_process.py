"""The notices that end a pipeline, passed on to the stage under way: it saves, and nothing of it is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

DRIVER = """
import json, signal, sys
from trl_ext.runs.studies.processes import run_or_stop
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
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
pathlib.Path("listening").touch()
try:
    while not asked:
        time.sleep(0.05)
except KeyboardInterrupt:
    asked.append("SIGINT")
time.sleep(1)
pathlib.Path("saved").write_text(asked[0])
# As a trainer that ends by a notice: the interpreter takes handlers off as it ends.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
sys.exit(75)
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
        self.wait_for(worker)
        # The driver looks for the launcher's children every 0.2 s, and has to know the worker before anything ends.
        time.sleep(1)
        self.launcher, self.worker = psutil.Process(self.driver.pid).children(recursive=True)

    def wait_for(self, name: str) -> None:
        end = time.monotonic() + 30
        while not (self.folder / name).exists():
            assert time.monotonic() < end and self.driver.poll() is None, self.driver.communicate()
            time.sleep(0.05)

    def end(self) -> tuple[int | str, str | None]:
        """How the driver ended, and what the worker had saved by then; no process is left."""
        out, err = self.driver.communicate(timeout=60)
        assert self.driver.returncode == 0, err
        code, handler = json.loads(out.splitlines()[-1])
        assert handler, "the handlers are those from before"
        assert not [process for process in (self.launcher, self.worker) if runs(process)]
        saved = self.folder / "saved"
        return code, saved.read_text() if saved.exists() else None


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_notice_to_the_pipeline_alone_lets_the_stage_save(tmp_path, number):
    stage = Stage(tmp_path)
    stage.driver.send_signal(number)
    assert stage.end() == (75, "SIGUSR1")


def test_a_notice_to_every_process_lets_the_stage_save(tmp_path):
    """The launcher ends by it at once, and the training process is waited for all the same."""
    stage = Stage(tmp_path)
    for process in (stage.driver, stage.launcher, stage.worker):
        process.send_signal(signal.SIGTERM)
    code, saved = stage.end()
    assert code == 75 and saved in ("SIGTERM", "SIGUSR1")


def test_a_stage_that_does_not_train_yet_ends_at_once(tmp_path):
    """It has nothing to save, and no handler: the signal ends it."""
    stage = Stage(tmp_path, "loading")
    stage.driver.send_signal(signal.SIGTERM)
    assert stage.end() == (75, None)


def test_an_interrupt_reaches_the_stage_as_from_a_terminal(tmp_path):
    stage = Stage(tmp_path)
    stage.driver.send_signal(signal.SIGINT)
    assert stage.end() == ("interrupted", "SIGINT")
