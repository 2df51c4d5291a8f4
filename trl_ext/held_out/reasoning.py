"""Verified accuracy during training: samples the policy on held-out problems and logs the rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trl_ext.data.math import math_prompt
from trl_ext.evaluation.reasoning import summarize_reasoning
from trl_ext.held_out.table import log_held_out
from trl_ext.rewards.verified import Grader
from trl_ext.rollouts import SamplingSettings, TransformersEngine, response_entropies
from trl_ext.rollouts.responses import evaluate_reasoning
from trl_ext.trainers.context import check_context
from trl_ext.trainers.policies import trained_policy

DECODINGS = ("sampled", "greedy")


class ReasoningEvaluation:
    """Samples responses of a trainer's policy to problems, and grades them.

    Args:
        trainer: any trainer of a language model from this library or TRL.
        rows: problems, as `trl_ext.data.math.load_math` returns them.
        template: prompt template; None for the chat template.
        grade: such as a `trl_ext.rewards.verified.VerifiedGrader`.
        settings: settings of sampled decoding; greedy decoding differs only in temperature.
    """

    def __init__(
        self,
        trainer,
        rows: Sequence[Mapping[str, Any]],
        template: str | None,
        grade: Grader,
        settings: SamplingSettings,
    ):
        self.trainer = trainer
        self.rows = list(rows)
        self.prompts = [math_prompt(row, template) for row in self.rows]
        self.grade = grade
        self.settings = settings
        limits = {"max_new_tokens": settings.max_new_tokens, "max_prompt_tokens": settings.max_prompt_tokens}
        check_context(trainer.model, self.prompts, limits, trainer.processing_class)

    def evaluate(
        self,
        decoding: str = "sampled",
        *,
        count: int | None = None,
        path: str | Path | None = None,
        progress: str | None = None,
    ) -> list[dict[str, Any]]:
        """Graded responses of the current policy, one for each of the first `count` problems (None for all).

        `decoding` is `sampled` or `greedy`. Rows are kept in the file `path`, and read from it if it is complete.
        Every process must call this; all return the same result.
        """
        trainer, settings = self.trainer, self.settings
        if decoding == "greedy":
            settings = dataclasses.replace(settings, temperature=0.0)
        settings = dataclasses.replace(settings, template_kwargs=getattr(trainer, "chat_template_kwargs", None))
        tokenizer = trainer.processing_class
        with trained_policy(trainer) as policy:
            return evaluate_reasoning(
                self.rows[:count],
                self.prompts[:count],
                TransformersEngine(policy, tokenizer, settings),
                self.grade,
                seed=trainer.args.seed,
                path=path,
                entropies=partial(
                    response_entropies,
                    policy,
                    batch_size=trainer.args.per_device_eval_batch_size,
                    pad_token_id=tokenizer.pad_token_id,
                ),
                accelerator=trainer.accelerator,
                progress=progress if trainer.accelerator.is_main_process else None,
            )

    def base(self, *, progress: bool = False) -> dict[str, list[dict[str, Any]]]:
        """Responses of the policy before its first step, by decoding; the run folder keeps them for later."""
        return {
            name: self.evaluate(name, path=self._base_path(name), progress=f"base, {name}" if progress else None)
            for name in DECODINGS
        }

    def require_base(self, checkpoint: str | None) -> None:
        """Check that a run resumed from a checkpoint has the base's responses to all problems."""
        for path in map(self._base_path, DECODINGS) if checkpoint else ():
            if not path.is_file() or path.read_bytes().count(b"\n") != len(self.rows):
                raise ValueError(
                    f"{path} does not hold the base's responses to the {len(self.rows)} held-out problems: begin anew "
                    "with --overwrite_output_dir"
                )

    def _base_path(self, decoding: str) -> Path:
        return Path(self.trainer.args.output_dir) / "samples" / f"base_{decoding}.jsonl"


class ReasoningCallback(TrainerCallback):
    """Grades the policy's answers before the first step, every `every` steps and after the last.

    The metrics of `log_reasoning` are logged with the trainer's metrics. Each problem is a row of
    `{output_dir}/samples/step_{step}.jsonl`, with its response, answer, rewards and entropy. The base's responses to
    the problems of the final comparison are sampled before the first step and kept.

    Args:
        evaluation: which problems to sample, and how.
        every: steps between evaluations; with 0, only the base's responses are sampled.
        prompts: number of problems in each evaluation; None for all.
        final: the comparison at the end of training; None if it uses the problems of `evaluation`.
    """

    def __init__(
        self,
        evaluation: ReasoningEvaluation,
        *,
        every: int,
        prompts: int | None = None,
        final: ReasoningEvaluation | None = None,
    ):
        self.evaluation = evaluation
        self.every = every
        self.prompts = prompts
        self.final = final

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            base = (self.final or self.evaluation).base(progress=True)["sampled"]
            if self.every:
                log_reasoning(self.evaluation, base[: self.prompts] if self.final is None else None)

    def on_step_end(self, args, state, control, **kwargs):
        if self.every and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            log_reasoning(self.evaluation, self.evaluation.evaluate(count=self.prompts))


def log_reasoning(evaluation: ReasoningEvaluation, rows: list[dict[str, Any]] | None = None) -> None:
    """Log the metrics of graded responses (None to sample now), and write the responses to the run folder.

    The metrics have TRL's names, and one that the rows do not have is omitted. `eval_n` is the number of problems,
    `eval_score` the accuracy with its 95% interval from `eval_score_low` to `eval_score_high`, and
    `eval_categories/correct`, `/wrong_answer` and `/wrong_format` count responses. Every process must call this.
    """
    rows = rows or evaluation.evaluate()
    summary = summarize_reasoning(rows)
    accuracy = summary["accuracy"]
    metrics = {
        "eval_n": summary["n_prompts"],
        **{"eval_score": accuracy["mean"], "eval_score_low": accuracy["low"], "eval_score_high": accuracy["high"]},
        "eval_rewards/format": summary["format_rate"]["mean"],
        "eval_rewards/answer": accuracy["mean"],
        "eval_entropy": summary["mean_entropy"],
        "eval_completions/mean_length": summary["mean_tokens"],
        "eval_completions/mean_length_correct": summary["mean_tokens_correct"],
        "eval_completions/mean_length_incorrect": summary["mean_tokens_incorrect"],
        "eval_completions/clipped_ratio": summary["truncated_fraction"],
        **{f"eval_categories/{name}": count for name, count in summary["categories"].items()},
    }
    known = {name: value for name, value in metrics.items() if value is not None}
    log_held_out(evaluation.trainer, known, rows)
