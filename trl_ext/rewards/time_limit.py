"""math-verify behind a hard limit on time and memory, from any thread and any process.

Its own limit is `signal.alarm`, which works in the main thread alone. Here it runs in a process of its own that is
started once, asked over pipes, and killed and started again where an answer takes too long.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

TIME_LIMIT_SECONDS = 3.0
MEMORY_LIMIT_BYTES = 1 << 30
START_LIMIT_SECONDS = 120.0
CACHED_VERDICTS = 10_000


def require_math_verify() -> None:
    """Raise ValueError where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("fast=False needs math-verify, which is not installed: pip install 'trl_ext[math]'")


def verify_in_worker(answer: str, truth: str) -> bool | None:
    """math-verify's verdict from this process's worker; None where it took more than the limits."""
    return _worker.verify(answer, truth)


class MathWorker:
    """One process that answers one question at a time; threads wait for each other.

    Args:
        seconds: the limit on one question.
        memory_bytes: the limit on the process's address space.

    Attributes:
        started: how many processes have been started.
        refused: how many questions ran into a limit; one that did is not asked again.
    """

    def __init__(self, seconds: float = TIME_LIMIT_SECONDS, memory_bytes: int = MEMORY_LIMIT_BYTES):
        self.seconds, self.memory_bytes = seconds, memory_bytes
        self.started = self.refused = 0
        self.process: subprocess.Popen | None = None
        self._lock = threading.RLock()
        self._verdicts: OrderedDict[tuple[str, str], bool | None] = OrderedDict()

    def verify(self, answer: str, truth: str) -> bool | None:
        """Whether math-verify takes the answer for the truth, both LaTeX; None where a limit was hit.

        Raises:
            RuntimeError: the worker cannot be started.
        """
        key = (answer, truth)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
            verdict = self._ask(json.dumps(key).encode() + b"\n")
            if verdict is None:
                self.refused += 1
            self._verdicts[key] = verdict
            if len(self._verdicts) > CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
            return verdict

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        with self._lock:
            process, self.process = self.process, None
            if process is not None:
                process.kill()
                process.wait()
                process.stdin.close()
                process.stdout.close()

    def leave_to_parent(self) -> None:
        """After a fork: the process belongs to the parent; this one gets a worker of its own when it needs one."""
        process, self.process = self.process, None
        # Another thread of the parent may have held it.
        self._lock = threading.RLock()
        if process is not None:
            process.stdin.close()
            process.stdout.close()
            process.returncode = 0

    def _ask(self, question: bytes) -> bool | None:
        try:
            reply = self._exchange(question)
            if reply == b"" and self.process.wait() == -signal.SIGKILL:
                # By something else, perhaps before it had the question.
                self.close()
                reply = self._exchange(question)
        except BaseException:
            # A reply to a question that was given up must not answer the next.
            self.close()
            raise
        if reply not in (b"0\n", b"1\n"):
            self.close()
            return None
        return reply == b"1\n"

    def _exchange(self, question: bytes) -> bytes | None:
        if self.process is None or self.process.poll() is not None:
            self.close()
            self._start()
        try:
            os.write(self.process.stdin.fileno(), question)
        except BrokenPipeError:
            return b""
        return self._read_line(self.seconds)

    def _start(self) -> None:
        worker = str(Path(__file__).with_name("math_worker.py"))
        # The alarm is for a worker whose parent is gone; the parent itself is quicker.
        alarm = str(int(self.seconds) + 2)
        self.process = subprocess.Popen(
            # -P keeps the worker's folder, whose files have common names, off the import path.
            [sys.executable, "-P", worker, str(self.memory_bytes), alarm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.started += 1
        if self._read_line(START_LIMIT_SECONDS) != b"ready\n":
            self.close()
            raise RuntimeError(
                f"math-verify's process did not start; run `{sys.executable} -P {worker} {self.memory_bytes} {alarm}` "
                "to see why"
            )

    def _read_line(self, seconds: float) -> bytes | None:
        """The next line, empty where the process ended; None where the time is up."""
        line = b""
        deadline = time.monotonic() + seconds
        waiting = select.poll()
        waiting.register(self.process.stdout.fileno(), select.POLLIN)
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.poll(left * 1000):
                return None
            chunk = os.read(self.process.stdout.fileno(), 64)
            if not chunk:
                return b""
            line += chunk
        return line


_worker = MathWorker()
atexit.register(_worker.close)
os.register_at_fork(after_in_child=lambda: _worker.leave_to_parent())
