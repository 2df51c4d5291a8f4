"""How much a training run depends on how its optimizer batch is divided.

`python -m benchmarks.splits` trains every case for five steps on a batch of eight, as 1 process x 8 rows, 1 x 2 x 4
accumulated, 2 x 4 and 2 x 2 x 2, on the CPU in float32. It compares parameters, logged figures and a held-out
evaluation with those of the first split. Online cases use the same responses in every split.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_DATASETS_CACHE", tempfile.mkdtemp(prefix="splits-"))

from tests.support.splits_once import (
    CASES,
    OPTIMIZERS,
    SPLITS,
    metric_differences,
    run_all,
    save_models,
    update_difference,
)
from tests.support.train_once import Run

WHOLE = "1 x 8"
# Not every trainer takes a token budget.
DIVISIONS = [name for name, split in SPLITS.items() if split[-1] == "off"]


def measure(cases: list[str], optimizers: list[str], folder: Path) -> dict[str, dict]:
    """Differences of the splits from the whole batch, for each case and optimizer."""
    save_models(folder)
    results: dict[str, dict] = {case: {} for case in cases}
    for optimizer in optimizers:
        jobs = [(case, optimizer, split) for case in cases for split in DIVISIONS]
        runs = run_all(jobs, folder / optimizer, folder, dtype="float32")
        for case in cases:
            results[case][optimizer] = compare({split: runs[case, optimizer, split] for split in DIVISIONS})
    return results


def compare(runs: dict[str, Run]) -> dict:
    """Differences of the splits from the whole batch, for one case and optimizer."""
    whole = runs[WHOLE]
    others = {split: run for split, run in runs.items() if split != WHOLE}
    size = math.sqrt(sum(parameter.double().square().sum().item() for parameter in whole.start.values()))
    metrics: dict[str, float] = {}
    for run in others.values():
        for name, difference in metric_differences(run, whole).items():
            metrics[name] = max(metrics.get(name, 0.0), difference)
    return {
        "update_over_parameters": whole.change.norm().item() / size,
        "update_difference": {split: update_difference(run, whole) for split, run in others.items()},
        "metric_difference": dict(sorted(metrics.items(), key=lambda item: -item[1])),
    }


def table(results: dict[str, dict]) -> str:
    """One row per case, with the largest differences over the splits; metrics are from the first optimizer."""
    optimizers = list(next(iter(results.values())))
    differ = " | ".join(f"{name}: update differs" for name in optimizers)
    lines = [f"| method | update / parameters | {differ} | metrics differ | most |"]
    lines.append("|---" * (4 + len(optimizers)) + "|")
    for case, by_optimizer in results.items():
        first = by_optimizer[optimizers[0]]
        name, difference = next(iter(first["metric_difference"].items()))
        updates = [max(by_optimizer[optimizer]["update_difference"].values()) for optimizer in optimizers]
        cells = [f"{value:.1e}" for value in (first["update_over_parameters"], *updates, difference)]
        lines.append(f"| {case} | {' | '.join(cells)} | `{name}` |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; default: all")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    arguments = parser.parse_args()
    unknown = [case for case in arguments.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    started = time.monotonic()
    # Trainers print what they log.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        results = measure(arguments.cases or list(CASES), arguments.optimizers, Path(folder))
    print(table(results))
    print(f"\n{time.monotonic() - started:.0f} seconds")


if __name__ == "__main__":
    main()
