"""Kill toy runs of every trainer at random moments, resume them, and compare what they end with to straight runs.

`python -m benchmarks.kills --kills 50` needs no GPU. The trainers share the kills evenly. A life is killed at a moment
drawn uniformly from what the training of a whole run takes and a tenth more, counted from where its own training
begins, unless it has ended by then; the next life begins from the last checkpoint. A run is killed up to three times
before it may end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Before torch is imported: forks need a process in which no other thread runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests import resume_once
from trl_ext.files import write_json
from trl_ext.trainers.callbacks import read_metrics

KILLS_OF_A_RUN = 3


def measure(kind: str, kills: int, models: Path, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Kill runs of a kind so many times in all, and compare each run's end with the straight one's."""
    straight = folder / kind / "straight"
    _live(kind, models, straight)
    whole = (straight / "end.safetensors").stat().st_mtime - (straight / "began").stat().st_mtime
    row = {"trainer": kind, "kills": 0, "ended before": 0, "runs": 0, "at step": Counter(), "difference": 0.0}
    row |= {"metrics differ": 0, "seconds": round(whole, 1)}
    while row["kills"] < kills:
        run = folder / kind / str(row["runs"])
        row["runs"] += 1
        for _ in range(min(KILLS_OF_A_RUN, kills - row["kills"])):
            if _live(kind, models, run, kill_after=draw.uniform(0, 1.1 * whole)) == 0:
                row["ended before"] += 1
                break
            row["kills"] += 1
            row["at step"][_last_step(run)] += 1
        if not (run / "end.safetensors").exists():
            _live(kind, models, run)
        row["difference"] = max(row["difference"], *resume_once.differences(straight, run).values())
        row["metrics differ"] += resume_once.metrics(straight) != resume_once.metrics(run)
    row["at step"] = {str(step): count for step, count in sorted(row["at step"].items())}
    return row


def _live(kind: str, models: Path, folder: Path, kill_after: float | None = None) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    log, sign = folder / "log.txt", folder / "began"
    sign.unlink(missing_ok=True)
    due = None if kill_after is None else lambda: sign.exists() and time.time() > sign.stat().st_mtime + kill_after
    code = resume_once.in_a_fork(resume_once.live, kind, models, folder, log=log, until=due)
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{kind} in {folder} ended with {code}: {log.read_text()[-4000:]}")
    return code


def _last_step(folder: Path) -> int:
    """Of the last line of metrics that the killed run wrote."""
    return max((row["step"] for row in read_metrics(folder / "run" / "metrics.jsonl")), default=0)


def _print(*columns: Any) -> None:
    print("{:<18} {:>5} {:>5} {:>11} {:>15}  {}".format(*columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="over all trainers")
    parser.add_argument("--trainers", nargs="+", default=list(resume_once.KINDS), choices=list(resume_once.KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    resume_once.preload()
    draw, rows = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if resume_once.in_a_fork(resume_once.save_models, folder / "models", log=folder / "models.txt"):
            raise RuntimeError((folder / "models.txt").read_text()[-4000:])
        _print("trainer", "kills", "runs", "difference", "metrics differ", "killed after step")
        for index, kind in enumerate(arguments.trainers):
            share = arguments.kills // len(arguments.trainers) + (index < arguments.kills % len(arguments.trainers))
            row = measure(kind, share, folder / "models", folder, draw)
            rows.append(row)
            steps = " ".join(f"{step}:{count}" for step, count in row["at step"].items())
            difference = f"{row['difference']:.3g}"
            _print(kind, row["kills"], row["runs"], difference, row["metrics differ"], steps)
    worst = max(row["difference"] for row in rows)
    print(
        f"{sum(row['kills'] for row in rows)} kills: largest difference of parameters, optimizer and random state "
        f"{worst:g}; {sum(row['metrics differ'] for row in rows)} runs with other metrics"
    )
    if arguments.json:
        write_json(arguments.json, {"kills": arguments.kills, "seed": arguments.seed, "rows": rows})


if __name__ == "__main__":
    main()
