"""A long run of policy updates: whether memory, files or checkpoints grow with the number of steps.

`python -m benchmarks.soak --steps 2000` trains the embedded model on its own short samples, with metrics, tables of
samples and checkpoints as the recipes write them, and takes the resident memory after every step. Growth is that of
a line fitted to all samples but the first tenth, and that of the medians of the second and of the last tenth. It
prints a table and ends with status 1 where memory grew by more than `--limit`; `--json` prints the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import psutil
import torch
from datasets import Dataset
from transformers import TrainerCallback

from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.models import resolve_model_path
from trl_ext.toy.prompts import INSTRUCTION_KINDS, prompt_pool
from trl_ext.trainers.callbacks import GenerationTableCallback, MetricsFileCallback
from trl_ext.trainers.generation_evaluation import GenerationEvaluation, GenerationSettings
from trl_ext.trainers.policies import remember_base

CHECKPOINTS = 10


class Watch(TrainerCallback):
    """Takes resident memory, the size of the metrics file and the time after every step."""

    def __init__(self, metrics: Path):
        self.metrics = metrics
        self.process = psutil.Process()
        self.memory: list[int] = []
        self.metrics_bytes: list[int] = []
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.memory.append(self.process.memory_info().rss)
        self.metrics_bytes.append(self.metrics.stat().st_size if self.metrics.exists() else 0)
        self.times.append(time.perf_counter())


class TimedTrainer(GRPOTrainer):
    """Keeps how long each checkpoint took, and how large its record of the run is."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.checkpoints: list[dict[str, float]] = []

    def _save_checkpoint(self, *args, **kwargs):
        started = time.perf_counter()
        super()._save_checkpoint(*args, **kwargs)
        seconds = time.perf_counter() - started
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.checkpoints.append(
            {
                "step": self.state.global_step,
                "seconds": seconds,
                "state_bytes": (folder / "trainer_state.json").stat().st_size,
                "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            }
        )


def distinct_characters(completions, **_) -> list[float]:
    """A reward that takes no time and varies."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [len(set(text)) / 10 for text in texts]


def run(steps: int, folder: Path) -> dict:
    """Train for so many steps, and say how memory, files and times went."""
    torch.set_num_threads(1)
    pool = prompt_pool("pretrain")
    texts = [text for kind in INSTRUCTION_KINDS for text in pool[kind][:16]]
    rows = [
        {"row_id": f"row{index}", "prompt": [{"role": "user", "content": text}]} for index, text in enumerate(texts)
    ]
    save_steps = max(steps // CHECKPOINTS, 1)
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=2,
        report_to="none",
        seed=0,
    )
    watch = Watch(folder / "metrics.jsonl")
    trainer = TimedTrainer(
        resolve_model_path("toy"),
        distinct_characters,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[MetricsFileCallback(folder / "metrics.jsonl"), watch],
    )
    remember_base(trainer)
    settings = GenerationSettings(max_prompt_tokens=None, max_new_tokens=4)
    evaluation = GenerationEvaluation(trainer, rows[:4], settings)
    trainer.add_callback(GenerationTableCallback(evaluation, every=save_steps, prompts=4))
    trainer.train()
    tables = sorted((folder / "samples").glob("*.jsonl"))
    return {
        "steps": steps,
        "seconds": watch.times[-1] - watch.times[0],
        **memory_growth(watch.memory),
        "memory_mib": [round(value / 2**20, 1) for value in watch.memory[:: max(steps // 20, 1)]],
        "metrics_bytes_per_step": first_and_last(_differences(watch.metrics_bytes)),
        "step_seconds": first_and_last(_differences(watch.times)),
        "log_history": len(trainer.state.log_history),
        "sample_tables": len(tables),
        "sample_table_bytes": [path.stat().st_size for path in (tables[0], tables[-1])],
        "checkpoints": trainer.checkpoints,
    }


def memory_growth(memory: list[int]) -> dict[str, float]:
    """Growth of resident memory after the first tenth, as shares of what it was then."""
    tenth = max(len(memory) // 10, 1)
    kept = memory[tenth:]
    slope, start = statistics.linear_regression(range(len(kept)), kept)
    first, last = statistics.median(kept[:tenth]), statistics.median(kept[-tenth:])
    return {"growth_of_line": slope * len(kept) / start, "growth_of_medians": last / first - 1, "first_bytes": first}


def first_and_last(values: list[float]) -> list[float]:
    """Medians of the second tenth and of the last."""
    tenth = max(len(values) // 10, 1)
    return [statistics.median(values[tenth : 2 * tenth]), statistics.median(values[-tenth:])]


def _differences(values: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(values, values[1:], strict=False)]


def report(figures: dict) -> str:
    """The figures as a table, early in the run and at its end."""
    first, last = figures["checkpoints"][0], figures["checkpoints"][-1]
    memory, line, medians = (figures[key] for key in ("first_bytes", "growth_of_line", "growth_of_medians"))
    bytes_per_step, seconds = figures["metrics_bytes_per_step"], figures["step_seconds"]
    rows = [
        ("resident memory, MiB", f"{memory / 2**20:.0f}", f"{memory * (1 + medians) / 2**20:.0f}"),
        ("seconds per step", *(f"{value:.3f}" for value in seconds)),
        ("metrics.jsonl, bytes per step", *(f"{value:.0f}" for value in bytes_per_step)),
        ("a table of samples, bytes", *(str(value) for value in figures["sample_table_bytes"])),
        ("a checkpoint, MB", f"{first['bytes'] / 1e6:.2f}", f"{last['bytes'] / 1e6:.2f}"),
        ("of it trainer_state.json, MB", f"{first['state_bytes'] / 1e6:.2f}", f"{last['state_bytes'] / 1e6:.2f}"),
        ("seconds per checkpoint", f"{first['seconds']:.3f}", f"{last['seconds']:.3f}"),
    ]
    lines = ["| | early | at the end |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    lines.append(
        f"\n{figures['steps']} steps in {figures['seconds']:.0f} s; memory grew by {medians:.2%} between the medians "
        f"of the second and the last tenth, by {line:.2%} along a fitted line"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="at least 20 (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=0.02, help="growth of memory that fails (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.steps < 20:
        parser.error(f"--steps {arguments.steps}: at least 20, of which the first tenth is not counted")
    # The trainer prints what it logs.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(open(os.devnull, "w")):
        figures = run(arguments.steps, Path(folder))
    print(json.dumps(figures, indent=2) if arguments.json else report(figures))
    if max(figures["growth_of_line"], figures["growth_of_medians"]) > arguments.limit:
        print(f"memory grew by more than {arguments.limit:.0%}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
