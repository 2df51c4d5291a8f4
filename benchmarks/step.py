"""Compare an optimizer step of stock TRL with the same step with packing, on the same batches.

`python -m benchmarks.step --trainer preference --lengths wildchat --size 24M` creates TRL's trainer twice, on models
with the same random weights, applies `share_prefixes` to one, and alternates between them on each batch. A step is the
forward pass (also of the reference, if the trainer has one), loss, backward pass and `optimizer.step()`; generation is
not measured. It prints a table; `--json` writes the figures of every batch.

Ratios are stock over packed. CPU seconds are valid while other programs run, wall seconds only on an idle machine. In
both arms the LM head scores only labelled positions, as in TRL on CUDA. A policy batch is a micro-batch of whole
groups, as wide as TRL pads the 16 prompts that are sampled together. Tokens per second exclude padding and count
repeated prompts each time. Before each step, the packed arm takes stock's weights, so that losses and gradient norms
are compared at equal weights.
Peak memory is that of an arm's first step, on its largest batch, above what was held before. On the CPU it is resident
memory, measured in a separate process for each arm.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._lengths import KINDS
from trl_ext.evaluation.command_line import CommandParser, at_least_one, format_table, one_line_errors

# Must be set before importing transformers.
ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
MIB = 2**20
TRAINERS = ("preference", "reward", "policy")
# Pairs per batch, or groups per policy micro-batch: 4 and 2; the recipes' values on the embedded benchmark.
BATCH_SIZES = {("toy", "preference"): 32, ("toy", "reward"): 32, ("toy", "policy"): 8, ("long", "policy"): 1}
DEFAULT_BATCH_SIZES = {"preference": 4, "reward": 4, "policy": 2}


def parse(argv: Sequence[str] | None = None):
    parser = CommandParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--lengths", choices=KINDS, default="wildchat")
    parser.add_argument(
        "--size", choices=["toy", "24M", "53M", "135M", "0.5B", "1.5B"], help="default: toy for toy, else 24M"
    )
    parser.add_argument("--group_size", type=at_least_one, default=4, help="responses to a prompt of the policy")
    parser.add_argument("--batch_size", type=at_least_one, help="pairs, or prompts of a micro-batch of the policy")
    parser.add_argument("--pairs", type=at_least_one, default=10, help="batches, each measured in both arms")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora_r", type=int, default=0, help="rank of an adapter on every linear layer; 0 for none")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--threads", type=at_least_one, default=1, help="of torch, on the CPU")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", choices=["stock", "packed"], help=SUPPRESS)
    arguments = parser.parse_args(argv)
    # On a CPU as in the recipes: the weights stay in float32.
    arguments.weights = arguments.dtype if arguments.device == "cuda" else "float32"
    arguments.size = arguments.size or ("toy" if arguments.lengths == "toy" else "24M")
    default = BATCH_SIZES.get((arguments.lengths, arguments.trainer), DEFAULT_BATCH_SIZES[arguments.trainer])
    arguments.batch_size = arguments.batch_size or default
    if arguments.trainer == "policy" and arguments.group_size < 2:
        raise ValueError("--group_size 1: an advantage needs a group of at least 2 responses")
    return arguments


# ---- Measuring ----


def measure(arguments, folder: Path) -> dict[str, Any]:
    """The figures of every batch, and their summary."""
    from benchmarks import _step_arms

    _step_arms.prepare(arguments)
    stock, packed = (_step_arms.Arm(name == "packed", arguments, folder) for name in ("stock", "packed"))
    batches = _step_arms.make_batches(arguments, stock.trainer)
    arms = {"stock": stock, "packed": packed}
    peaks = {}
    for name, arm in arms.items():
        largest = max(batches, key=arm.encoded_tokens)
        with _step_arms.Peak(arguments.device) as peak:
            arm.step(largest)
        peaks[name] = peak.bytes
    for arm in arms.values():
        if arm.packing is not None and not arm.packing.active:
            raise ValueError(f"nothing to compare: {arm.packing.describe()}")
    rows = []
    for index, batch in enumerate(batches):
        # Alternate which arm goes first, so that neither always benefits from the caches.
        turns = list(arms)[:: -1 if index % 2 else 1]
        counts = _step_arms.count_tokens(batch, arguments.trainer) | {"padded_tokens": stock.encoded_tokens(batch)}
        packed.take_weights(stock)
        figures = {name: arms[name].step(batch) for name in turns}
        rows.append({**counts, "packed_tokens": packed.encoded_tokens(batch), **figures})
    return {
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("worker", "json")},
        "parameters": sum(p.numel() for p in stock.trainer.model.parameters()),
        "backend": packed.packing.backend,
        "packing": packed.packing.describe(),
        "left_padded": dict(packed.packing.left_padded),
        "head": "both arms score labelled positions only",
        "machine": _step_arms.describe_machine(arguments),
        "batches": rows,
        "summary": summarize(rows),
        "peak_bytes": peaks,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of stock over packed: of totals and of medians, and their range over batches."""
    summary: dict[str, Any] = {}
    for name in ("seconds", "cpu_seconds"):
        stock, packed = ([row[arm][name] for row in rows] for arm in ("stock", "packed"))
        ratios = [own / other for own, other in zip(stock, packed, strict=True)]
        summary[name] = {
            "stock": math.fsum(stock),
            "packed": math.fsum(packed),
            "ratio_of_totals": math.fsum(stock) / math.fsum(packed),
            "ratio_of_medians": median(stock) / median(packed),
            "range": [min(ratios), max(ratios)],
        }
    padded, packed = (sum(row[name] for row in rows) for name in ("padded_tokens", "packed_tokens"))
    summary["tokens"] = {"stock": padded, "packed": packed, "ratio": padded / packed}
    real = sum(row["real_tokens"] for row in rows)
    summary["tokens_per_second"] = {arm: real / summary["seconds"][arm] for arm in ("stock", "packed")}
    summary["largest_gradient_norm_difference"] = max(
        abs(row["packed"]["gradient_norm"] / row["stock"]["gradient_norm"] - 1) for row in rows
    )
    return summary


