"""What it costs to divide an optimizer batch between two processes on one machine: DPO steps, gloo, one thread each.

`python -m benchmarks.communication` keeps two runs at hand, one of one process and one of two, and lets them take
blocks of steps in turn, on the same model and the same global batch: one process, two processes, and two that leave
out the exchange of gradients. It prints the ratio of adjacent blocks; what the exchange of gradients adds to a step;
and the time spent in all other exchanges, counted pairs and metrics among them, waiting for the other process
included. `--json` prints the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
# Arm -> processes, and whether gradients are exchanged.
ARMS = {"one": (1, True), "two": (2, True), "two, no gradients": (2, False)}
BLOCK_TIMEOUT = 600


def worker(folder: Path, arguments: argparse.Namespace) -> None:
    """One of the two runs: trains, a block of steps at a time, whenever the folder says so."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    # Before accelerate is imported, which keeps one of these functions under a name of its own.
    exchanges = TimedExchanges() if processes > 1 else None

    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from benchmarks.aot_scope import equal_pairs
    from trl_ext import DPOConfig, DPOTrainer
    from trl_ext.models import resolve_model_path
    from trl_ext.rollouts import end_processes

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
    model_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        intermediate_size=4 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model, reference = Qwen2ForCausalLM(model_config), Qwen2ForCausalLM(model_config)
    blocks = sum(count == processes for count, _ in ARMS.values()) * (arguments.rounds + 1)
    steps = blocks * arguments.steps
    config = DPOConfig(
        str(folder / f"run-{processes}"),
        per_device_train_batch_size=arguments.batch // processes,
        max_steps=steps,
        logging_steps=10 * steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    # One batch, again and again: all steps do the same work.
    dataset = equal_pairs(arguments.batch, arguments.tokens)
    trainer = DPOTrainer(model, reference, args=config, train_dataset=dataset, processing_class=tokenizer)
    trainer.add_callback(blocks_in_turn(trainer, folder, exchanges, arguments.steps))
    trainer.train()
    end_processes(trainer.accelerator)


def blocks_in_turn(trainer, folder: Path, exchanges: TimedExchanges | None, steps: int):
    """A callback that waits for `go` before each block of steps, and writes what the block took."""
    from transformers import TrainerCallback

    processes = 2 if exchanges else 1

    class Blocks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step % steps == 0:
                go = folder / f"{processes}-{state.global_step // steps}.go"
                while not go.exists():
                    time.sleep(0.01)
                if processes > 1:
                    trainer.model_wrapped.require_backward_grad_sync = go.read_text() == "gradients"
                    trainer.accelerator.wait_for_everyone()
                    exchanges.seconds = 0.0
                self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % steps == 0 and state.is_world_process_zero:
                seconds = time.perf_counter() - self.started
                other = exchanges.seconds if exchanges else 0.0
                done = folder / f"{processes}-{state.global_step // steps - 1}.done"
                done.with_suffix(".tmp").write_text(json.dumps([seconds / steps, other / steps]))
                done.with_suffix(".tmp").rename(done)

    return Blocks()


class TimedExchanges:
    """Adds up the time in collectives that are called from Python; gradients are exchanged elsewhere."""

    def __init__(self):
        import torch.distributed

        self.seconds = 0.0
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier"):
            setattr(torch.distributed, name, self._timed(getattr(torch.distributed, name)))

    def _timed(self, function):
        def call(*args, **kwargs):
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return call


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[list[float]]]:
    """Seconds per step, and those in other exchanges, of each block by arm; one round comes first and is not kept."""
    command = [sys.executable, "-m"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    own = ["benchmarks.communication", *sys.argv[1:], "--worker", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = {processes: (folder / f"log-{processes}").open("w") for processes in (1, 2)}
    runs = {
        processes: subprocess.Popen(
            [*command, *launcher, *own],
            cwd=REPOSITORY,
            env=environment,
            stdout=logs[processes],
            stderr=logs[processes],
        )
        for processes, launcher in ((1, []), (2, torchrun))
    }
    results: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    counts = {1: 0, 2: 0}
    try:
        for index in range(arguments.rounds + 1):
            # Another order each time, as the machine may be busier with others at one time than at another.
            for arm in list(ARMS)[index % 3 :] + list(ARMS)[: index % 3]:
                processes, gradients = ARMS[arm]
                block = folder / f"{processes}-{counts[processes]}"
                counts[processes] += 1
                block.with_suffix(".tmp").write_text("gradients" if gradients else "none")
                block.with_suffix(".tmp").rename(block.with_suffix(".go"))
                figures = wait_for(block.with_suffix(".done"), runs[processes], folder / f"log-{processes}")
                if index:
                    results[arm].append(figures)
        for run in runs.values():
            run.wait(timeout=BLOCK_TIMEOUT)
    finally:
        for run in runs.values():
            if run.poll() is None:
                run.terminate()
        for log in logs.values():
            log.close()
    return results


def wait_for(path: Path, run: subprocess.Popen, log: Path) -> list[float]:
    """What a block wrote when it was done."""
    started = time.monotonic()
    while not path.exists():
        if run.poll() is not None:
            raise SystemExit(f"a run ended with status {run.returncode} before its block was done:\n{log.read_text()}")
        if time.monotonic() - started > BLOCK_TIMEOUT:
            raise SystemExit(f"a block took longer than {BLOCK_TIMEOUT} s: take fewer --steps, or a smaller model")
        time.sleep(0.02)
    return json.loads(path.read_text())


def summarize(results: dict[str, list[list[float]]]) -> dict:
    """Medians, and the medians and ranges of ratios of the blocks of one round."""
    seconds = {arm: [block[0] for block in blocks] for arm, blocks in results.items()}
    slowdown = [two / one for one, two in zip(seconds["one"], seconds["two"], strict=True)]
    gradients = [1 - without / two for without, two in zip(seconds["two, no gradients"], seconds["two"], strict=True)]
    other = [block[1] / block[0] for block in results["two"]]
    return {
        "seconds_per_step": {arm: statistics.median(values) for arm, values in seconds.items()},
        "two_over_one": _median_and_range(slowdown),
        "share_of_gradients": _median_and_range(gradients),
        "share_of_other_exchanges": _median_and_range(other),
    }


def _median_and_range(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "n": len(values)}


def report(summary: dict) -> str:
    """The figures as a table."""
    lines = ["| | median | range |", "|---|---|---|"]
    lines += [f"| seconds per step, {arm} | {value:.3f} | |" for arm, value in summary["seconds_per_step"].items()]
    for label, key in (
        ("two processes / one", "two_over_one"),
        ("of a step with two: gradients", "share_of_gradients"),
        ("of a step with two: other exchanges", "share_of_other_exchanges"),
    ):
        figures = summary[key]
        lines.append(f"| {label} | {figures['median']:.2f} | {figures['low']:.2f} to {figures['high']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of blocks of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a block (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="pairs per step, over all processes")
    parser.add_argument("--tokens", type=int, default=64, help="per prompt and per response")
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.batch % 2 or min(arguments.batch, arguments.rounds, arguments.steps) < 1:
        parser.error("--batch must be even, and --rounds and --steps at least 1")
    if arguments.worker:
        worker(arguments.worker, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        summary = summarize(measure(arguments, Path(folder)))
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("worker", "json")}
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()}
        print(json.dumps({**summary, "settings": settings, **machine}, indent=2))
        return
    print(report(summary))
    print(f"\n{os.cpu_count()} cores, load average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
