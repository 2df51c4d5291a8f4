"""The process that math-verify runs in: one question as a line of JSON on its input, one verdict on its output.

It is started by its path, so that it imports nothing but math-verify. Its own alarm ends it where the process that
asks is gone or held up, since that works in the middle of C code too.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import sys


def main(memory_bytes: int, alarm_seconds: int) -> None:
    """Answer questions until the input ends. A question that needs too much ends the process."""
    output = os.dup(1)
    # What a library prints must not be read as a verdict.
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    judge = _judge()
    # A first question loads what math-verify loads late.
    judge("1", r"\frac{2}{2}")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(output, b"ready\n")
    for line in sys.stdin.buffer:
        answer, truth = json.loads(line)
        signal.alarm(alarm_seconds)
        try:
            verdict = judge(answer, truth)
        except (MemoryError, RecursionError):
            # What is left of the library's state is not to be relied on.
            os._exit(3)
        signal.alarm(0)
        # math-verify takes a MemoryError on its way for an answer that is wrong.
        if not verdict and _peak_bytes() > memory_bytes / 2:
            os._exit(3)
        os.write(output, b"1\n" if verdict else b"0\n")


def _peak_bytes() -> int:
    """The most memory that this program has had resident.

    Not `ru_maxrss` where it can be helped: Linux hands a parent's on to the program that it starts.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _judge():
    from math_verify import LatexExtractionConfig, parse, verify

    # Formulas are read as LaTeX alone: math-verify evaluates plain ones as Python.
    settings = {"extraction_config": [LatexExtractionConfig()], "fallback_mode": "no_fallback"}

    @functools.lru_cache(maxsize=1024)
    def read(text: str):
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=False, **settings)

    def judge(answer: str, truth: str) -> bool:
        return bool(verify(read(truth), read(answer), timeout_seconds=None, raise_on_error=False))

    return judge


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
