"""What a run writes while it trains: metrics as JSON lines, the main ones on the screen, and tables of generations."""

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
from trl_ext.trainers.generation_evaluation import GenerationEvaluation
from trl_ext.trainers.interruption import leave_epoch

TABLE_NAME = "samples/generation_table"
# Columns of a step's line: the format of each, and its metrics, of which the first one that was logged is shown.
_COLUMNS = {
    "loss": (".3f", "loss"),
    "reward": (".3f", "reward", "rollouts/reward"),
    "score": (".3f", "score"),
    "win rate": (".3f", "win_rate"),
    "accuracy": (".3f", "rewards/accuracies", "accuracy"),
    "margin": (".3f", "rewards/margins", "margin"),
    "token accuracy": (".3f", "mean_token_accuracy"),
    "kl": (".4f", "sampled_kl", "kl"),
    "entropy": (".3f", "entropy", "rollouts/entropy"),
    "length": (".1f", "completions/mean_length", "rollouts/mean_length"),
    "clipped": (".3f", "clip_ratio/region_mean"),
    "value loss": (".3f", "value_loss"),
    "kept": (".0f", "rollouts/kept"),
    "lr": (".1e", "learning_rate"),
}
# Room for the minus sign of what may be negative.
_WIDTHS = {"reward": 6, "margin": 6}


