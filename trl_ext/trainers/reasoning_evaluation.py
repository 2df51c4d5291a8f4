"""Verified answers of a policy while it trains: what it writes to held-out problems, logged with its rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from trl_ext.data.math import math_prompt
from trl_ext.evaluation.reasoning import Grader, evaluate_reasoning, summarize_reasoning
from trl_ext.files import write_json_lines
from trl_ext.rollouts import SamplingSettings, TransformersEngine, response_entropies
from trl_ext.trainers.context import check_generations
from trl_ext.trainers.policies import trained_policy

DECODINGS = ("sampled", "greedy")


class ReasoningEvaluation:
    """Samples responses of a trainer's policy to problems, and grades them.

    Args:
        trainer: any of this library's or TRL's that trains a language model.
        rows: problems, as `trl_ext.data.math.load_math` gives them.
        template: of the prompts; None for the chat template.
        grade: as `trl_ext.evaluation.reasoning.grader` makes it.
        settings: of the sampled decoding; the greedy one differs in its temperature.
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
        check_generations(trainer.model, trainer.processing_class, self.prompts, limits)

    def evaluate(
        self,
        decoding: str = "sampled",
        *,
        count: int | None = None,
        path: str | Path | None = None,
        progress: str | None = None,
    ) -> list[dict[str, Any]]:
        """Graded responses of the policy as it is now, one to each of the first `count` problems (None for all).

        Every process must call this; each returns the same.

        Args:
            decoding: `sampled` or `greedy`.
            count: of problems.
            path: where the rows are kept, and read from where they are all there.
            progress: what a progress bar calls the work; None for no bar.
        """
        settings = self.settings
        if decoding == "greedy":
            settings = dataclasses.replace(settings, temperature=0.0)
        trainer = self.trainer
        progress = progress if trainer.accelerator.is_main_process else None
        tokenizer = trainer.processing_class
        with trained_policy(trainer) as policy:
            return evaluate_reasoning(
                self.rows[:count],
                self.prompts[:count],
                TransformersEngine(policy, tokenizer, settings),
                self.grade,
                seed=trainer.args.seed,
                path=path,
                entropies=lambda generations: response_entropies(
                    policy,
                    generations,
                    batch_size=trainer.args.per_device_eval_batch_size,
                    pad_token_id=tokenizer.pad_token_id,
                ),
                accelerator=trainer.accelerator,
                progress=progress,
            )

    def base(self, *, progress: bool = False) -> dict[str, list[dict[str, Any]]]:
        """Responses of the policy before its first step, by decoding; kept in the run folder for later."""
        return {
            decoding: self.evaluate(
                decoding, path=self._base_path(decoding), progress=f"base, {decoding}" if progress else None
            )
            for decoding in DECODINGS
        }

    def base_is_known(self) -> bool:
        """Whether the base's responses to all problems are in the run folder."""
        return all(_lines(self._base_path(decoding)) == len(self.rows) for decoding in DECODINGS)

    def _base_path(self, decoding: str) -> Path:
        return Path(self.trainer.args.output_dir) / "samples" / f"base_{decoding}.jsonl"


class ReasoningCallback(TrainerCallback):
    """Keeps the base's responses before the first step, and every `every` steps evaluates the policy.

    Its figures go where the trainer's metrics go. Names are TRL's, with `eval_` before them: `score` (accuracy),
    `rewards/format`, `rewards/answer`, `entropy`, `completions/mean_length`, `completions/clipped_ratio`, and
    `completions/mean_length_correct` and `_incorrect`. Each problem with response, truth, rewards and entropy is a row
    of `{output_dir}/samples/step_{step}.jsonl`.

    Args:
        evaluation: what to generate for and how.
        every: steps between evaluations; 0 for none but the base's.
        prompts: how many problems in each; None for all.
    """

    def __init__(self, evaluation: ReasoningEvaluation, *, every: int, prompts: int | None = None):
        self.evaluation = evaluation
        self.every = every
        self.prompts = prompts

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            base = self.evaluation.base(progress=True)["sampled"]
            if self.every:
                self._log(base[: self.prompts], args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if self.every and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            self._log(self.evaluation.evaluate(count=self.prompts), args, state, control)

    def _log(self, rows: list[dict[str, Any]], args, state, control) -> None:
        # TRL's own `log` would add the training metrics gathered so far and forget them; and any logging ends a
        # pending request for it, which here is for the training metrics of this step.
        should_log = control.should_log
        Trainer.log(self.evaluation.trainer, held_out_metrics(rows))
        control.should_log = should_log
        if state.is_world_process_zero:
            path = Path(args.output_dir) / "samples" / f"step_{state.global_step:06d}.jsonl"
            write_json_lines(path, [{"step": state.global_step, **row} for row in rows])


def held_out_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of graded rows under the names of metrics; without those that the rows do not have."""
    summary = summarize_reasoning(rows)
    metrics = {
        "eval_score": summary["accuracy"]["mean"],
        "eval_rewards/format": summary["format_rate"]["mean"],
        "eval_rewards/answer": summary["accuracy"]["mean"],
        "eval_entropy": summary["mean_entropy"],
        "eval_completions/mean_length": summary["mean_tokens"],
        "eval_completions/mean_length_correct": summary["mean_tokens_correct"],
        "eval_completions/mean_length_incorrect": summary["mean_tokens_incorrect"],
        "eval_completions/clipped_ratio": summary["truncated_fraction"],
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
