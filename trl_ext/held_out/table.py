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
    `{output_dir}/samples/step_{step}.jsonl` and sent to the trackers in `report_to` that show tables (wandb, trackio)
    or text (tensorboard), as `samples/generation_table` at its step. Earlier tables are kept.

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
            self._evaluate(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._evaluate(args, state, control)

    def _evaluate(self, args, state, control) -> None:
        trainer = self.evaluation.trainer
        comparison = self.evaluation.compare(self.prompts)
        # TRL's own `log` would include the training metrics collected so far and clear them. Any logging clears a
        # pending log request, which is for the training metrics of this step.
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
                # Create a new Table each time: logging the same one again would replace the earlier one.
                wandb.log({TABLE_NAME: wandb.Table(columns=columns, data=values), "train/global_step": step})
        elif tracker == "trackio":
            import pandas
            import trackio

            trackio.log({TABLE_NAME: trackio.Table(dataframe=pandas.DataFrame(values, columns=columns))}, step=step)
        elif tracker == "tensorboard":
            _tensorboard_writer(trainer).add_text(TABLE_NAME, _markdown_table(columns, values), step)


def _tensorboard_writer(trainer):
    """The writer of the trainer's TensorBoard callback."""
    from transformers.integrations import TensorBoardCallback

    return next(c.tb_writer for c in trainer.callback_handler.callbacks if isinstance(c, TensorBoardCallback))


def _markdown_table(columns: list[str], rows: list[list[Any]]) -> str:
    def cell(value: Any) -> str:
        return str(value).replace("|", "\\|").replace("\n", "<br>")

    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)
