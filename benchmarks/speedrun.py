"""Whether the runs of a method reach the speedrun's score, and its row for docs/speedrun.md, which has the rules.

`python -m benchmarks.speedrun runs/speedrun --method METHOD` reads the five finished runs `METHOD-0` to `METHOD-4`, as
`make speedrun` leaves them, prints their scores and seconds of training, and writes `METHOD.json` beside them.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.toy_seeds import REPOSITORY, figure, print_table
from trl_ext.evaluation import mean_with_interval
from trl_ext.evaluation.methods.runs import MethodRun, check_alike, max_new_tokens, read_method_run
from trl_ext.files import write_json
from trl_ext.instructions import MAX_NEW_TOKENS
from trl_ext.published.keep import processor_name

# The score to reach, and the seeds of a record.
TARGET, SEEDS = 0.43, range(5)
# How a run of the speedrun is evaluated.
PROMPTS = 200
RULES = {
    "model_name_or_path": "smollm2",
    "dataset_name": "instructions",
    "prompt_split": "test_gen",
    "generation_temperature": 0.0,
    "max_new_tokens": MAX_NEW_TOKENS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs {method}-{seed}")
    parser.add_argument("--method", required=True, help="name of the method")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores that the runs used")
    given = parser.parse_args()
    try:
        found = record([read_method_run(given.runs / f"{given.method}-{s}", given.method, s) for s in SEEDS])
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    found |= {"processor": processor_name(), "cores": given.threads, "commit": commit()}
    rows = zip(SEEDS, found["scores"], found["seconds"], strict=True)
    print_table("seed | score | seconds of training", [[seed, f"{score:.3f}", f"{t:.0f}"] for seed, score, t in rows])
    print(
        f"\n{given.method} {'reaches' if found['reached'] else 'does not reach'} the target: the mean score over "
        f"seeds is {figure(found['score'])}, and the lower end of its interval must be at least {TARGET}\n"
    )
    about = [f"{found['training_seconds']:.0f}", figure(found["score"]), found["processor"], found["cores"]]
    print_table("method | seconds | score | processor | cores | commit", [[given.method, *about, found["commit"]]])
    write_json(given.runs / f"{given.method}.json", found)


def record(runs: list[MethodRun]) -> dict[str, Any]:
    """The scores and seconds of a method's runs, their means with intervals over seeds, and whether it is a record.

    Raises:
        ValueError: the runs differ in more than their seed, or were not evaluated by the rules.
    """
    check_alike(runs)
    for run in runs:
        settings = {**run.settings, "max_new_tokens": max_new_tokens(run)}
        for name, value in RULES.items():
            if settings.get(name) != value:
                raise ValueError(f"{run.folder}: {name} is {settings.get(name)}, and the rules say {value}")
        if (split := str(run.settings.get("train_split"))).startswith(("validation", "test")):
            raise ValueError(f"{run.folder}: train_split is {split}, and the rules say train")
        if len(run.rows) != PROMPTS:
            raise ValueError(f"{run.folder} was evaluated on {len(run.rows)} prompts, and the rules say {PROMPTS}")
    scores = [run.results.score.policy for run in runs]
    seconds = [run.results.run.training_seconds for run in runs]
    score = mean_with_interval(scores)
    return {
        "scores": scores,
        "seconds": seconds,
        "score": score,
        "training_seconds": math.fsum(seconds) / len(seconds),
        "target": TARGET,
        "reached": score["low"] >= TARGET,
    }


def commit() -> str | None:
    """The commit of this clone, marked if files were changed; None outside of one."""
    command = ["git", "-C", REPOSITORY, "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


if __name__ == "__main__":
    main()
