"""GRPO and its relatives with verified rewards. Without arguments: the embedded model on additions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial

from common import one_line_errors
from course_terms import CourseConfig
from datasets import Dataset
from reasoning import Problems, compare_with_base, evaluate_on, require_base, sampling_settings
from run_folder import TrainingRun, begin_run
from time_budget import TimeBudgetArguments, check_time_left, say_stopped, time_budget
from training import can_be_resumed
from verified import TrainingProblems, load_problem_sets, plot_over_time

from trl_ext import PolicyTrainer
from trl_ext.data.math import math_prompt
from trl_ext.rewards import verified_reward
from trl_ext.rollouts import end_processes
from trl_ext.trainers.reasoning_validation import ValidationCallback


@dataclass
class GRPOMathArguments(TimeBudgetArguments, TrainingProblems):
    """Problems, prompts and rewards, how often to validate, and how long to train."""

    eval_every: int = field(default=10, metadata={"help": "Steps between validations; 0 for none."})

    def __post_init__(self):
        super().__post_init__()
        if self.eval_every < 0:
            raise ValueError(f"eval_every must be at least 0, got {self.eval_every}")


@can_be_resumed()
def main() -> None:
    """Read the arguments, train, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = _begin()
        arguments, training = run.arguments, run.training
        train, validation, final = load_problem_sets(arguments)
        settings = sampling_settings(arguments, reward=train.reward)
        if training.stop is None:
            training.set_stop(list(settings.stop))
        trainer = run.load_trainer(
            partial(PolicyTrainer, reward_funcs=verified_reward(train.reward, fast=not arguments.use_math_verify)),
            train_dataset=dataset_of(train),
        )
        settings = dataclasses.replace(
            settings, max_prompt_tokens=training.max_prompt_tokens, stop=tuple(training.stop or ())
        )
        evaluation = evaluate_on(trainer, final, settings)
        require_base(evaluation, run)
    metrics = run.open(trainer)
    while_training = evaluate_on(trainer, validation, settings)
    trainer.add_callback(ValidationCallback(while_training, evaluation, every=arguments.eval_every))
    budget = time_budget(run, trainer, metrics, period=training.updates_per_rollout)
    if budget is not None:
        trainer.add_callback(budget)

    run.train(trainer)

    state = trainer.state
    stopped = budget is not None and state.global_step < state.max_steps
    results = compare_with_base(
        run,
        trainer,
        evaluation,
        algorithm=training.algorithm,
        objective=trainer.objective.describe(),
        settings=trainer.objective.to_dict(),
        reward=train.reward,
        prompt_template=train.template_name,
        train_problems=len(train.rows),
        updates_per_rollout=training.updates_per_rollout,
        sampled_responses=trainer.rollouts * training.generation_batch_size,
        stopped_by_max_hours=stopped,
        skipped_updates=dict(trainer.update_guard.skipped),
    )
    if results is not None:
        plot_over_time(run.folder, results)
        if stopped:
            say_stopped(run, state.global_step, state.max_steps)
    end_processes(trainer.accelerator)


def _begin() -> TrainingRun:
    run = begin_run(
        GRPOMathArguments,
        CourseConfig,
        config="grpo_math",
        description="Train a policy with verified rewards.",
        name=lambda training: f"{training.algorithm.rpartition(':')[2]}-math",
    )
    arguments, training = run.arguments, run.training
    default = GRPOMathArguments.__dataclass_fields__["max_new_tokens"].default
    if arguments.max_new_tokens not in (default, training.max_completion_length):
        raise ValueError(
            f"max_new_tokens {arguments.max_new_tokens} is not max_completion_length "
            f"{training.max_completion_length}: evaluations sample as the rollouts do; give the second alone"
        )
    arguments.max_new_tokens = training.max_completion_length
    check_time_left(run)
    return run


def dataset_of(problems: Problems) -> Dataset:
    """The problems as TRL takes them: prompts, and what the reward reads."""
    columns = [name for name in ("row_id", "answer", "numbers") if name in problems.rows[0]]
    return Dataset.from_list(
        [
            {"prompt": math_prompt(row, problems.template), **{name: row[name] for name in columns}}
            for row in problems.rows
        ]
    )


if __name__ == "__main__":
    main()
