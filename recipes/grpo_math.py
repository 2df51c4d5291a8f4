"""GRPO and its relatives with verified rewards. Without arguments: the embedded model on additions."""

from __future__ import annotations

import os

# A run says nothing to anybody unless it is asked to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import dataclasses
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common import (
    MENDABLE_IN_TRAINING,
    RECIPES,
    check_trackers,
    clear_run_folder,
    config_text,
    one_line_errors,
    open_run_folder,
    parse_arguments,
    settings_digest,
)
from course_terms import CourseConfig
from datasets import Dataset
from reasoning import Problems, print_comparison, sampling_settings
from reasoning import write_comparison as write_results
from results import describe_run
from training import ModelArguments, can_be_resumed, load_finished, load_trainer
from verified import TrainingProblems, load_problem_sets, plot_over_time, reward_function, stops

from trl_ext import PolicyTrainer
from trl_ext.data.math import math_prompt
from trl_ext.files import write_text
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import MetricsFileCallback, TimeBudgetCallback, read_metrics
from trl_ext.trainers.reasoning_evaluation import DECODINGS, ReasoningEvaluation
from trl_ext.trainers.reasoning_validation import ValidationCallback


@dataclass
class GRPOMathArguments(TrainingProblems):
    """Problems, prompts and rewards, how often to validate, and how long to train."""

    eval_every: int = field(default=10, metadata={"help": "Steps between validations; 0 for none."})
    max_hours: float | None = field(
        default=None, metadata={"help": "End training after so long, with a checkpoint and the final table."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.eval_every < 0:
            raise ValueError(f"eval_every must be at least 0, got {self.eval_every}")
        if self.max_hours is not None and not self.max_hours > 0:
            raise ValueError(f"max_hours must be positive, got {self.max_hours}")


def main() -> None:
    """Read the arguments, train, evaluate before and after, and write the run folder."""
    with can_be_resumed():
        _run()


def _run() -> None:
    started = time.time()
    with one_line_errors():
        arguments, model, training, checkpoint = _read_arguments()
        train, validation, final = load_problem_sets(arguments)
        if training.stop is None:
            training.set_stop(list(stops(train.reward)))
        resolved = config_text(arguments, model, training)
        trainer = load_trainer(
            partial(PolicyTrainer, reward_funcs=reward_function(train, fast=not arguments.use_math_verify)),
            model,
            training,
            train_dataset=dataset_of(train),
        )
        settings = sampling_settings(arguments, reward=train.reward)
        settings = dataclasses.replace(
            settings, max_prompt_tokens=training.max_prompt_tokens, stop=tuple(training.stop or ())
        )
        evaluations = [
            ReasoningEvaluation(trainer, problems.rows, problems.template, problems.grade, settings)
            for problems in (validation, final)
        ]
        final_evaluation = evaluations[1]
        if checkpoint is not None and not final_evaluation.base_is_known():
            raise ValueError(
                f"{training.output_dir}/samples does not hold the base's responses to the {len(final.rows)} problems, "
                "which a run leaves there at its start: begin anew with --overwrite_output_dir"
            )
    folder = Path(training.output_dir)
    if trainer.accelerator.is_main_process:
        if arguments.overwrite_output_dir:
            clear_run_folder(training.output_dir)
        write_text(folder / "config.yaml", resolved)
    metrics = MetricsFileCallback(folder / "metrics.jsonl")
    trainer.add_callback(metrics)
    trainer.add_callback(ValidationCallback(*evaluations, every=arguments.eval_every))
    if arguments.max_hours is not None:
        period = training.updates_per_rollout
        budget = TimeBudgetCallback(arguments.max_hours, metrics, trainer.accelerator, period=period)
        trainer.add_callback(budget)

    training_started = time.time()
    with one_line_errors(MENDABLE_IN_TRAINING):
        if not load_finished(trainer, checkpoint):
            trainer.train(resume_from_checkpoint=checkpoint)
    training_seconds = time.time() - training_started
    trainer.save_model(training.output_dir)

    after = {decoding: final_evaluation.evaluate(decoding, progress=f"policy, {decoding}") for decoding in DECODINGS}
    before = final_evaluation.base()
    if trainer.accelerator.is_main_process:
        run = {
            "algorithm": training.algorithm,
            "objective": trainer.objective.describe(),
            "settings": trainer.objective.to_dict(),
            "settings_digest": settings_digest(resolved),
            "model": model.model_name_or_path,
            "dataset": arguments.dataset_name,
            "reward": train.reward,
            "prompt_template": train.template_name,
            "train_problems": len(train.rows),
            "updates_per_rollout": training.updates_per_rollout,
            "sampled_responses": _rollouts(trainer) * training.generation_batch_size,
            "stopped_by_max_hours": trainer.state.global_step < trainer.state.max_steps,
            "skipped_updates": dict(trainer.update_guard.skipped),
            "training_seconds": training_seconds,
            "total_seconds": time.time() - started,
        }
        results = write_results(training.output_dir, describe_run(trainer, run), before, after)
        plot_over_time(folder, results)
        print_comparison(results, after["sampled"], training.output_dir)
        if run["stopped_by_max_hours"]:
            print(
                f"stopped by --max_hours {arguments.max_hours:g} after {trainer.state.global_step} of "
                f"{trainer.state.max_steps} steps; with more hours, --resume_from_checkpoint goes on"
            )
    end_processes(trainer.accelerator)


def _read_arguments() -> tuple[GRPOMathArguments, ModelArguments, CourseConfig, str | None]:
    arguments, model, training = parse_arguments(
        (GRPOMathArguments, ModelArguments, CourseConfig),
        default_config=RECIPES / "configs" / "toy" / "grpo_math.yaml",
        description="Train a policy with verified rewards.",
    )
    if training.output_dir == "trainer_output":
        name = training.algorithm.rpartition(":")[2]
        training.output_dir = f"runs/{name}-math-{Path(arguments.dataset_name).stem}"
    checkpoint = open_run_folder(
        training.output_dir,
        overwrite=arguments.overwrite_output_dir,
        resume_from_checkpoint=training.resume_from_checkpoint,
    )
    check_trackers(training.report_to)
    default = GRPOMathArguments.__dataclass_fields__["max_new_tokens"].default
    if arguments.max_new_tokens not in (default, training.max_completion_length):
        raise ValueError(
            f"max_new_tokens {arguments.max_new_tokens} is not max_completion_length "
            f"{training.max_completion_length}: evaluations sample as the rollouts do; give the second alone"
        )
    arguments.max_new_tokens = training.max_completion_length
    if checkpoint is not None and arguments.max_hours is not None:
        rows = read_metrics(Path(training.output_dir) / "metrics.jsonl")
        hours = max((row.get("seconds", 0.0) for row in rows), default=0.0) / 3600
        if hours >= arguments.max_hours:
            raise ValueError(f"the run has taken {hours:.2f} of its --max_hours {arguments.max_hours:g}: give more")
    return arguments, model, training, checkpoint


def dataset_of(problems: Problems) -> Dataset:
    """The problems as TRL takes them: prompts, and what the reward reads."""
    columns = [name for name in ("row_id", "answer", "numbers") if name in problems.rows[0]]
    return Dataset.from_list(
        [
            {"prompt": math_prompt(row, problems.template), **{name: row[name] for name in columns}}
            for row in problems.rows
        ]
    )


def _rollouts(trainer) -> int:
    return -(-trainer.state.global_step // trainer.args.updates_per_rollout)


if __name__ == "__main__":
    main()
