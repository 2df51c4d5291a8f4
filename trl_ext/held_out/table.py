"""`GenerationTableCallback`: compares generations with the base model's during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from trl_ext.files import write_json_lines
from trl_ext.held_out.generations import GenerationEvaluation

TABLE_NAME = "samples/generation_table"


class GenerationTableCallback(TrainerCallback):
    """Generate and compare with the base, every `every` steps, before the first step and after the last.

    The metrics are logged with the trainer's metrics, under TRL's names for completions. The table is written to
    `{output_dir}/samples/step_{step}.jsonl` and sent to the trackers in `report_to` that show tables (wandb, trackio),
    as `samples/generation_table` at its step. Earlier tables are kept.

    Args:
        evaluation: what to generate for and how.
        every: steps between tables.
        prompts: number of prompts.
        prefix: prefix of the metrics' names, needed if the trainer logs metrics of the same names.
        kl_name: another name for the divergence alone, needed if the trainer logs only that name.
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
            self._evaluate()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._evaluate()

    def _evaluate(self) -> None:
        trainer = self.evaluation.trainer
        comparison = self.evaluation.compare(self.prompts)
        figures = _figures(comparison.summary)
        figures[self.kl_name] = figures.pop("kl")
        figures = {f"{self.prefix}{name}": value for name, value in figures.items()}
        log_held_out(trainer, figures, comparison.rows)
        if trainer.accelerator.is_main_process:
            _send_table(trainer, comparison.rows, trainer.state.global_step)


def log_held_out(trainer, figures: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Log figures at the trainer's step, and write `rows` to `{output_dir}/samples/step_{step}.jsonl`.

    Every process must call this. What the trainer has collected of its own metrics is left for its own log.
    """
    # TRL's own `log` would include the training metrics collected so far and clear them. Any logging clears a pending
    # log request, which is for the training metrics of this step.
    should_log = trainer.control.should_log
    Trainer.log(trainer, figures)
    trainer.control.should_log = should_log
    if trainer.accelerator.is_main_process:
        step = trainer.state.global_step
        path = Path(trainer.args.output_dir) / "samples" / f"step_{step:06d}.jsonl"
        write_json_lines(path, [{"step": step, **row} for row in rows])


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
    columns = ["step", *rows[0]]
    values = [[step, *(row.get(column) for column in rows[0])] for row in rows]
    for tracker in trainer.args.report_to:
        if tracker == "wandb":
            import wandb

            if wandb.run is not None:
                # Create a new Table each time: logging the same one again would replace the earlier one.
                wandb.log({TABLE_NAME: wandb.Table(columns=columns, data=values), "train/global_step": step})
        elif tracker == "trackio":
            import pandas
            import trackio

            trackio.log({TABLE_NAME: trackio.Table(dataframe=pandas.DataFrame(values, columns=columns))}, step=step)
