"""One optimizer step of stock TRL against the same step with packing, on the same batches.

`python -m benchmarks.step --trainer preference --lengths wildchat --size 24M` makes TRL's trainer twice, on models of
the same random weights, puts `share_prefixes` on one, and lets them take turns on each batch: forward pass (of the
reference too, where the trainer makes one), loss, backward pass and `optimizer.step()`. Generation is no part of it.
It prints a table; `--json` and `--plot` write the figures of every batch and a picture of them.

Ratios are stock over packed. CPU seconds hold beside other programs, wall seconds on a quiet machine only. In both
arms the LM head scores labelled positions only, as TRL has it on CUDA. A policy batch is a micro-batch of whole
groups, as wide as TRL pads the 16 prompts that are sampled together. `--against-grouped` gives both arms batches of
like lengths. Tokens per second count what the batches hold without padding, prompts as often as they stand there.
Peak memory is what the batch that is the largest for an arm takes above what its trainer occupies before the first
step; on the CPU it is resident memory, in a process for each arm. On CUDA each attention back-end that works is
measured.
"""

from __future__ import annotations

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

# Set before transformers is imported.
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
# Pairs of a batch, or groups of a micro-batch of the policy: 4 and 2, on the embedded benchmark what its recipes have.
BATCH_SIZES = {("toy", "preference"): 32, ("toy", "reward"): 32, ("toy", "policy"): 8, ("long", "policy"): 1}
DEFAULT_BATCH_SIZES = {"preference": 4, "reward": 4, "policy": 2}
# Dense half-precision peak of the tensor cores, 10^12 operations a second.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312}


