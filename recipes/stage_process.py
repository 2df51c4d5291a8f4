"""A command in a session of its own, to which the notices that would end this program are passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

# What is kept of the command's error output.
KEPT_BYTES = 2**16
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# Whoever stops a job may tell every process of it, and a launcher its own: one and the same notice.
SAME_NOTICE_SECONDS = 1.0
POLL_SECONDS = 0.5
# The launcher hears no USR1, and neither does what it starts until that listens: the training processes.
DEAF_TO_USR1 = ("/bin/sh", "-c", "trap '' USR1; exec \"$@\"", "sh")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status, the end of its error output, and the notice that came meanwhile."""

    code: int
    error_output: str
    notice: signal.Signals | None


def run_in_session(command: Sequence[str], *, notice_every: float = 5.0) -> Ended:
    """Run a launcher of training processes, whose error output is shown as it comes, until all of them have ended.

    TERM, USR1 and HUP go on to the launcher's children as USR1, on which they save and end, again and again, as they
    hear none before they train: a launcher that got a TERM itself would end before them, or kill them before they have
    saved. INT goes to all, as from a terminal. A second notice kills them all. What the training processes have
    started and left behind, a tracker's service for one, is not waited for.

    Args:
        command: the launcher and its arguments.
        notice_every: seconds between two notices.
    """
    with _Notices() as notices:
        process = subprocess.Popen([*DEAF_TO_USR1, *command], stderr=subprocess.PIPE, start_new_session=True)
        output = _ErrorOutput(process.stderr.fileno())
        told = _Told(process, notice_every)
        while (code := _exit_status(process)) is None:
            told.pass_on(notices)
        # Where the launcher ended first, the training processes may be about to save.
        while told.workers_run():
            told.pass_on(notices)
            time.sleep(POLL_SECONDS)
        return Ended(code, output.finish(), notices.first)


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
        # Only here, as it loads torch, which who starts commands does without.
        from trl_ext.trainers.preemption import REQUEUE

        print(f"\nreceived {ended.notice.name}; the same command goes on from {place} (exit code {REQUEUE})")
        raise SystemExit(REQUEUE)
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


class _Told:
    """What was passed on to a launcher and to its children, the training processes."""

    def __init__(self, process: subprocess.Popen, every: float):
        self.launcher = psutil.Process(process.pid)
        self.every = every
        self.workers: set[psutil.Process] = set()
        self.told_at: float | None = None

    def pass_on(self, notices: _Notices) -> None:
        now = time.monotonic()
        if notices.again:
            self._kill()
        elif notices.first is not None and (self.told_at is None or now - self.told_at >= self.every):
            self.workers |= set(_children(self.launcher))
            if notices.first != signal.SIGINT:
                for worker in self.workers:
                    _send(worker, signal.SIGUSR1)
            elif self.told_at is None:
                os.killpg(self.launcher.pid, signal.SIGINT)
            self.told_at = now

    def workers_run(self) -> bool:
        return any(_runs(worker) for worker in self.workers)

    def _kill(self) -> None:
        # Not the group: torchrun gives each worker a session of its own.
        for parent in (self.launcher, *self.workers):
            for one in (*_children(parent, recursive=True), parent):
                _send(one, signal.SIGKILL)


class _ErrorOutput:
    """Shows what comes out of a pipe, in a thread, and keeps the end of it."""

    def __init__(self, pipe: int):
        self.pipe, self.kept = pipe, b""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def finish(self) -> str:
        # What is in the pipe by now; who else holds its other end may do so for long.
        self.thread.join(timeout=1.0)
        return self.kept.decode("utf-8", errors="replace")

    def _read(self) -> None:
        while chunk := os.read(self.pipe, 4096):
            self.kept = (self.kept + chunk)[-KEPT_BYTES:]
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()


def _exit_status(process: subprocess.Popen) -> int | None:
    """Its exit status, waited for a little while."""
    try:
        return process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.Error:
        return []


def _send(process: psutil.Process, number: int) -> None:
    """Send a signal, unless the process has ended."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
