"""Training processes that another recipe launches: their options, a countdown of them, and the signals they get."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

# What is kept of the command's error output.
KEPT_BYTES = 2**16
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# Whoever stops a job may tell every process of it, and a launcher its own: one and the same notice.
SAME_NOTICE_SECONDS = 1.0
POLL_SECONDS = 0.5
# In the environment of all that a command starts, whoever its parent is by then.
MARK = "TRL_EXT_STAGE"


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status, the end of its error output, and the notice that came meanwhile."""

    code: int
    error_output: str
    notice: signal.Signals | None


def launcher_options(accelerate_config: str | None) -> list[str]:
    """Options with which `accelerate launch` prints neither warnings about defaults nor a traceback of its own.

    Without a file, the user's own configuration of accelerate applies, or else one process for each device.

    Raises:
        FileNotFoundError: no such file.
    """
    if accelerate_config is not None:
        if not Path(accelerate_config).is_file():
            raise FileNotFoundError(f"no file --accelerate_config {accelerate_config}")
        return ["--quiet", "--config_file", accelerate_config]
    import torch
    from accelerate.commands.config.config_args import default_config_file

    if Path(default_config_file).is_file():
        return ["--quiet"]
    devices = max(torch.accelerator.device_count(), 1)
    defaults = ["--num_processes", str(devices), "--num_machines", "1"]
    several = ["--multi_gpu"] if devices > 1 else []
    return ["--quiet", *several, *defaults, "--mixed_precision", "no", "--dynamo_backend", "no"]


class Countdown:
    """Counts runs as they begin, and estimates the time left from the runs that have ended.

    Args:
        total: how many runs there are.
        left: the recipe of each that is not finished.
    """

    def __init__(self, total: int, left: Sequence[str]):
        self.total, self.number, self.left = total, 0, list(left)
        self.seconds: dict[str, list[float]] = {}

    def place(self) -> str:
        """`run 7 of 20, about 4 min left` for the next run; without a time before the first run has ended."""
        self.number += 1
        made = [seconds for own in self.seconds.values() for seconds in own]
        if not made or not self.left:
            return f"run {self.number} of {self.total}"
        expected = sum(statistics.mean(self.seconds.get(recipe, made)) for recipe in self.left)
        return f"run {self.number} of {self.total}, about {_about(expected)} left"

    def ended(self, recipe: str, seconds: float) -> None:
        """Record the time of a run that has ended."""
        self.left.remove(recipe)
        self.seconds.setdefault(recipe, []).append(seconds)


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def run_in_session(command: Sequence[str]) -> Ended:
    """Run a launcher of training processes, whose error output is shown as it comes, until all of them have ended.

    TERM, USR1 and HUP go on to the training processes, not to the launcher, which would end before them, or kill them
    before they have saved. One that listens to USR1 saves and ends on it; one that does not, as it has nothing to
    save, gets a TERM. INT goes to all, as from a terminal. A second notice kills them all. What they have started and
    left behind, a tracker's service for one, is not waited for.

    Args:
        command: the launcher and its arguments, among them the script (`.py`) by which a training process is known.
    """
    stage = _Stage(command)
    with _Notices() as notices:
        while (code := stage.exit_status()) is None:
            stage.pass_on(notices)
        # Where the launcher ended first, the training processes may be about to save.
        while stage.workers():
            stage.pass_on(notices)
            time.sleep(POLL_SECONDS)
    return Ended(code, stage.output.finish(), notices.first)


def run_or_stop(command: Sequence[str], place: str) -> Ended:
    """`run_in_session`, and the end of this program where it was told to end meanwhile.

    Args:
        command: the launcher and its arguments.
        place: from where the same command goes on, for the line that says so.

    Raises:
        KeyboardInterrupt, SystemExit: the program was told to end, with code 75 unless from a terminal.
    """
    ended = run_in_session(command)
    if ended.notice == signal.SIGINT:
        raise KeyboardInterrupt
    if ended.notice is not None:
        code = os.EX_TEMPFAIL
        print(f"\nreceived {ended.notice.name}; the same command goes on from {place} (exit code {code})")
        raise SystemExit(code)
    return ended


class _Notices:
    """Remembers the signals that arrive within a `with` block, of those that are not ignored: under nohup one is."""

    def __init__(self):
        self.first: signal.Signals | None = None
        self.first_at = 0.0
        self.again = False

    def __enter__(self) -> _Notices:
        heard = [number for number in NOTICES if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.first_at = signal.Signals(number), now
        elif now - self.first_at >= SAME_NOTICE_SECONDS:
            self.again = True


class _Stage:
    """A launcher and the training processes below it, each of which is told once."""

    def __init__(self, command: Sequence[str]):
        self.scripts = [Path(word).name for word in command if word.endswith(".py")][-1:]
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: self.mark}
        self.launcher = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, start_new_session=True)
        self.output = _ErrorOutput(self.launcher.stderr)
        self.told: set[psutil.Process] = set()

    def exit_status(self) -> int | None:
        """The launcher's, waited for a little while."""
        try:
            return self.launcher.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def workers(self) -> list[psutil.Process]:
        """The training processes that run, also those whose launcher has ended."""
        return [one for one in self._processes() if one.pid != self.launcher.pid and self._runs_the_script(one)]

    def pass_on(self, notices: _Notices) -> None:
        if notices.again:
            for one in self._processes():
                _send(one, signal.SIGKILL)
        elif notices.first == signal.SIGINT:
            if not self.told:
                self.told.add(psutil.Process())
                _send_to_group(self.launcher.pid, signal.SIGINT)
        elif notices.first is not None:
            workers = self.workers()
            if not workers and not self.told and self.launcher.poll() is None:
                # It has started none yet.
                self.launcher.terminate()
            for one in workers:
                if one not in self.told:
                    self.told.add(one)
                    _send(one, signal.SIGUSR1 if _listens(one, signal.SIGUSR1) else signal.SIGTERM)

    def _processes(self) -> list[psutil.Process]:
        """All that run and bear the mark. Not the group's: torchrun gives each worker a session of its own."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                # Another user's, or it has just ended.
                continue
        return found

    def _runs_the_script(self, process: psutil.Process) -> bool:
        try:
            return any(Path(word).name in self.scripts for word in process.cmdline())
        except psutil.Error:
            return False


class _ErrorOutput:
    """Shows what comes out of a pipe, in a thread, and keeps the end of it."""

    def __init__(self, pipe: BinaryIO):
        self.kept = b""
        # It holds the pipe, which another one's number would else be given to.
        self.thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self.thread.start()

    def finish(self) -> str:
        # What is in the pipe by now; who else holds its other end may do so for long.
        self.thread.join(timeout=1.0)
        return self.kept.decode("utf-8", errors="replace")

    def _read(self, pipe: BinaryIO) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 4096):
                self.kept = (self.kept + chunk)[-KEPT_BYTES:]
                try:
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()
                except (OSError, ValueError):
                    # The terminal is gone. Unless it is read on, the command would stand still.
                    continue


def _send(process: psutil.Process, number: int) -> None:
    """Send a signal, unless the process has ended."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def _send_to_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _listens(process: psutil.Process, number: int) -> bool:
    """Whether a process has a handler for a signal, where the system tells."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
