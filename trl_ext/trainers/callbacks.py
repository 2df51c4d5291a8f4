"""Callbacks that write metrics as JSON lines, print the main ones, and end a run when its time budget is spent."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from trl_ext.files import write_json_lines
from trl_ext.resilience.guards import leave_epoch, stop_training

# Columns of a step's line: the format of each, and its metrics, of which the first that was logged is shown.
_COLUMNS = {
    "loss": (".3f", "loss"),
    "reward": (".3f", "reward", "rollouts/reward"),
    "score": (".3f", "score"),
    "win rate": (".3f", "win_rate"),
    "accuracy": (".3f", "rewards/accuracies", "accuracy"),
    "margin": (".3f", "rewards/margins", "margin"),
    "token accuracy": (".3f", "mean_token_accuracy"),
    # Nats per token of a training step's rollouts, and nats per response of held-out ones and of KTO's loss.
    "kl/token": (".4f",),
    "kl/response": (".4f", "sampled_kl", "kl"),
    "entropy": (".3f", "entropy", "rollouts/entropy"),
    "length": (".1f", "completions/mean_length", "rollouts/mean_length"),
    "cut": (".3f", "completions/clipped_ratio"),
    "clip ratio": (".3f", "clip_ratio/region_mean"),
    "value loss": (".3f", "value_loss"),
    "kept": (".0f", "rollouts/kept"),
    "lr": (".1e", "learning_rate"),
}
# Widths that leave room for a minus sign.
_WIDTHS = {"reward": 6, "margin": 6}


class MetricsFileCallback(TrainerCallback):
    """Appends every logged metric to a JSON-lines file, one object per log call with its `step` and `seconds`.

    `seconds` is the time since training began, including evaluations. A resumed run keeps the lines written before its
    checkpoint and continues from the last of them; a line cut off by a crash is dropped.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._zero = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        self._zero = time.monotonic()
        if state.is_world_process_zero:
            # The resumed run logs again what was logged at this step after the checkpoint.
            self.keep_until(state.global_step, sum(row["step"] == state.global_step for row in state.log_history))

    def keep_until(self, step: int, at_step: int | None = None) -> None:
        """Keep the lines of an earlier part of the run up to a step, and append after them.

        Args:
            step: the last step whose lines are kept.
            at_step: how many lines of that last step to keep; None for all.
        """
        earlier = read_metrics(self.path) if step else []
        kept = [row for row in earlier if row["step"] < step]
        kept += [row for row in earlier if row["step"] == step][:at_step]
        self._zero = time.monotonic() - max((row.get("seconds", 0.0) for row in kept), default=0.0)
        write_json_lines(self.path, kept)

    @property
    def seconds(self) -> float:
        """Time since training began, as written to the file."""
        return time.monotonic() - self._zero

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if state.is_world_process_zero and logs:
            seconds = round(self.seconds, 3)
            metrics = {name: _json_number(value) for name, value in logs.items()}
            row = {"step": state.global_step, "seconds": seconds, **metrics}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _json_number(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; an incomplete last line is left out, and a missing file is empty."""
    rows = []
    path = Path(path)
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


class StepLineCallback(TrainerCallback):
    """Prints the main metrics on one line whenever the trainer logs. `show_in` adds it to a trainer.

    On a terminal, unless `disable_tqdm` is set, it also shows a progress bar, which disappears when training ends.
    """

    def __init__(self):
        self._bar: tqdm | None = None
        self._widths = dict(_WIDTHS)
        self._round: int | None = None
        self._samples = False
        self._began = (0, 0.0)

    @classmethod
    def show_in(cls, trainer: Trainer) -> None:
        """Make these lines the trainer's only progress display."""
        for other in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(other)
        trainer.add_callback(cls())

    def on_step_begin(self, args, state, control, **kwargs):
        if not self._began[1]:
            self._began = (state.global_step, time.monotonic())

    def on_step_end(self, args, state, control, **kwargs):
        shows = state.is_world_process_zero and not args.disable_tqdm
        # The bar starts after the first step, since most warnings are printed before or during it.
        if self._bar is None and shows and sys.stdout.isatty() and sys.stderr.isatty():
            self._bar = tqdm(total=state.max_steps, initial=self._began[0], leave=False, dynamic_ncols=True)
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        # The last row summarizes the run; the recipe prints its own summary.
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            metrics = {name.removeprefix("eval_"): value for name, value in logs.items()}
            self._samples |= "reward" in logs
            if shown := _shown(metrics, self._samples):
                tqdm.write(self._line(state, metrics, shown))
                sys.stdout.flush()

    def on_train_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.close()
        self._bar, self._began = None, (0, 0.0)

    def _line(self, state, metrics: dict[str, Any], shown: dict[str, float]) -> str:
        held_out = "learning_rate" not in metrics
        # Rounds of expert iteration continue the step count, and their total is unknown.
        self._round = metrics.get("expert_step", self._round)
        total = str(state.max_steps)
        place = f"step {state.global_step:{len(total)}}"
        if self._round is not None:
            place = f"round {self._round}, {place}"
        elif state.max_steps:
            place += f"/{total}"
        if "expert_step" not in metrics and held_out:
            place += "  held out:"
        parts = [place, *(self._cell(label, value) for label, value in shown.items())]
        if not held_out and self._round is None and state.global_step > self._began[0]:
            taken = (time.monotonic() - self._began[1]) / (state.global_step - self._began[0])
            parts.append(f"{clock(taken * (state.max_steps - state.global_step))} left")
        return "  ".join(parts)

    def _cell(self, label: str, value: float) -> str:
        text = f"{value:{_COLUMNS[label][0] if abs(value) < 1e5 else '.1e'}}"
        width = self._widths[label] = max(len(text), self._widths.get(label, 0))
        return f"{label} {text:>{width}}"


def _shown(metrics: dict[str, Any], samples: bool) -> dict[str, float]:
    """The columns of a line, without a policy's loss and without metrics that a better one makes redundant."""
    found = {}
    for label, (_, *names) in _COLUMNS.items():
        value = next((metrics[name] for name in names if name in metrics), None)
        if isinstance(value, int | float):
            found[label] = float(value)
    if "kl/response" in found and {"learning_rate", "completions/mean_length"} <= metrics.keys():
        found = {"kl/token" if label == "kl/response" else label: value for label, value in found.items()}
    rewards = [value for name, value in metrics.items() if name.startswith("rewards/") and name.endswith("/mean")]
    if "reward" not in found and len(rewards) == 1:
        found = {"reward": float(rewards[0]), **found}
    hidden = {"entropy"} if not samples and "reward" not in found else set()
    hidden |= {"loss"} if samples and "accuracy" not in found else set()
    hidden |= {"token accuracy"} if samples or {"accuracy", "margin"} & found.keys() else set()
    return {label: value for label, value in found.items() if label not in hidden}


def clock(seconds: float) -> str:
    """Format a duration as 0:04, 12:30 or 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TimeBudgetCallback(TrainerCallback):
    """Ends training, with a checkpoint, when the time budget is spent; time before a resume counts.

    Args:
        hours: the budget.
        metrics: measures the time; it must come before this callback.
        accelerator: the trainer's; its first process decides for all.
        period: steps between the points where the run may end, such as the updates of one rollout.
    """

    def __init__(self, hours: float, metrics: MetricsFileCallback, accelerator, *, period: int = 1):
        self.hours = hours
        self.metrics = metrics
        self.accelerator = accelerator
        self.period = period
        self._stops = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._stops = False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.period == 0 and state.global_step < state.max_steps and self.is_spent():
            self._stops = True
            control.should_log = True
            stop_training(state, control, saves=True)

    def on_epoch_end(self, args, state, control, **kwargs):
        if self._stops:
            leave_epoch(state, control, saves=True)

    def is_spent(self) -> bool:
        """Whether the time is up, the same in every process; all must call this."""
        spent = [self.metrics.seconds >= 3600 * self.hours]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(spent)
        return spent[0]
