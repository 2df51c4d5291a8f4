"""Measure everything that is measured on a GPU, in one command that runs twice.

    python -m benchmarks.gpu --json gpu.json --budget_seconds 480
    python -m benchmarks.gpu --json gpu.json --budget_seconds 480 --resume gpu.json

A: speed of the machine. B: exactness of packed passes against that of padded ones. C: optimizer steps of stock TRL
(its defaults, and tuned) and of packing, in turns, cold and warm apart. D: profiles of these steps. F: three steps end
to end. G: scoring with a reward model. Weights are random, with the shapes of Qwen2.5; nothing is downloaded.

An arm starts only if its predicted time fits into the rest of the budget. Predictions are for one H100, and grow by
the factor by which earlier arms exceeded theirs. The JSON file is rewritten after every arm, also one that fails or
runs out of memory. `--resume` keeps the finished arms of a file and runs the others, failed ones included. At the end,
a Markdown table is printed and written beside the JSON. `--device cpu --size 24M --quick` tries all of it on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.step import ENVIRONMENT
from trl_ext.evaluation.command_line import CommandParser, markdown_table, one_line_errors
from trl_ext.files import read_json, write_json, write_text

# Predicted seconds to make an arm, and of an optimizer step of stock TRL, on an H100; of quick runs, on a CPU.
SECONDS = {
    "1.5B": {"setup": 10, "grpo": 2.0, "dpo": 4.6},
    "0.5B": {"setup": 5, "grpo": 1.0, "dpo": 2.2},
    "24M": {"setup": 2, "grpo": 1.0, "dpo": 1.0},
}
# The title and the columns of a part's table; rows of a result that lack the last column are not shown.
TABLES = {
    "A": ("machine", ["value"]),
    "B": ("errors of packed passes over those of padded ones", ["compared", "failed", "ratio"]),
    "C": (
        "optimizer step",
        ["micro_batch", "encoded_tokens", "cold_seconds", "median_seconds", "ratio_to_stock", "ratio_to_tuned"]
        + ["peak_mib", "activations_mib", "gradient_difference"],
    ),
    "D": ("profile of two micro-batches", ["busy", "kernels", "waits", "copies", "attention"]),
    "F": ("end to end, three steps", ["seconds"]),
    "G": ("scoring of a rollout", ["seconds", "difference_to_float32"]),
}


class Item(NamedTuple):
    """An arm of the battery: its name, its predicted seconds, and what measures it."""

    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]


def list_items(arguments, folder: Path, kept: dict[Any, Any]) -> Iterator[Item]:
    """The arms, in the order in which they run; `kept` holds the trainers that consecutive arms share."""
    from benchmarks.gpu import correctness, machine, steps, whole_runs

    device, quick, rounds = arguments.device, arguments.quick, 2 if arguments.quick else 4
    slow = 0.2 if quick else 1

    def drop() -> None:
        kept.clear()
        machine.free(device)

    def setup(*key: str) -> steps.Setup:
        if key not in kept:
            drop()
            kept[key] = steps.Setup(*key, device, quick, folder)
        return kept[key]

    def alone(function: Callable, *given: Any) -> Callable[[], dict[str, Any]]:
        return lambda: (drop(), function(*given, device, quick))[1]

    yield Item("A/machine", 15 * slow, alone(machine.measure))
    yield Item("B/attention", 30 * slow, alone(correctness.attention))
    yield Item("B/passes", 80 * slow, alone(correctness.passes))
    for size in arguments.size:
        ready = SECONDS[size]["setup"]
        for workload in steps.WORKLOADS:
            step, key = SECONDS[size][workload], (workload, size)
            shares = {name: variant.share * step for name, variant in steps.VARIANTS.items()}
            baselines = sum(shares[name] for name in steps.BASELINES)
            # Baselines are made with the first arm: a short step, each window cold, and two passes of gradients.
            seconds = ready + (steps.WINDOWS + 0.5) * baselines + 2 * step
            for name in [name for name in shares if name not in steps.BASELINES]:
                seconds += ready + (steps.WINDOWS + 1.5) * shares[name] + step
                seconds += (steps.WINDOWS + rounds) * (baselines + shares[name])
                seconds += 60 * slow * steps.VARIANTS[name].compiled
                compare = partial(lambda key, name: setup(*key).compare(name, rounds), key, name)
                yield Item(f"C/{workload}/{size}/{name}", seconds, compare)
                seconds = 0.0
            # Three steps of at most a quarter of the micro-batches, one of them under the profiler.
            seconds = ready + 1.5 * sum(shares.values())
            yield Item(f"D/{workload}/{size}", seconds, lambda key=key: setup(*key).profile())
        if size == arguments.size[0]:
            yield Item(f"G/{size}", 30 * slow, alone(whole_runs.score, size))
            for workload in steps.WORKLOADS:
                # Without vLLM, generation takes about three times as long as stock's update.
                seconds = ready + 3 * SECONDS[size][workload] * (4 if workload == "grpo" else 1)
                for run in whole_runs.RUNS:
                    name = f"F/{workload}/{size}/{run}"
                    yield Item(name, seconds, alone(whole_runs.train, run, workload, size, folder))


def parse(argv: Sequence[str] | None = None):
    parser = CommandParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", nargs="+", choices=list(SECONDS), default=["1.5B", "0.5B"])
    parser.add_argument("--quick", action="store_true", help="short rows and two rounds, to try the battery")
    parser.add_argument("--only", nargs="+", metavar="PREFIX", help="arms whose names begin so, as C/dpo")
    parser.add_argument("--budget_seconds", type=float, default=480, help="no arm starts that would exceed this")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gpu.json"), help="the file of figures")
    parser.add_argument("--resume", type=Path, help="keep the finished arms of this JSON file")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.quick:
        raise ValueError("--device cpu would take hours: add --quick --size 24M, or take benchmarks.step")
    arguments.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count()
    return arguments


def selected(items: Iterator[Item], only: Sequence[str] | None) -> list[Item]:
    """The arms whose names begin with one of the prefixes; all without prefixes."""
    items = list(items)
    for prefix in only or ():
        if not any(item.name.startswith(prefix) for item in items):
            raise ValueError(f"--only {prefix}: no arm begins so")
    return [item for item in items if item.name.startswith(tuple(only or [""]))]


def read_finished(path: Path | None, quick: bool) -> dict[str, Any]:
    """The finished arms of an earlier call by name; arms that failed are left out, to be tried again."""
    if path is None:
        return {}
    earlier = read_json(path)
    if earlier["quick"] != quick:
        raise ValueError(f"--resume {path}: its figures are those with{'out' if quick else ''} --quick")
    return {name: row for name, row in earlier["arms"].items() if row["state"] != "failed"}


def measure(item: Item) -> dict[str, Any]:
    """Run an arm: its state, `done`, `out of memory` or `failed`, its seconds and its result."""
    from benchmarks.gpu.machine import out_of_memory

    started = time.perf_counter()
    try:
        # JSON has neither NaN nor infinities: they become words.
        state, result = "done", json.loads(json.dumps(item.run()), parse_constant=str)
    except Exception as error:  # Whatever an arm raises, the others are still to be measured.
        state, result = "failed", traceback.format_exc()[-3000:]
        if isinstance(error, RuntimeError) and out_of_memory(error):
            state, result = "out of memory", str(error)
    return {"state": state, "seconds": time.perf_counter() - started, "predicted": item.seconds, "result": result}


def run(arguments, items: list[Item], kept: dict[Any, Any]) -> dict[str, Any]:
    """Measure the arms that fit into the budget; return what the JSON file holds."""
    from benchmarks._step_arms import describe_machine, prepare

    prepare(arguments)
    started, spent, predicted = time.perf_counter(), 0.0, 0.0
    report = {"quick": arguments.quick, "arms": read_finished(arguments.resume, arguments.quick)}
    machine = describe_machine(arguments)
    for item in items:
        if item.name in report["arms"]:
            continue
        seconds = item.seconds * max(1.0, spent / predicted if predicted else 1.0)
        left = arguments.budget_seconds - (time.perf_counter() - started)
        if seconds > left:
            print(f"{item.name}: not started, predicted {seconds:.0f} s of {left:.0f} s left")
            continue
        row = measure(item)
        report["arms"][item.name] = {**row, "machine": machine}
        spent, predicted = spent + row["seconds"], predicted + item.seconds
        write_json(arguments.json, report)
        print(f"{item.name}: {row['state']}, {row['seconds']:.1f} s, predicted {item.seconds:.1f} s", flush=True)
        if row["state"] != "done":
            print(row["result"].strip().splitlines()[-1], file=sys.stderr)
            # What is left of it, as gradients, must not stay for the next one.
            kept.clear()
    report["left"] = [item.name for item in items if item.name not in report["arms"]]
    write_json(arguments.json, report)
    return report


def markdown(report: dict[str, Any]) -> str:
    """The machines and the tables of a report, and the arms that are not measured."""
    tables: dict[str, list[list[Any]]] = {part: [] for part in TABLES}
    machines, missing = set(), [[name, "not started"] for name in report["left"]]
    for name, arm in report["arms"].items():
        versions = ", ".join(f"{library} {number}" for library, number in arm["machine"]["versions"].items())
        machines.add(f"{arm['machine']['device']} ({versions})\n")
        if arm["state"] != "done":
            missing.append([name, arm["state"]])
            continue
        columns = TABLES[name[0]][1]
        for kind, row in arm["result"].items():
            if isinstance(row, dict) and columns[-1] in row:
                tables[name[0]].append([name[2:], kind, *(cell(row.get(column)) for column in columns)])
    written = [
        markdown_table([TABLES[part][0], "", *(column.replace("_", " ") for column in TABLES[part][1])], rows)
        for part, rows in tables.items()
        if rows
    ]
    return "\n".join(
        [*sorted(machines), *written, *([markdown_table(["not measured", "why"], missing)] * bool(missing))]
    )


def cell(value: Any) -> Any:
    """What a table shows of a value: three digits, and the first entries of lists and mappings."""
    if isinstance(value, dict):
        return ", ".join(f"{name[:60]} {cell(part)}" for name, part in list(value.items())[:3])
    if isinstance(value, list):
        return ", ".join(str(cell(part)) for part in value[:3])
    return f"{value:.3g}" if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        arguments = parse(argv)
        kept: dict[Any, Any] = {}
        items = selected(list_items(arguments, Path(folder), kept), arguments.only)
        report = run(arguments, items, kept)
        text = markdown(report)
        write_text(arguments.json.with_suffix(".md"), text)
        print(text)
        if report["left"]:
            print(f"{len(report['left'])} arms are left; resume with --resume {arguments.json}")


if __name__ == "__main__":
    main()
