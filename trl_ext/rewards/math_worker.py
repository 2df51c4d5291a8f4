"""math-verify in a separate process, with a limit on time and memory.

math-verify's own time limit uses `signal.alarm`, which works only in the main thread. This module starts one process
at the first question, communicates over pipes, and replaces the process after a question that reaches a limit. The
process runs this file by path, so that it imports nothing but math-verify.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading

TIME_LIMIT_SECONDS = 3.0
MEMORY_LIMIT_BYTES = 1 << 30


def require_math_verify() -> None:
    """Raise ValueError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("fast=False needs math-verify, which is not installed: pip install 'trl_ext[math]'")


@functools.lru_cache(maxsize=10_000)
def verify_in_worker(answer: str, truth: str) -> bool:
    """Whether math-verify accepts the answer as the truth, both in LaTeX. Also False if it reaches a limit."""
    return _worker.verify(answer, truth)


class MathWorker:
    """A process that answers one question at a time; threads wait for each other.

    Args:
        seconds: the limit on one question.

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
        """Whether math-verify accepts the answer as the truth. Also False if it reaches a limit.

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
        """End the process and wait for it to exit."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        # -P keeps this folder off the import path: its file names could shadow other modules.
        command = [sys.executable, "-P", os.path.abspath(__file__), str(self.seconds)]
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


def main(seconds: float) -> None:
    """Answer questions until the input ends. A question that reaches a limit ends the process."""
    import logging
    import resource

    output = os.dup(1)
    # Library output must not be read as a verdict.
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A first question triggers math-verify's late imports.
    _judge("1", r"\frac{2}{2}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    os.write(output, b"ready\n")
    for line in sys.stdin.buffer:
        # SIGALRM without a handler ends the process, even inside C code.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        verdict = _judge(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(output, b"1\n" if verdict else b"0\n")


def _judge(answer: str, truth: str) -> bool:
    from math_verify import verify

    return verify(_parsed(truth), _parsed(answer), timeout_seconds=None, raise_on_error=False)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    # Only LaTeX is parsed, because math-verify evaluates plain formulas as Python.
    settings = {"extraction_config": [LatexExtractionConfig()], "fallback_mode": "no_fallback"}
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=False, **settings)


if __name__ == "__main__":
    main(float(sys.argv[1]))
