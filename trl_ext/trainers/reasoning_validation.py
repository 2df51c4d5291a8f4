"""Validation on a fixed set of problems while a policy is trained, apart from the problems of the final comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from trl_ext.evaluation.reasoning import summarize_reasoning
from trl_ext.files import write_json_lines
from trl_ext.trainers.reasoning_evaluation import ReasoningEvaluation, held_out_metrics


class ValidationCallback(TrainerCallback):
    """Validates before the first step, every `every` steps and after the last, and keeps the base's final responses.

    The figures of `validation_metrics` go where the trainer's metrics go; the graded responses are rows of
    `{output_dir}/samples/step_{step}.jsonl`.

    Args:
        validation: of the fixed problems.
        final: of those of the comparison at the end, which the base answers before the first step.
        every: steps between validations; 0 for none.
    """

    def __init__(self, validation: ReasoningEvaluation, final: ReasoningEvaluation, *, every: int):
        self.validation = validation
        self.final = final
        self.every = every

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.final.base(progress=True)
            self._validate(control)

    def on_step_end(self, args, state, control, **kwargs):
        if self.every and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            self._validate(control)

    def _validate(self, control) -> None:
        # Any logging ends a pending request for it, which here is for the training metrics of this step.
        should_log = control.should_log
        if self.every:
            validate(self.validation)
        control.should_log = should_log


def validate(evaluation: ReasoningEvaluation) -> None:
    """Sample and grade responses to the problems, log their figures at the trainer's step, and keep them."""
    rows = evaluation.evaluate()
    trainer = evaluation.trainer
    # TRL's own `log` would add the training metrics gathered so far and forget them.
    Trainer.log(trainer, validation_metrics(rows))
    if trainer.accelerator.is_main_process:
        step = trainer.state.global_step
        path = Path(trainer.args.output_dir) / "samples" / f"step_{step:06d}.jsonl"
        write_json_lines(path, [{"step": step, **row} for row in rows])


def validation_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of `held_out_metrics` of graded rows, the interval of their accuracy, and counts by category.

    `eval_n` is the number of problems, `eval_score_low` and `eval_score_high` the 95% interval, and
    `eval_categories/correct`, `/wrong_answer` and `/wrong_format` are counts of responses.
    """
    summary = summarize_reasoning(rows)
    return {
        **held_out_metrics(rows),
        "eval_n": summary["n_prompts"],
        "eval_score_low": summary["accuracy"]["low"],
        "eval_score_high": summary["accuracy"]["high"],
        **{f"eval_categories/{name}": count for name, count in summary["categories"].items()},
    }
