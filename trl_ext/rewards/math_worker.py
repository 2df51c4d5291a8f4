"""Formulas are compared in a separate process, with a limit on time and memory.

math-verify's own time limit uses `signal.alarm`, which works only in the main thread. This module starts one process
at the first question, communicates over pipes, and replaces the process after a question that reaches a limit. The
process runs `math_judge.py` by path, so that it imports nothing but math-verify.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

TIME_LIMIT_SECONDS = 3.0
JUDGE = Path(__file__).with_name("math_judge.py")


@functools.lru_cache(maxsize=10_000)
def verify_in_worker(answer: str, truth: str) -> bool:
    """Whether the answer equals the truth, both formulas in LaTeX. Also False if the question reaches a limit."""
    return _worker.verify(answer, truth)


class MathWorker:
    """A process that answers one question at a time; threads wait for each other.

    Args:
        seconds: the limit on one question, in processor time.

    Attributes:
        started: how many processes have been started.
    """

    def __init__(self, seconds: float = TIME_LIMIT_SECONDS):
        self.seconds = seconds
        self.started = 0
        self.forget()

    def forget(self) -> None:
        """After a fork, leave the process to the parent; the next question starts a new one."""
        self.process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def verify(self, answer: str, truth: str) -> bool:
        """Whether the answer equals the truth. Also False if the process ends without a reply.

        Raises:
            RuntimeError: the process does not start.
        """
        with self._lock:
            reply = b""
            try:
                if self.process is None or self.process.poll() is not None:
                    self._start()
                self.process.stdin.write(json.dumps([answer, truth]).encode() + b"\n")
                reply = self.process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                # A late reply to an interrupted question must not answer the next one.
                if not reply:
                    self.close()
            return reply == b"1\n"

    def close(self) -> None:
        """End the process, if there is one."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        # -P keeps this folder off the import path: its file names could shadow other modules.
        command = [sys.executable, "-P", str(JUDGE), str(self.seconds)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self.started += 1
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"math-verify's process did not start; run `{' '.join(command)}` to see why")


_worker = MathWorker()
# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.forget)
