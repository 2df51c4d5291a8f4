"""The process that math-verify runs in: its limits, threads and forks, and that none is left behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from trl_ext.rewards.math_worker import MathWorker


@pytest.fixture
def worker():
    worker = MathWorker(seconds=1.0)
    yield worker
    worker.close()


def seconds_of_children() -> float:
    """The processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_question_without_end_ends_at_the_limit(worker):
    """Hours for a computer algebra system; asked past the checks that come before it."""
    assert worker.verify("2/4", r"\frac{1}{2}") is True
    process, start = worker.process, seconds_of_children()
    assert worker.verify("9^{9^{9^{9}}}", "9^{9^{9^{9}}}+1") is False
    assert process.poll() is not None and seconds_of_children() - start < 5
    assert worker.verify("2/4", r"\frac{1}{3}") is False and worker.verify("2/4", r"\frac{1}{2}") is True
    assert worker.started == 2


# In place of math-verify: what a question of each kind would do to the process, without the wait for it.
STUB = """
import dataclasses
import sympy
@dataclasses.dataclass
class Normalization:
    units: bool = True
@dataclasses.dataclass
class LatexExtractionConfig:
    normalization_config: Normalization = dataclasses.field(default_factory=Normalization)
def parse(text, **settings):
    print("0")
    if "memory" in text:
        bytearray(1 << 31)
    if "C code" in text:
        sum(range(10 ** 12))
    if "crash" in text:
        import os
        os.abort()
    return [sympy.Symbol(text)]
"""


@pytest.mark.parametrize("kind", ["memory", "C code", "crash"])
def test_a_question_that_takes_too_much_ends_the_process(kind, tmp_path, monkeypatch):
    """2 GiB where 1 GiB is allowed, C code that sees no signal handler, a crash."""
    (tmp_path / "math_verify.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = MathWorker(seconds=1.0)
    try:
        assert worker.verify("1", "1") is True
        start = seconds_of_children()
        assert worker.verify(kind, "1") is False
        assert worker.process is None and seconds_of_children() - start < 10
        assert worker.verify("2", "2") is True and worker.verify("2", "1") is False
        assert worker.started == 2
    finally:
        worker.close()


def test_threads_share_the_process(worker):
    """signal.alarm, math-verify's own limit, raises in any thread but the main one."""
    worker.seconds = 30.0
    questions = [(f"{2 * n}/4", f"{n + n % 3}/2") for n in range(1, 61)]
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda question: worker.verify(*question), questions))
    assert verdicts == [n % 3 == 0 for n in range(1, 61)]
    assert worker.started == 1


def test_a_killed_process_is_replaced_and_none_is_left(worker):
    assert worker.verify("2/4", "1/2")
    first = worker.process
    first.kill()
    first.wait()
    assert worker.verify("4/8", "1/2")
    assert worker.started == 2
    second = worker.process.pid
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


SCRIPT = """
import multiprocessing, os, sys
from trl_ext.rewards import math_worker

def grade(n):
    return math_worker.verify_in_worker(f"{2 * n}/4", f"{n}/2"), math_worker._worker.process.pid

if __name__ == "__main__":
    here = grade(1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        there = pool.map(grade, range(2, 6), chunksize=2)
    again = grade(7)
    assert all(verdict for verdict, _ in [here, *there, again]), there
    assert here[1] == again[1] and here[1] not in {pid for _, pid in there}
    print(*{pid for _, pid in [here, *there]})
"""


def test_forks_have_processes_of_their_own_and_all_end(tmp_path):
    """Nothing is left a moment after the program, neither its worker nor those of its forks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) >= 2
    deadline = time.monotonic() + 10
    while any(map(_runs_math_worker, pids)):
        assert time.monotonic() < deadline, "a worker outlived its program"
        time.sleep(0.05)


def _runs_math_worker(pid: int) -> bool:
    try:
        return b"math_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
