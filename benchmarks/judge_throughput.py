"""Verdicts per second of `judge_pairs` with `OpenAIJudge`, against a server that takes 50 ms per answer.

`python -m benchmarks.judge_throughput` starts the server on this machine in a separate process, and judges with an
on-disk cache at several levels of concurrency. The ideal rate is concurrency / latency. The gap to it is the work of
both processes, which share the cores with other programs; the processor time per verdict gives the judge's part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trl_ext.evaluation import OpenAIJudge, judge_pairs

WORDS = "the quick brown fox jumps over the lazy dog and runs away from it "


def measure(url: str, concurrency: int, seconds: float, latency: float) -> tuple[float, float]:
    """Verdicts per second and processor seconds per verdict, with a new cache, for a run of about the given time."""
    count = max(concurrency, round(seconds * concurrency / latency / 2))
    rows = [{"row_id": str(i), "prompt": [{"role": "user", "content": f"{i}: {WORDS * 10}"}]} for i in range(count)]
    responses = [f"{WORDS * 20}{i}" for i in range(count)]
    judge = OpenAIJudge(base_url=url)
    judge.judge("warm", "up", ".")
    with tempfile.TemporaryDirectory() as folder:
        processor, start = time.process_time(), time.perf_counter()
        result = judge_pairs(
            judge, rows, responses, [WORDS] * count, cache=Path(folder) / "cache.sqlite", max_concurrency=concurrency
        )
        took, processor = time.perf_counter() - start, time.process_time() - processor
    assert result.usage.calls == 2 * count and not result.usage.errors
    return 2 * count / took, processor / (2 * count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that the server takes")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a run should take")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.loopback", "--latency", str(arguments.latency)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = server.stdout.readline().strip()
        for concurrency in arguments.concurrency:
            runs = [measure(url, concurrency, arguments.seconds, arguments.latency) for _ in range(arguments.repeats)]
            rates, processor = sorted(rate for rate, _ in runs), statistics.median(cost for _, cost in runs)
            rate, ideal = statistics.median(rates), concurrency / arguments.latency
            print(
                f"concurrency {concurrency:3d}: {rate:6.1f} verdicts/s of {ideal:.0f} ({rate / ideal:.1%}; "
                f"{rates[0]:.1f} to {rates[-1]:.1f}), {1000 * processor:.2f} ms of processor time each; "
                f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
                flush=True,
            )
    finally:
        server.kill()


if __name__ == "__main__":
    main()