class MetricsFileCallback(TrainerCallback):
    """Appends every logged metric to a JSON-lines file, one object per log call with its `step` and `seconds`.

    `seconds` is the time since training began, evaluations included. A run that resumes keeps the lines that had been
    written when its checkpoint was, and counts on from the last of them; a line cut off by a crash is dropped.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._zero = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        self._zero = time.monotonic()
        if state.is_world_process_zero:
            # What was logged at this step after the checkpoint, the resumed run logs again.
            self.keep_until(state.global_step, sum(row["step"] == state.global_step for row in state.log_history))

    def keep_until(self, step: int, at_step: int | None = None) -> None:
        """Begin behind the lines of an earlier part of the run, of which those up to a step are kept.

        Args:
            step: the last of which to keep lines.
            at_step: how many of the lines of that very step; None for all.
        """
        earlier = read_metrics(self.path) if step else []
        kept = [row for row in earlier if row["step"] < step]
        kept += [row for row in earlier if row["step"] == step][:at_step]
        self._zero = time.monotonic() - max((row.get("seconds", 0.0) for row in kept), default=0.0)
        write_json_lines(self.path, kept)

    @property
    def seconds(self) -> float:
        """Time since training began, as the lines have it."""
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
    """Prints the main metrics in one line whenever the trainer logs. `show_in` adds it to a trainer.

    On a terminal, unless `disable_tqdm` is set, a progress bar below the lines disappears when training ends.
    """

    def __init__(self):
        self._bar: tqdm | None = None
        self._widths = dict(_WIDTHS)
        self._round: int | None = None
        self._samples = False
        self._began = (0, 0.0)

    @classmethod
    def show_in(cls, trainer: Trainer) -> None:
        """Let a trainer show its progress by these lines alone."""
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

    def on_prediction_step(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.set_description("evaluating", refresh=False)
            self._bar.update(0)

    def on_evaluate(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.set_description(None)

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
        # Rounds of expert iteration continue the count of steps, and their total is not known.
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
    rewards = [value for name, value in metrics.items() if name.startswith("rewards/") and name.endswith("/mean")]
    if "reward" not in found and len(rewards) == 1:
        found = {"reward": float(rewards[0]), **found}
    hidden = {"entropy"} if not samples and "reward" not in found else set()
    hidden |= {"loss"} if samples and "accuracy" not in found else set()
    hidden |= {"token accuracy"} if samples or {"accuracy", "margin"} & found.keys() else set()
    return {label: value for label, value in found.items() if label not in hidden}


def clock(seconds: float) -> str:
    """A length of time as 0:04, 12:30 or 3:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TimeBudgetCallback(TrainerCallback):
    """Ends training, with a checkpoint, when a run has taken its time; what it took before it was resumed counts.

    Args:
        hours: the budget.
        metrics: keeps the time; it must come before this callback.
        accelerator: of the trainer, whose first process decides for all.
        period: steps between the places where the run may end, such as the updates of one rollout.
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
            control.should_training_stop = control.should_save = control.should_log = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if self._stops:
            leave_epoch(state, control, saves=True)

    def is_spent(self) -> bool:
        """Whether the time is up, the same in every process; all must call this."""
        spent = [self.metrics.seconds >= 3600 * self.hours]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(spent)
        return spent[0]


class GenerationTableCallback(TrainerCallback):
    """Every `every` steps, before the first and after the last: generate and compare with the base.

    The figures go where the trainer's metrics go, under TRL's names for completions. The table is written to
    `{output_dir}/samples/step_{step}.jsonl` and sent to the trackers in `report_to` that show tables (wandb, trackio)
    or text (tensorboard), as `samples/generation_table` at its step; earlier tables stay.

    Args:
        evaluation: what to generate for and how.
        every: steps between tables.
        prompts: how many prompts.
        prefix: before the figures' names, where the trainer logs its own of the same names.
        kl_name: of the divergence alone, where only that name is the trainer's.
    """

    def __init__(
        self, evaluation: GenerationEvaluation, *, every: int, prompts: int, prefix: str = "", kl_name: str = "kl"
    ):
        self.evaluation = evaluation
        self.every = every
        self.prompts = prompts
        self.prefix = prefix
        self.kl_name = kl_name

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self._evaluate(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._evaluate(args, state, control)

    def _evaluate(self, args, state, control) -> None:
        trainer = self.evaluation.trainer
        comparison = self.evaluation.compare(self.prompts)
        # TRL's own `log` would add the training metrics gathered so far and forget them; and any logging ends a
        # pending request for it, which here is for the training metrics of this step.
        should_log = control.should_log
        figures = _figures(comparison.summary)
        figures[self.kl_name] = figures.pop("kl")
        Trainer.log(trainer, {f"{self.prefix}{name}": value for name, value in figures.items()})
        control.should_log = should_log
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            rows = [{"step": state.global_step, **row} for row in comparison.rows]
            write_json_lines(folder / f"step_{state.global_step:06d}.jsonl", rows)
            _send_table(trainer, rows, state.global_step)


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    policy = summary["generations"]["policy"]
    figures = {
        "kl": summary["kl"]["mean"],
        "completions/mean_length": policy["mean_tokens"],
        "distinct_2": policy["distinct_2"],
        "completions/clipped_ratio": policy["truncated_fraction"],
        "collapsed": float(policy["collapsed"]),
    }
    if summary["score"] is not None:
        figures["score"] = summary["score"]["policy"]
    if summary["win_rate"] is not None:
        figures["win_rate"] = summary["win_rate"]["half"]["rate"]
    for name, reward in (summary["rewards"] or {}).items():
        figures[f"rewards/{name}/mean"] = reward["policy"]
        figures[f"rewards/{name}/reference_mean"] = reward.get("reference")
    return {name: value for name, value in figures.items() if value is not None}


def _send_table(trainer, rows: list[dict[str, Any]], step: int) -> None:
    columns = list(rows[0])
    values = [[row.get(column) for column in columns] for row in rows]
    for tracker in trainer.args.report_to:
        if tracker == "wandb":
            import wandb

            if wandb.run is not None:
                # A new Table object each time: one that is logged again would replace what was logged before.
                wandb.log({TABLE_NAME: wandb.Table(columns=columns, data=values), "train/global_step": step})
        elif tracker == "trackio":
            import pandas
            import trackio

            trackio.log({TABLE_NAME: trackio.Table(dataframe=pandas.DataFrame(values, columns=columns))}, step=step)
        elif tracker == "tensorboard":
            _tensorboard_writer(trainer).add_text(TABLE_NAME, _markdown_table(columns, values), step)


def _tensorboard_writer(trainer):
    """The writer of the trainer's own TensorBoard callback."""
    from transformers.integrations import TensorBoardCallback

    return next(c.tb_writer for c in trainer.callback_handler.callbacks if isinstance(c, TensorBoardCallback))


def _markdown_table(columns: list[str], rows: list[list[Any]]) -> str:
    def cell(value: Any) -> str:
        return str(value).replace("|", "\\|").replace("\n", "<br>")

    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)
