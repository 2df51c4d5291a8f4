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

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.step import ENVIRONMENT
from trl_ext.evaluation.command_line import (
    CommandParser,
    at_least_one,
    format_table,
    markdown_table,
    one_line_errors,
)
from trl_ext.files import read_json, write_json, write_text

# Predicted seconds of one optimizer step of stock TRL on an H100; in quick runs, on a CPU.
STEP_SECONDS = {
    ("grpo", "0.5B"): 1.0,
    ("dpo", "0.5B"): 2.2,
    ("grpo", "1.5B"): 2.0,
    ("dpo", "1.5B"): 4.6,
    ("grpo", "24M"): 1.0,
    ("dpo", "24M"): 1.0,
}
SETUP_SECONDS = {"0.5B": 5, "1.5B": 10, "24M": 2}


class Item(NamedTuple):
    """An arm of the battery: its name, its predicted seconds, and what measures it."""

    name: str
    seconds: float
    run: Callable[[], Any]


class Battery:
    """The arms of a run. It keeps the trainers of one workload, which consecutive arms share."""

    def __init__(self, arguments, folder: Path):
        from benchmarks.gpu.devices import Cpu, Gpu

        self.arguments, self.folder = arguments, folder
        self.quick = arguments.quick
        self.device = Gpu() if arguments.device == "cuda" else Cpu()
        self.rounds = 2 if self.quick else arguments.rounds
        self._setup = (None, None)

    def setup(self, workload: str | None, size: str | None):
        """The trainers of a workload and size; those of another one are freed first."""
        from benchmarks.gpu import devices, steps

        if self._setup[0] != (workload, size):
            self._setup = (None, None)
            devices.free(self.device)
            if workload is not None:
                made = steps.Setup(workload, size, self.device, self.quick, self.folder)
                self._setup = ((workload, size), made)
        return self._setup[1]

    def items(self) -> Iterator[Item]:
        """The arms, in the order in which they run."""
        from benchmarks.gpu import correctness, devices, machine, steps, whole_runs

        def alone(function: Callable, *given: Any) -> Callable[[], Any]:
            """Without trainers of the arms before, or what is left of them."""
            return lambda: (self.setup(None, None), devices.free(self.device), function(*given))[-1]

        slow = 0.2 if self.quick else 1
        yield Item("A/machine", 15 * slow, alone(machine.measure, self.device, self.quick))
        yield Item("B/attention", 30 * slow, alone(correctness.attention, self.device, self.quick))
        yield Item("B/passes", 80 * slow, alone(correctness.passes, self.device, self.quick))
        largest, *_ = sizes = self.arguments.size
        for size in sizes:
            for workload in steps.WORKLOADS:
                step = STEP_SECONDS[workload, size]
                baselines = sum(steps.VARIANTS[name].share for name in steps.BASELINES) * step
                # Baselines are made and warmed up with the first arm: a short step, and each window twice.
                passes = 2 * steps.WINDOWS + 0.5
                further = SETUP_SECONDS[size] + passes * baselines
                for name, variant in steps.VARIANTS.items():
                    if name in steps.BASELINES:
                        continue
                    own = variant.share * step
                    seconds = further + (self.rounds + passes + 1) * own + (self.rounds + 1) * baselines + 2 * step
                    further = SETUP_SECONDS[size]
                    yield Item(
                        f"C/{workload}/{size}/{name}",
                        seconds,
                        lambda w=workload, s=size, n=name: self.setup(w, s).compare(n, self.rounds),
                    )
                yield Item(
                    f"D/{workload}/{size}",
                    SETUP_SECONDS[size] + 2 * sum(variant.share for variant in steps.VARIANTS.values()) * step,
                    lambda w=workload, s=size: self.setup(w, s).profile(),
                )
            if size == largest:
                yield Item(f"G/{size}", 30 * slow, alone(whole_runs.score, size, self.device, self.quick))
                for workload in steps.WORKLOADS:
                    # Without vLLM, generation takes about three times as long as stock's update.
                    seconds = SETUP_SECONDS[size] + 3 * STEP_SECONDS[workload, size] * (4 if workload == "grpo" else 1)
                    for run in whole_runs.RUNS:
                        given = (run, workload, size, self.device, self.quick, self.folder)
                        yield Item(f"F/{workload}/{size}/{run}", seconds, alone(whole_runs.train, *given))


