"""Expert iteration: sample, keep what verifies, fine-tune, repeat. Without arguments on the embedded additions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import MENDABLE_IN_TRAINING, one_line_errors
from reasoning import compare_with_base, evaluate_on, require_base, sampling_settings
from run_folder import TrainingRun, begin_run
from time_budget import TimeBudgetArguments, check_time_left, say_stopped, time_budget
from training import can_be_resumed
from verified import TrainingProblems, load_problem_sets, plot_over_time

from trl_ext import ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.data.math import math_prompt
from trl_ext.rollouts import end_processes
from trl_ext.trainers.expert_iteration import NoCorrectResponseError
from trl_ext.trainers.reasoning_validation import validate


@dataclass
class ExpertIterationArguments(TimeBudgetArguments, TrainingProblems):
    """Problems, prompts and rewards. Responses are sampled as in evaluations, and validated after each round.

    `max_hours` ends the run after the round in which they are spent.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.generation_temperature == 0:
            raise ValueError("generation_temperature 0 samples the same response again and again: give a positive one")


@can_be_resumed()
def main() -> None:
    """Read the arguments, train, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = _begin()
        arguments, training = run.arguments, run.training
        train, validation, final = load_problem_sets(arguments)
        settings = sampling_settings(arguments, reward=train.reward)
        trainer = run.load_trainer(
            partial(
                ExpertIterationTrainer,
                rows=train.rows,
                prompts=[math_prompt(row, train.template) for row in train.rows],
                grade=train.grade,
                settings=settings,
            )
        )
        evaluation = evaluate_on(trainer, final, settings)
        require_base(evaluation, run)
    run.open(trainer, metrics=trainer.metrics_file)
    evaluation.base(progress=True)
    trainer.validate = partial(validate, evaluate_on(trainer, validation, settings))
    budget = time_budget(run, trainer, trainer.metrics_file)
    if budget is not None:
        trainer.stops = budget.is_spent

    run.train(trainer, mendable=(NoCorrectResponseError, *MENDABLE_IN_TRAINING))

    done = trainer.rounds
    rounds = f"{done} round{'s' * (done != 1)} of {training.questions_per_step} questions"
    each = f"{training.rollouts_per_question} rollouts each, {training.sft_epochs} epochs"
    results = compare_with_base(
        run,
        trainer,
        evaluation,
        objective=f"expert iteration ({rounds}, {each})",
        reward=train.reward,
        prompt_template=train.template_name,
        train_problems=len(train.rows),
        sampled_responses=done * training.questions_per_step * training.rollouts_per_question,
        stopped_by_max_hours=done < training.n_steps,
    )
    if results is not None:
        plot_over_time(run.folder, results)
        if done < training.n_steps:
            say_stopped(run, done, training.n_steps, "rounds")
    end_processes(trainer.accelerator)


def _begin() -> TrainingRun:
    run = begin_run(
        ExpertIterationArguments,
        ExpertIterationConfig,
        config="expert_iteration",
        description="Improve a policy on its own correct responses.",
        name=lambda training: "expert-iteration",
    )
    if run.checkpoint is not None and not (Path(run.checkpoint) / "expert_step.json").is_file():
        raise ValueError(f"{run.checkpoint} is no checkpoint of expert iteration: it has no expert_step.json")
    check_time_left(run)
    return run


if __name__ == "__main__":
    main()