def parse(argv: Sequence[str] | None = None):
    parser = CommandParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--lengths", choices=KINDS, default="wildchat")
    parser.add_argument("--size", choices=["toy", "24M", "53M", "1.5B"], help="default: toy for toy, else 24M")
    parser.add_argument("--hidden_size", type=at_least_one, help="in place of that of --size; a multiple of 64")
    parser.add_argument("--layers", type=at_least_one, help="in place of those of --size")
    parser.add_argument("--group_size", type=at_least_one, default=4, help="responses to a prompt of the policy")
    parser.add_argument("--batch_size", type=at_least_one, help="pairs, or prompts of a micro-batch of the policy")
    parser.add_argument("--pairs", type=at_least_one, default=10, help="batches, each measured in both arms")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora_r", type=int, default=0, help="rank of an adapter on every linear layer; 0 for none")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--against-grouped", action="store_true", help="batches of like lengths, in both arms")
    parser.add_argument("--threads", type=at_least_one, default=1, help="of torch, on the CPU")
    parser.add_argument("--peak_tflops", type=float, help="of the GPU, if this program does not know it")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="write a picture of the batches here")
    parser.add_argument("--worker", choices=["stock", "packed"], help=SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.size = arguments.size or ("toy" if arguments.lengths == "toy" else "24M")
    default = BATCH_SIZES.get((arguments.lengths, arguments.trainer), DEFAULT_BATCH_SIZES[arguments.trainer])
    arguments.batch_size = arguments.batch_size or default
    _check(arguments)
    return arguments


def _check(arguments) -> None:
    if arguments.trainer == "policy" and arguments.group_size < 2:
        raise ValueError("--group_size 1: an advantage needs a group of at least 2 responses")
    if arguments.against_grouped and arguments.trainer == "policy":
        raise ValueError("--against-grouped: policy trainers do not group prompts by length; leave it out")
    if arguments.size == "toy" and (arguments.hidden_size or arguments.layers):
        raise ValueError("--hidden_size and --layers: the embedded model has its own; give --size 24M beside them")
    if arguments.lengths == "toy" and arguments.size == "1.5B":
        raise ValueError(
            "--size 1.5B: the embedded benchmark is too short to measure it with; take --lengths wildchat"
        )
    if (arguments.hidden_size or 64) % 64:
        raise ValueError(f"--hidden_size {arguments.hidden_size}: give a multiple of 64, the size of a head")
    if arguments.lora_r < 0:
        raise ValueError(f"--lora_r {arguments.lora_r}: give a rank of at least 1, or 0 for no adapter")


# ---- Measuring ----


def measure(arguments, folder: Path) -> dict[str, Any]:
    """The figures of every batch, and the summary of them."""
    from benchmarks import _step_arms

    _step_arms.prepare(arguments)
    stock = _step_arms.Arm(False, arguments, folder)
    packed = _step_arms.Arm(True, arguments, folder)
    batches = _step_arms.make_batches(arguments, stock.trainer)
    for arm in (stock, packed):
        arm.step(batches[0])
    if not packed.packing.active:
        raise ValueError(f"nothing to compare: {packed.packing.describe()}")
    names = {"stock": stock} | dict.fromkeys(packed.backends(batches[0]), packed)
    chosen = packed.packing.backend
    rows = []
    for index, batch in enumerate(batches):
        # Turn about, so that neither arm always finds what the other has left in the caches.
        turns = list(names)[:: -1 if index % 2 else 1]
        figures = {}
        for name in turns:
            if name != "stock":
                packed.use(name)
            figures[name] = names[name].step(batch)
        rows.append(
            {
                **_step_arms.count_tokens(batch, arguments.trainer),
                "packed_tokens": packed.encoded_tokens(batch),
                "packed": figures[chosen],
                **{name: figures[name] for name in names if name != chosen},
            }
        )
    return {
        "settings": {name: _plain(value) for name, value in vars(arguments).items() if name != "worker"},
        "parameters": sum(p.numel() for p in stock.trainer.model.parameters()),
        "backend": chosen,
        "packing": packed.packing.describe(),
        "left_padded": dict(packed.packing.left_padded),
        "head": "both arms score labelled positions only",
        "machine": _step_arms.describe_machine(arguments),
        "batches": rows,
        "summary": summarize(rows, [name for name in names if name not in ("stock", chosen)]),
        "work": stock.operations(rows),
    }


def summarize(rows: list[dict[str, Any]], others: Sequence[str] = ()) -> dict[str, Any]:
    """Ratios of stock over packed: of totals, of medians, and the range over batches.

    Args:
        rows: one for each batch, with the figures of the arms.
        others: further arms, back-ends that the packed arm did not choose, whose seconds are summed.
    """
    summary: dict[str, Any] = {}
    for name in ("seconds", "cpu_seconds"):
        stock, packed = ([row[arm][name] for row in rows] for arm in ("stock", "packed"))
        ratios = [own / other for own, other in zip(stock, packed, strict=True)]
        summary[name] = {
            "stock": sum(stock),
            "packed": sum(packed),
            **{arm: sum(row[arm][name] for row in rows) for arm in others},
            "ratio_of_totals": sum(stock) / sum(packed),
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
    """Peak bytes of one arm's first step, on the batch that is the largest for it. Called in a process of its own."""
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


def utilization(result: dict[str, Any], peak_tflops: float | None) -> dict[str, float] | None:
    """Share of the GPU's peak that goes into what has to be computed, the same for both arms; None if it is unknown.

    Counted are the matrix products of the tokens that the packed arm encodes; attention scores and recomputation are
    not.
    """
    device = result["machine"]["device"]
    known = next((value for name, value in PEAK_TFLOPS.items() if name in device), None)
    peak = peak_tflops or known
    if peak is None:
        return None
    seconds = result["summary"]["seconds"]
    return {arm: result["work"] / seconds[arm] / (peak * 1e12) for arm in ("stock", "packed")}


# ---- Reporting ----


def table(result: dict[str, Any]) -> str:
    """What the command prints."""
    summary = result["summary"]
    rows = [
        [
            label,
            summary[name]["stock"],
            summary[name]["packed"],
            summary[name]["ratio_of_totals"],
            summary[name]["ratio_of_medians"],
            "{:.2f} to {:.2f}".format(*summary[name]["range"]),
        ]
        for label, name in (("wall seconds", "seconds"), ("CPU seconds", "cpu_seconds"))
    ]

    def plain(label: str, values: dict[str, float], ratio: float | None) -> list[Any]:
        return [label, values["stock"], values["packed"], ratio, None, "-"]

    rows.append(plain("tokens encoded", summary["tokens"], summary["tokens"]["ratio"]))
    rates = summary["tokens_per_second"]
    rows.append(plain("tokens per second", rates, None))  # The ratio of seconds, upside down.
    if "peak_bytes" in result:
        peaks = {arm: value / MIB for arm, value in result["peak_bytes"].items()}
        rows.append(plain("peak memory, MiB", peaks, peaks["stock"] / peaks["packed"]))
    if result.get("utilization"):
        rates = result["utilization"]
        rows.append(plain("model FLOPs utilization", rates, None))
    head = ["", "stock", "packed", "ratio", "of medians", "range"]
    others = [arm for arm in summary["seconds"] if arm in ("varlen", "flex", "sdpa")]
    lines = [f"{arm} attention: {summary['seconds'][arm]:.3f} wall seconds" for arm in others]
    settings = result["settings"]
    title = (
        f"{settings['trainer']}, {settings['lengths']}, {result['parameters'] / 1e6:.1f} M parameters, "
        f"{len(result['batches'])} batches of {settings['batch_size']}; {result['machine']['device']}, "
        f"{result['machine']['threads']} threads, {result['backend']} attention"
    )
    agreement = f"largest relative difference of a gradient's norm: {summary['largest_gradient_norm_difference']:.1e}"
    return "\n".join([title, format_table(head, rows), *lines, agreement])


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the ratio of each batch, and the seconds of both arms over its padded tokens; replaced atomically."""
    from trl_ext.evaluation.plots import new_figure
    from trl_ext.files import replacing

    name = "seconds" if result["settings"]["device"] == "cuda" else "cpu_seconds"
    label = name.replace("_", " ").replace("cpu", "CPU")
    rows, total = result["batches"], result["summary"][name]["ratio_of_totals"]
    figure, (left, right) = new_figure(1, 2)
    left.bar(range(len(rows)), [row["stock"][name] / row["packed"][name] for row in rows])
    left.axhline(1, color="black", linewidth=0.8)
    left.axhline(total, color="black", linestyle="--", label=f"totals: {total:.2f}")
    left.set(title=f"Stock over packed, {label}", xlabel="batch")
    left.legend(frameon=False)
    for arm in ("stock", "packed"):
        right.scatter([row["padded_tokens"] for row in rows], [row[arm][name] for row in rows], label=arm)
    right.set(title="One optimizer step", xlabel="tokens of the padded batch", ylabel=label, ylim=(0, None))
    right.legend(frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with one_line_errors(), tempfile.TemporaryDirectory() as folder:
        arguments = parse(argv)
        if arguments.worker:
            print(measure_memory(arguments, Path(folder)))
            return
        # Before the arms of this process take memory of their own.
        peaks = memory(argv)
        result = {**measure(arguments, Path(folder)), "peak_bytes": peaks}
        if arguments.device == "cuda":
            result["utilization"] = utilization(result, arguments.peak_tflops)
        print(table(result))
        if arguments.json:
            from trl_ext.files import write_json

            write_json(arguments.json, result)
        if arguments.plot:
            plot(result, arguments.plot)


if __name__ == "__main__":
    main()
