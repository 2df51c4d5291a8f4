"""Processes of a study: launcher options, a countdown of runs, and signal forwarding."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

# Windows has the first and the last of these.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name))
# A scheduler may signal every process of a job, and a launcher its own: signals this close together count as one.
SAME_SIGNAL_SECONDS = 1.0
POLL_SECONDS = 0.2


def launcher_options(accelerate_config: str | None) -> list[str]:
    """Options of `accelerate launch` that silence its warnings about defaults and its own traceback.

    Without a file, the user's accelerate configuration applies, or else one process per device.

    Raises:
        FileNotFoundError: the file does not exist.
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
        total: number of runs.
        left: recipes of the unfinished runs.
    """

    def __init__(self, total: int, left: Sequence[str]):
        self.total, self.number, self.left = total, 0, list(left)
        self.seconds: dict[str, list[float]] = {}

    def place(self) -> str:
        """`run 7 of 20, about 4 min left` for the next run; the time appears once the first run has ended."""
        self.number += 1
        made = [seconds for own in self.seconds.values() for seconds in own]
        if not made or not self.left:
            return f"run {self.number} of {self.total}"
        expected = sum(statistics.mean(self.seconds.get(recipe, made)) for recipe in self.left)
        return f"run {self.number} of {self.total}, about {_about(expected)} left"

    def ended(self, recipe: str, seconds: float) -> None:
        """Record the duration of a finished run."""
        self.left.remove(recipe)
        self.seconds.setdefault(recipe, []).append(seconds)


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def run_in_session(command: Sequence[str]) -> tuple[int, signal.Signals | None]:
    """Run a launcher of training processes, and forward the signals that arrive meanwhile.

    The launcher gets its own session, so that only this process receives signals from a terminal. INT is forwarded
    unchanged to the training processes, the launcher's direct children. TERM, USR1 and HUP are forwarded to them as
    USR1, on which they save and exit. Once the launcher has children, it is not signalled: torchrun would kill them
    before they have saved. A second signal kills all processes.

    Returns:
        the exit status and the first signal received, once the launcher and the training processes have ended.
    """
    launcher = psutil.Popen(command, start_new_session=True)
    workers: list[psutil.Process] = []
    told: set[psutil.Process] = set()
    with _Received() as received:
        while (code := launcher.poll()) is None or any(map(_runs, workers)):
            with contextlib.suppress(psutil.Error):
                workers = launcher.children() or workers
            if received.again:
                _send([launcher, *workers], signal.SIGKILL)
            elif received.first is not None:
                number = signal.SIGINT if received.first == signal.SIGINT else signal.SIGUSR1
                # A launcher that has not started any process has nothing to save.
                untold = [process for process in workers or [launcher] if process not in told]
                _send(untold, number if workers else signal.SIGTERM)
                told.update(untold)
            time.sleep(POLL_SECONDS)
    return code, received.first


def run_or_stop(command: Sequence[str], place: str) -> int:
    """Run a launcher as `run_in_session` does; return its exit status unless this program was asked to stop.

    Args:
        command: the launcher and its arguments.
        place: the point at which the same command resumes, for the message.

    Raises:
        KeyboardInterrupt, SystemExit: the program was asked to stop; the code is 75 unless from a terminal.
    """
    status, received = run_in_session(command)
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    if received is not None:
        code = os.EX_TEMPFAIL
        print(f"\nreceived {received.name}; the same command goes on from {place} (exit code {code})")
        raise SystemExit(code)
    return status


class _Received:
    """Records the signals that arrive within a `with` block, except ignored ones, as under nohup."""

    def __init__(self):
        self.first: signal.Signals | None = None
        self.again = False
        self._first_at = 0.0

    def __enter__(self) -> _Received:
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = signal.Signals(number), now
        elif now - self._first_at >= SAME_SIGNAL_SECONDS:
            self.again = True


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