def parse(argv: Sequence[str] | None = None):
    parser = CommandParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", nargs="+", choices=list(SETUP_SECONDS), default=["1.5B", "0.5B"])
    parser.add_argument("--quick", action="store_true", help="short rows and two rounds, to try the battery")
    parser.add_argument("--rounds", type=at_least_one, default=6, help="times that the arms of part C take turns")
    parser.add_argument("--only", nargs="+", metavar="PREFIX", help="arms whose names begin so, as C/dpo")
    parser.add_argument("--budget_seconds", type=float, default=480, help="no arm starts that would exceed this")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/gpu.json"), help="write the figures here"
    )
    parser.add_argument("--resume", type=Path, help="keep the finished arms of this JSON file")
    parser.add_argument("--dry_run", action="store_true", help="print the arms and their predicted seconds")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.quick:
        raise ValueError("--device cpu would take hours: add --quick --size 24M, or take benchmarks.step")
    return arguments


def selected(battery: Battery, only: Sequence[str] | None) -> list[Item]:
    """The arms whose names begin with one of the prefixes; all without prefixes."""
    items = list(battery.items())
    for prefix in only or ():
        if not any(item.name.startswith(prefix) for item in items):
            raise ValueError(f"--only {prefix}: no arm begins so; --dry_run lists them")
    return [item for item in items if not only or item.name.startswith(tuple(only))]


def read_finished(path: Path | None, quick: bool) -> dict[str, Any]:
    """The finished arms of an earlier call by name; arms that failed are left out, to be tried again."""
    if path is None:
        return {}
    earlier = read_json(path)
    if earlier["quick"] != quick:
        raise ValueError(
            f"--resume {path}: it was {'a' if earlier['quick'] else 'not a'} --quick run: name another file"
        )
    return {name: row for name, row in earlier["arms"].items() if row["state"] != "failed"}


def measure(item: Item, battery: Battery) -> dict[str, Any]:
    """Run an arm: its state, `done`, `out of memory` or `failed`, its seconds and its result."""
    import torch

    from benchmarks.gpu import devices

    started = time.perf_counter()
    try:
        state, result = "done", item.run()
    except torch.OutOfMemoryError as error:
        state, result = "out of memory", (str(error) or "no message").splitlines()[0]
    except Exception:  # Whatever an arm raises, the others are still to be measured.
        state, result = "failed", traceback.format_exc()[-3000:]
    if state != "done" and battery.device.works():
        # Gradients and trainers of an arm that did not end must not stay for the next one.
        battery.setup(None, None)
        devices.free(battery.device)
    seconds = time.perf_counter() - started
    return {"state": state, "seconds": seconds, "predicted": item.seconds, "result": without_nan(result)}


