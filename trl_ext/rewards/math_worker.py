"""math-verify in a separate process, with a limit on time and memory.

math-verify's own time limit uses `signal.alarm`, which works only in the main thread. The process starts at the first
question, and is replaced after a question that reaches a limit. A question whose process was killed from outside, as
when the machine is out of memory, is asked once more.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

TIME_LIMIT_SECONDS = 3.0
JUDGE = Path(__file__).with_name("math_judge.py")


class QuestionLost(RuntimeError):
    """The process was killed from outside twice, so that there is no verdict."""


def verify_in_worker(answer: str, truth: str) -> bool:
    """Whether math-verify accepts the answer as the truth, both in LaTeX. Also False if it reaches a limit."""
    try:
        return _verdict(answer, truth)
    except QuestionLost:
        logger.warning(f"math-verify's process was killed twice over {answer!r}, which is graded as wrong")
        return False


# It remembers no question that was lost.
@functools.lru_cache(maxsize=10_000)
def _verdict(answer: str, truth: str) -> bool:
    return _worker.verify(answer, truth)


class MathWorker:
    """A process that answers one question at a time, each within `seconds` of processor time; threads wait.

    `started` counts the processes.
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
        """Whether math-verify accepts the answer as the truth. Also False if it reaches a limit."""
        with self._lock:
            for _ in range(2):
                reply, status = self._ask(json.dumps([answer, truth]).encode() + b"\n")
                if status not in (-signal.SIGKILL, -signal.SIGTERM):
                    return reply == b"1\n"
        raise QuestionLost("math-verify's process was killed twice")

    def _ask(self, question: bytes) -> tuple[bytes, int | None]:
        """The reply, and the status with which the process ended without one."""
        reply, status = b"", None
        try:
            if self.process is None or self.process.poll() is not None:
                self._start()
            self.process.stdin.write(question)
            reply = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            # A late reply to an interrupted question must not answer the next one.
            if not reply:
                status = self.close()
        return reply, status

    def close(self) -> int | None:
        """End the process, if there is one, and return its status."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.kill()
        process.communicate()
        return process.returncode

    def _start(self) -> None:
        # Run by path, it imports nothing but math-verify. -P keeps this folder, whose names could shadow other
        # modules, off the import path.
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
