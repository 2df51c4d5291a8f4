"""Measure how much resident memory grows over a long run of policy updates.

`python -m benchmarks.soak --steps 2000` trains the embedded model on its own short samples, with the same metrics,
sample tables and checkpoints as the recipes. It compares the median memory of the second tenth of the steps with
that of the last tenth, and exits with status 1 if memory grew by more than `--limit`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import psutil
import torch
from transformers import TrainerCallback

from trl_ext import GRPOConfig, GRPOTrainer, load_benchmark
from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
from trl_ext.held_out.table import GenerationTableCallback
from trl_ext.models import resolve_model_path
from trl_ext.trainers.callbacks import MetricsFileCallback
from trl_ext.trainers.policies import remember_base


class Memory(TrainerCallback):
    """Resident memory after every step, in MiB."""

    def __init__(self):
        self.process, self.values = psutil.Process(), []

    def on_step_end(self, args, state, control, **kwargs):
        self.values.append(self.process.memory_info().rss / 2**20)


def distinct_characters(completions, **_) -> list[float]:
    """A fast reward with different values."""
    return [len(set(completion[-1]["content"])) / 10 for completion in completions]


def run(steps: int, folder: Path) -> list[float]:
    """Train for the given number of steps; return the memory after each."""
    torch.set_num_threads(1)
    memory, save_steps = Memory(), max(steps // 10, 1)
    settings = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
    settings |= {"learning_rate": 1e-6, "logging_steps": 1, "report_to": "none", "max_steps": steps}
    settings |= {"save_strategy": "steps", "save_steps": save_steps, "save_total_limit": 2}
    config = GRPOConfig(str(folder), **settings)
    rows = load_benchmark("toy")["train_gen"].select(range(64))
    trainer = GRPOTrainer(resolve_model_path("toy"), distinct_characters, args=config, train_dataset=rows)
    remember_base(trainer)
    limits = GenerationSettings(max_prompt_tokens=None, max_new_tokens=4)
    evaluation = GenerationEvaluation(trainer, list(rows.select(range(4))), limits)
    trainer.add_callback(MetricsFileCallback(folder / "metrics.jsonl"))
    trainer.add_callback(GenerationTableCallback(evaluation, every=save_steps, prompts=4))
    trainer.add_callback(memory)
    trainer.train()
    return memory.values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="at least 20 (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=0.02, help="growth of memory that fails (default: %(default)s)")
    given = parser.parse_args()
    if given.steps < 20:
        parser.error(f"--steps {given.steps}: at least 20, of which the first tenth is not counted")
    started, tenth = time.monotonic(), given.steps // 10
    # The trainer prints what it logs.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(open(os.devnull, "w")):
        memory = run(given.steps, Path(folder))
    first, last = (statistics.median(part) for part in (memory[tenth : 2 * tenth], memory[-tenth:]))
    seconds, growth = time.monotonic() - started, last / first - 1
    print(f"{given.steps} steps in {seconds:.0f} s: {first:.0f} MiB to {last:.0f} MiB, {growth:+.2%}")
    sys.exit(growth > given.limit)


if __name__ == "__main__":
    main()
