"""Plant faults in trainers of TRL and of this library, and print which of them `trl-ext doctor` names.

`python -m benchmarks.doctor` plants each fault in built trainers, in runs of three steps and in logged metrics, and
examines runs without a fault: stock trainers, TRL's documented settings, and the recipes' files. With `--steps 0` it
trains nothing, and leaves the faults out that need steps.

The runs are split in two: `fit`, on which thresholds may be chosen, and `held_out`, on which figures are taken. Runs
without a fault alternate in their listed order, and the first is held out. A fault is planted on the embedded model
and on a stand-in: `fit` has the first and `held_out` the other. Logged metrics belong to `fit`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from datasets import Dataset

from benchmarks._doctor_faults import (
    FAULTS,
    LOGGED_FAULTS,
    examine_with,
    logged,
    part_swapped,
    run_plants,
)
from benchmarks._doctor_runs import RECIPES, TRAINERS, build, healthy_runs, random_llama, stand_in, toy
from trl_ext.doctor import CHECKS, Report
from trl_ext.doctor.patient import Patient
from trl_ext.doctor.table import run_checks

HALVES = ("fit", "held_out")
SHARES = (0.05, 0.1, 0.2, 0.4)
MODELS = {"toy": toy, "stand_in": stand_in, "random_llama": random_llama}


def planted(steps: int, halves: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """One row for each planted fault."""
    for kind, names in TRAINERS.items():
        for own in (False, True):
            for half, model in (("fit", "toy"), ("held_out", "stand_in" if kind == "policy" else "random_llama")):
                if half not in halves:
                    continue
                where = f"{'trl_ext' if own else 'trl'}.{names[own]}Trainer, {model}"
                trainer = quietly(lambda kind=kind, own=own, model=model: build(kind, own, model=MODELS[model]()))
                for fault in FAULTS:
                    if kind in fault.kinds.split():
                        yield _row(fault.name, where, half, lambda t=trainer, f=fault: examine_with(t, f))
    for name, (kind, changed, moved) in LOGGED_FAULTS.items() if "fit" in halves else ():
        settings = {"stop": ["</answer>"]} if name == "stop-texts-never-occur" else {}
        report = logged(kind, changed, moved, **settings)
        yield _row(name, f"logs of {kind}", "fit", lambda report=report: report)
    for fault, own, model in run_plants() if steps else ():
        half = "fit" if model == "toy" else "held_out"
        if half in halves:
            where = f"3 steps of {'trl_ext' if own else 'trl'}.{TRAINERS[fault.kind][own]}Trainer, {model}"
            yield _row(fault.name, where, half, lambda f=fault, o=own, m=model: f.report(o, MODELS[m]()))


def _row(name: str, where: str, half: str, report: Callable[[], Report]) -> dict[str, Any]:
    try:
        found = quietly(report)
    except Exception as error:  # The other faults are planted all the same; this one counts as not named.
        found = Report(skipped={name: f"{type(error).__name__}: {error}"})
    others = [other for other in found.names if other != name]
    row = {"fault": name, "planted_in": where, "half": half, "named": name in found.names, "also": others}
    return row | ({"skipped": found.skipped[name]} if name in found.skipped else {})


def quietly(of: Callable[[], Any]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return of()


def strengths(seeds: int = 3) -> list[dict[str, Any]]:
    """How often swapped labels are found among 2,000 pairs: beside scores, in one part, and here and there."""
    rows = []
    for share in (0.0, *SHARES):
        found = {"beside scores": 0, "in one part": 0, "here and there": 0}
        for seed in range(seeds):
            part = part_swapped(2000, share, seed)
            names = _of_labels(part), _of_labels(part.shuffle(seed=seed)), _of_labels(part.map(_scores))
            found["in one part"] += "labels-swapped-in-part" in names[0]
            found["here and there"] += "labels-swapped-in-part" in names[1]
            found["beside scores"] += "labels-against-scores" in names[2]
        rows.append({"share": share, "seeds": seeds, **found})
    return rows


def _scores(row: dict[str, Any]) -> dict[str, float]:
    better = row["chosen"] if not row["swapped"] else row["rejected"]
    return {f"score_{side}": float(row[side] == better) for side in ("chosen", "rejected")}


def _of_labels(rows: Dataset) -> list[str]:
    patient = Patient(SimpleNamespace(train_dataset=rows, args=None), kind="preference")
    return run_checks(patient, ("data",)).names


def table(rows: list[dict[str, Any]]) -> None:
    """One line for each fault: how often it was named in each half, and what was named beside it."""
    print("| fault | named, fit | named, held out | also named |\n|---|---|---|---|")
    for name in CHECKS:
        of = [row for row in rows if row["fault"] == name]
        counts = [[row["named"] for row in of if row["half"] == half] for half in HALVES]
        shown = (f"{sum(found)} of {len(found)}" if found else "" for found in counts)
        others = sorted({other for row in of for other in row["also"]})
        if of:
            print(f"| {name} | {' | '.join(shown)} | {', '.join(others)} |")
    for row in rows:
        if not row["named"]:
            print(f"not named: {row['fault']} in {row['planted_in']} {row.get('skipped', '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps to train of each run; 0 for none")
    parser.add_argument("--half", choices=(*HALVES, "both"), default="both", help="the runs to take figures on")
    parser.add_argument("--recipes", nargs="*", default=tuple(RECIPES), help="recipes among the runs without a fault")
    parser.add_argument("--json", help="write the rows to this file, too")
    flags = parser.parse_args()
    halves = HALVES if flags.half == "both" else (flags.half,)
    begun = time.time()
    rows = []
    for row in planted(flags.steps, halves):
        rows.append(row)
        print(f"{'named' if row['named'] else 'NOT NAMED'}: {row['fault']}, {row['planted_in']}", file=sys.stderr)
    alarms = []
    for index, run in enumerate(healthy_runs(flags.recipes)):
        half = HALVES[(index + 1) % 2]
        if half not in halves:
            continue
        report = quietly(lambda run=run: run.report(flags.steps))
        print(f"{run.name}: {report.text()}", file=sys.stderr)
        alarms.append({"run": run.name, "half": half, "named": report.names, "skipped": report.skipped})
    swaps = strengths()
    table(rows)
    for half in halves:
        of, healthy = ([one for one in many if one["half"] == half] for many in (rows, alarms))
        named, false = sum(row["named"] for row in of), [run for run in healthy if run["named"]]
        checks = {row["fault"] for row in of if row["named"]}
        print(f"\n{half}: {named} of {len(of)} planted faults named, by {len(checks)} of {len(CHECKS)} checks")
        print(f"{half}: {len(false)} of {len(healthy)} runs without a fault with a false alarm")
        for run in false:
            print(f"  {run['run']}: {', '.join(run['named'])}")
    print("\n| labels swapped | beside scores | in one part | here and there |\n|---|---|---|---|")
    for row in swaps:
        shown = (f"{row[name]} of {row['seeds']}" for name in ("beside scores", "in one part", "here and there"))
        print(f"| {row['share']:.0%} | {' | '.join(shown)} |")
    print(f"{time.time() - begun:.0f} s")
    if flags.json:
        with open(flags.json, "w", encoding="utf-8") as file:
            json.dump({"planted": rows, "healthy": alarms, "labels_swapped": swaps}, file, indent=1)


if __name__ == "__main__":
    main()
