"""Callbacks that write metrics as JSON lines, print the main ones, and end a run when its time budget is spent."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from trl_ext.files import write_json_lines

# Columns of a step's line: label, format, and metrics, of which the first that was logged is shown.
_COLUMNS = (
    ("loss", "6.3f", "loss"),
    ("reward", "6.3f", "reward", "rollouts/reward"),
    ("score", "5.3f", "score"),
    ("win rate", "5.3f", "win_rate"),
    ("accuracy", "5.3f", "rewards/accuracies", "accuracy"),
    ("margin", "6.3f", "rewards/margins", "margin"),
    ("token accuracy", "5.3f", "mean_token_accuracy"),
    # Nats per response of held-out rollouts and of KTO's loss, and nats per token of a training step's rollouts.
    ("kl", "6.4f", "sampled_kl", "kl"),
    ("entropy", "5.3f", "entropy"),
    ("length", "5.1f", "completions/mean_length", "rollouts/mean_length"),
    ("truncated", "5.3f", "completions/clipped_ratio"),
    ("clip ratio", "5.3f", "clip_ratio/region_mean"),
    ("value loss", "6.3f", "value_loss"),
    ("kept", ".0f", "rollouts/kept"),
    ("lr", ".1e", "learning_rate"),
)


class MetricsFileCallback(TrainerCallback):
    """Appends every logged metric to a JSON-lines file, one object per log call with its `step` and `seconds`.

    `seconds` is the time since training began, including evaluations. A resumed run keeps the lines written before its
    checkpoint and continues from the last of them; a line cut off by a crash is dropped.

    Args:
        path: the file.
        of_rounds: whether several trainings write one file, as the rounds of expert iteration do. Their trainer calls
            `keep` before the first of them.
    """

    def __init__(self, path: str | Path, *, of_rounds: bool = False):
        self.path = Path(path)
        self.of_rounds = of_rounds
        self._zero = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        if self.of_rounds:
            return
        self._zero = time.monotonic()
        if state.is_world_process_zero:
            step = state.global_step
            rows = read_metrics(self.path) if step else []
            # The resumed run logs again what was logged at this step after the checkpoint.
            logged = sum(row["step"] == step for row in state.log_history)
            at_step = [row for row in rows if row["step"] == step]
            self.keep([*(row for row in rows if row["step"] < step), *at_step[:logged]])

    def keep(self, rows: list[dict[str, Any]]) -> None:
        """Keep these rows of an earlier part of the run, and continue after them, in time as well."""
        self._zero = time.monotonic() - max((row.get("seconds", 0.0) for row in rows), default=0.0)
        write_json_lines(self.path, rows)

    @property
    def seconds(self) -> float:
        """Time since training began, as written to the file."""
        return time.monotonic() - self._zero

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if state.is_world_process_zero and logs:
            # JSON has no NaN and no infinities: they become null.
            bad = [name for name, value in logs.items() if isinstance(value, float) and not math.isfinite(value)]
            row = {"step": state.global_step, "seconds": round(self.seconds, 3), **logs, **dict.fromkeys(bad)}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; an incomplete last line is left out, and a missing file is empty."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


class _Bar(ProgressCallback):
    """transformers' progress bar without its own lines of metrics."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


class StepLineCallback(TrainerCallback):
    """Prints the main metrics on one line whenever the trainer logs. `show_in` adds it to a trainer."""

    def __init__(self):
        self._round: int | None = None
        self._began: tuple[int, float] | None = None

    @classmethod
    def show_in(cls, trainer: Trainer) -> None:
        """Show progress by these lines and, on a terminal and unless `disable_tqdm` is set, by a bar."""
        for other in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(other)
        if not trainer.args.disable_tqdm and sys.stdout.isatty() and sys.stderr.isatty():
            trainer.add_callback(_Bar())
        trainer.add_callback(cls())

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = self._began or (state.global_step, time.monotonic())

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        # The last row summarizes the run; the recipe prints its own summary.
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            metrics = {name.removeprefix("eval_"): value for name, value in logs.items()}
            if columns := _columns(metrics):
                tqdm.write("  ".join([self._place(state, metrics), *columns, *self._time_left(state, metrics)]))
                sys.stdout.flush()

    def on_train_end(self, args, state, control, **kwargs):
        self._began = None

    def _place(self, state, metrics: dict[str, Any]) -> str:
        # Rounds of expert iteration continue the step count, and their total is unknown.
        self._round = metrics.get("expert_step", self._round)
        place = f"step {state.global_step:{len(str(state.max_steps))}}"
        place = f"{place}/{state.max_steps}" if self._round is None else f"round {self._round}, {place}"
        return place if {"learning_rate", "expert_step"} & metrics.keys() else f"{place}  held out:"

    def _time_left(self, state, metrics: dict[str, Any]) -> list[str]:
        if "learning_rate" not in metrics or self._round is not None or not self._began:
            return []
        first, began = self._began
        steps, left = state.global_step - first, state.max_steps - state.global_step
        seconds = round((time.monotonic() - began) / max(steps, 1) * left)
        return [f"{timedelta(seconds=seconds)} left"]


def _columns(metrics: dict[str, Any]) -> list[str]:
    # The loss of a policy says nothing of its progress, and of pairs there are better measures than the tokens'.
    hidden = {"loss"} if "reward" in metrics else {"entropy"}
    hidden |= {"token accuracy"} if "rewards/accuracies" in metrics else set()
    columns = []
    for label, form, *names in _COLUMNS:
        value = next((metrics[name] for name in names if name in metrics), None)
        if label == "kl":
            of_tokens = {"learning_rate", "completions/mean_length"} <= metrics.keys()
            label = "kl/token" if of_tokens else "kl/response"
        if isinstance(value, int | float) and label not in hidden:
            columns.append(f"{label} {value:{form if abs(value) < 1e5 else '.1e'}}")
    return columns
