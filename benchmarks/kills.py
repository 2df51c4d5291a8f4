"""Kill toy runs of every trainer at random moments, resume them, and compare the results with uninterrupted runs.

`python -m benchmarks.kills --kills 50` needs no GPU. Kills are divided evenly among the trainers. Each process is
killed at a time drawn uniformly between 0 and 1.1 times the training time of a whole run, unless it has ended by then.
The next process resumes from the last checkpoint. A run is killed up to three times before it may end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

# Before importing torch: forking needs a process with a single thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.support import resume_once

KILLS_OF_A_RUN = 3


def measure(kind: str, kills: int, models: Path, folder: Path, draw: random.Random) -> tuple[float, int]:
    """The largest difference between killed and uninterrupted runs, and the number of runs with other metrics."""
    straight = folder / kind / "straight"
    live(kind, models, straight)
    whole = (straight / "end.safetensors").stat().st_mtime - (straight / "began").stat().st_mtime
    killed = runs = odd = 0
    difference = 0.0
    while killed < kills:
        run, runs = folder / kind / str(runs), runs + 1
        for _ in range(min(KILLS_OF_A_RUN, kills - killed)):
            if live(kind, models, run, kill_after=draw.uniform(0, 1.1 * whole)) == 0:
                break
            killed += 1
        if not (run / "end.safetensors").exists():
            live(kind, models, run)
        difference = max(difference, *resume_once.differences(straight, run).values())
        odd += resume_once.metrics(straight) != resume_once.metrics(run)
    return difference, odd


def live(kind: str, models: Path, folder: Path, kill_after: float | None = None) -> int:
    """Run one process and kill it the given number of seconds after training began; return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    log, sign = folder / "log.txt", folder / "began"
    sign.unlink(missing_ok=True)
    due = None if kill_after is None else lambda: sign.exists() and time.time() > sign.stat().st_mtime + kill_after
    code = resume_once.in_a_fork(resume_once.live, kind, models, folder, log=log, until=due)
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{kind} in {folder} ended with {code}: {log.read_text()[-4000:]}")
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="over all trainers")
    parser.add_argument("--trainers", nargs="+", default=list(resume_once.KINDS), choices=list(resume_once.KINDS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    resume_once.preload()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if resume_once.in_a_fork(resume_once.save_models, folder / "models", log=folder / "models.txt"):
            raise RuntimeError((folder / "models.txt").read_text()[-4000:])
        for index, kind in enumerate(given.trainers):
            share = given.kills // len(given.trainers) + (index < given.kills % len(given.trainers))
            difference, odd = measure(kind, share, folder / "models", folder, draw)
            print(
                f"{kind}: {share} kills, largest difference {difference:g}, {odd} runs with other metrics", flush=True
            )


if __name__ == "__main__":
    main()