def measure_memory(arguments, folder: Path) -> int:
    """Peak bytes of one arm's first step on its largest batch. Runs in a separate process."""
    from benchmarks import _step_arms

    _step_arms.prepare(arguments)
    arm = _step_arms.Arm(arguments.worker == "packed", arguments, folder)
    batch = max(_step_arms.make_batches(arguments, arm.trainer), key=arm.encoded_tokens)
    with _step_arms.Peak(arguments.device) as peak:
        arm.step(batch)
    return peak.bytes


def memory(argv: Sequence[str]) -> dict[str, int]:
    """Peak bytes of each arm, measured one after the other."""
    peaks = {}
    for name in ("stock", "packed"):
        command = [sys.executable, "-m", "benchmarks.step", *argv, "--worker", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or ["no word of why"])[-1].removeprefix("error: "))
        peaks[name] = int(done.stdout.split()[-1])
    return peaks


# ---- Reporting ----


def table(result: dict[str, Any]) -> str:
    """The output of the command."""
    summary, rows = result["summary"], []
    for label, name in (("wall seconds", "seconds"), ("CPU seconds", "cpu_seconds")):
        figures = [summary[name][key] for key in ("stock", "packed", "ratio_of_totals", "ratio_of_medians")]
        rows.append([label, *figures, "{:.2f} to {:.2f}".format(*summary[name]["range"])])
    # The ratio of tokens per second is the inverse of that of seconds.
    plain = {"tokens encoded": summary["tokens"], "tokens per second": summary["tokens_per_second"]}
    if "peak_bytes" in result:
        peaks = {arm: value / MIB for arm, value in result["peak_bytes"].items()}
        plain["peak memory, MiB"] = peaks | {"ratio": peaks["stock"] / peaks["packed"]}
    rows += [[name, of["stock"], of["packed"], of.get("ratio"), None, "-"] for name, of in plain.items()]
    settings = result["settings"]
    head = ["", "stock", "packed", "ratio", "of medians", "range"]
    title = (
        f"{settings['trainer']}, {settings['lengths']}, {result['parameters'] / 1e6:.1f} M parameters, "
        f"{len(result['batches'])} batches of {settings['batch_size']}; {result['machine']['device']}, "
        f"{result['machine']['threads']} threads, {result['backend']} attention"
    )
    agreement = f"largest relative difference of a gradient's norm: {summary['largest_gradient_norm_difference']:.1e}"
    return "\n".join([title, format_table(head, rows), agreement])


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        arguments = parse(argv)
        if arguments.worker:
            print(measure_memory(arguments, Path(folder)))
            return
        # Resident memory is measured in other processes, before the arms of this one allocate theirs.
        peaks = {"peak_bytes": memory(argv)} if arguments.device == "cpu" else {}
        result = measure(arguments, Path(folder)) | peaks
        print(table(result))
        if arguments.json:
            from trl_ext.files import write_json

            write_json(arguments.json, result)


if __name__ == "__main__":
    main()