def without_nan(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(name): without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and value - value != 0 else value


def run(arguments, folder: Path) -> dict[str, Any]:
    """Measure the arms that fit into the budget; return what the JSON file holds."""
    from benchmarks._step_arms import prepare
    from benchmarks.gpu import machine

    prepare(arguments)
    battery = Battery(arguments, folder)
    items, started = selected(battery, arguments.only), time.perf_counter()
    report = {"quick": arguments.quick, "arms": read_finished(arguments.resume, arguments.quick)}
    description = machine.describe(battery.device)
    print(description["device"], *(f"{name} {text}" for name, text in description["versions"].items()), sep=", ")
    spent = predicted = 0.0
    for item in items:
        if item.name in report["arms"]:
            continue
        pace = max(1.0, spent / predicted) if predicted else 1.0
        left = arguments.budget_seconds - (time.perf_counter() - started)
        if item.seconds * pace > left:
            print(f"{item.name}: not started, predicted {item.seconds * pace:.0f} s of {left:.0f} s left")
            continue
        row = measure(item, battery)
        report["arms"][item.name] = {**row, "machine": description}
        spent, predicted = spent + row["seconds"], predicted + item.seconds
        write_json(arguments.json, report)
        print(f"{item.name}: {row['state']}, {row['seconds']:.1f} s, predicted {item.seconds:.1f} s", flush=True)
        if row["state"] != "done":
            print(str(row["result"]).strip().splitlines()[-1], file=sys.stderr)
        if row["state"] == "failed" and not battery.device.works():
            # As after an illegal access: every further call of this process fails.
            print("the device no longer answers: resume in a new process", file=sys.stderr)
            break
    report["left"] = [item.name for item in items if item.name not in report["arms"]]
    write_json(arguments.json, report)
    return report


# ---- Reporting ----


def markdown(report: dict[str, Any]) -> str:
    """The tables of a report."""
    arms = {name: row for name, row in report["arms"].items() if row["state"] == "done"}
    machines = {
        f"{row['machine']['device']} ({', '.join(f'{n} {v}' for n, v in row['machine']['versions'].items())})"
        for row in arms.values()
    }
    parts = ["\n".join(sorted(machines)) + "\n"]
    compared = [
        [name.split("/", 1)[1], kind, result["compared"], result["failed"], _number(result["ratio"], ".2f")]
        for name, row in arms.items()
        if name.startswith("B/")
        for kind, result in row["result"].items()
        if isinstance(result, dict)
    ]
    if compared:
        header = ["exactness of", "", "compared", "packed error above 1.5 x padded", "worst ratio"]
        parts.append(markdown_table(header, compared))
    steps = [line for name, row in arms.items() if name.startswith("C/") for line in _step_lines(name, row["result"])]
    if steps:
        header = ["optimizer step", "arm", "micro-batch", "tokens", "cold s", "warm s"]
        header += ["to stock", "to tuned", "peak MiB", "gradient off (padding alone)"]
        parts.append(markdown_table(header, steps))
    profiles = [
        [name[2:], figures["label"], f"{figures['busy']:.0%}", *(figures[k] for k in ("kernels", "waits"))]
        + [sum(figures["copies"].values()), ", ".join(list(figures["attention"])[:2])[:90]]
        for name, row in arms.items()
        if name.startswith("D/")
        for figures in row["result"].values()
    ]
    if profiles:
        header = ["profile of two micro-batches", "arm", "busy", "kernels", "waits", "copies", "attention"]
        parts.append(markdown_table(header, profiles))
    scored = [
        [name[2:], kind, f"{figures['seconds']:.3f}", _number(figures["difference_to_float32"], ".1e")]
        for name, row in arms.items()
        if name.startswith("G/")
        for kind, figures in row["result"].items()
    ]
    if scored:
        parts.append(markdown_table(["scoring of a rollout", "", "seconds", "difference to float32"], scored))
    whole = [
        [name[2:].rsplit("/", 1)[0], row["result"]["label"], *(f"{s:.2f}" for s in row["result"]["seconds"])]
        for name, row in arms.items()
        if name.startswith("F/")
    ]
    if whole:
        parts.append(markdown_table(["end to end", "run", "step 1, s", "step 2, s", "step 3, s"], whole))
    other = [[name, row["state"]] for name, row in report["arms"].items() if name not in arms]
    other += [[name, "not started"] for name in report.get("left", ())]
    if other:
        parts.append(markdown_table(["not measured", "why"], other))
    return "\n".join(parts)


def _step_lines(name: str, result: dict[str, Any]) -> Iterator[list[Any]]:
    workload = name[2:].rsplit("/", 1)[0]
    own = result["arm"]
    for arm, figures in result["arms"].items():
        if not arm.startswith("ratio_to"):
            ratios = ["-", "-"]
            if arm == own:
                found = [result["arms"].get(f"ratio_to_{baseline}") for baseline in ("stock", "tuned")]
                ratios = ["{:.2f}x, {:.2f} to {:.2f}".format(r["median"], *r["range"]) if r else "-" for r in found]
            own_error, padding_error = (
                _number(result[f"gradient_difference{of}"], ".1e") for of in ("", "_of_more_padding")
            )
            yield [
                workload,
                figures["label"],
                figures["micro_batch"],
                figures["encoded_tokens"],
                f"{figures['cold_seconds']:.3f}",
                f"{figures['median_seconds']:.3f}",
                *ratios,
                round(figures["peak_mib"]),
                f"{own_error} ({padding_error})" if arm == own else "-",
            ]


def _number(value: float | None, form: str) -> str:
    """The number, or NaN for what JSON holds in its place."""
    return "NaN" if value is None else format(value, form)


def main(argv: Sequence[str] | None = None) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        arguments = parse(argv)
        arguments.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count()
        if arguments.dry_run:
            finished = read_finished(arguments.resume, arguments.quick)
            items = selected(Battery(arguments, Path(folder)), arguments.only)
            rows = [[item.name, round(item.seconds, 1), finished.get(item.name, {}).get("state")] for item in items]
            total = round(sum(item.seconds for item in items if item.name not in finished), 1)
            print(format_table(["arm", "predicted seconds", "state"], [*rows, ["in all that is left", total, None]]))
            return
        report = run(arguments, Path(folder))
        text = markdown(report)
        write_text(arguments.json.with_suffix(".md"), text)
        print(text)
        if report["left"]:
            print(f"{len(report['left'])} arms are left; go on with --resume {arguments.json}")


if __name__ == "__main__":
    main()
