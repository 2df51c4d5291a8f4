"""Expert iteration: sample, keep what verifies, fine-tune, repeat. Without arguments on the embedded additions."""

from __future__ import annotations

import os

# A run says nothing to anybody unless it is asked to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import dataclasses
import time
from dataclasses import dataclass
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
from reasoning import print_comparison, sampling_settings
from reasoning import write_comparison as write_results
from results import describe_run
from training import ModelArguments, can_be_resumed, load_trainer
from verified import TrainingProblems, load_problem_sets, plot_over_time, stops

from trl_ext import ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.data.math import math_prompt
from trl_ext.files import write_text
from trl_ext.rollouts import end_processes
from trl_ext.trainers.expert_iteration import NoCorrectResponseError
from trl_ext.trainers.reasoning_evaluation import DECODINGS, ReasoningEvaluation
from trl_ext.trainers.reasoning_validation import validate


@dataclass
class ExpertIterationArguments(TrainingProblems):
    """Problems, prompts and rewards. Responses are sampled as in evaluations, and validated after each round."""

    def __post_init__(self):
        super().__post_init__()
        if self.generation_temperature == 0:
            raise ValueError("generation_temperature 0 samples the same response again and again: give a positive one")


def main() -> None:
    """Read the arguments, train, evaluate before and after, and write the run folder."""
    with can_be_resumed():
        _run()


def _run() -> None:
    started = time.time()
    with one_line_errors():
        arguments, model, training, checkpoint = _read_arguments()
        train, validation, final = load_problem_sets(arguments)
        resolved = config_text(arguments, model, training)
        settings = dataclasses.replace(sampling_settings(arguments), stop=stops(train.reward))
        trainer = load_trainer(
            partial(
                ExpertIterationTrainer,
                rows=train.rows,
                prompts=[math_prompt(row, train.template) for row in train.rows],
                grade=train.grade,
                settings=settings,
            ),
            model,
            training,
        )
        validation_evaluation, final_evaluation = (
            ReasoningEvaluation(trainer, problems.rows, problems.template, problems.grade, settings)
            for problems in (validation, final)
        )
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
    trainer.accelerator.wait_for_everyone()
    before = final_evaluation.base(progress=True)
    trainer.validate = partial(validate, validation_evaluation)

    training_started = time.time()
    with one_line_errors((NoCorrectResponseError, *MENDABLE_IN_TRAINING)):
        trainer.train(resume_from_checkpoint=checkpoint)
    training_seconds = time.time() - training_started
    trainer.save_model(training.output_dir)

    after = {decoding: final_evaluation.evaluate(decoding, progress=f"policy, {decoding}") for decoding in DECODINGS}
    if trainer.accelerator.is_main_process:
        rounds = f"{training.n_steps} rounds of {training.questions_per_step} questions"
        each = f"{training.rollouts_per_question} rollouts each, {training.sft_epochs} epochs"
        run = {
            "objective": f"expert iteration ({rounds}, {each})",
            "model": model.model_name_or_path,
            "dataset": arguments.dataset_name,
            "reward": train.reward,
            "prompt_template": train.template_name,
            "train_problems": len(train.rows),
            "sampled_responses": training.n_steps * training.questions_per_step * training.rollouts_per_question,
            "settings_digest": settings_digest(resolved),
            "training_seconds": training_seconds,
            "total_seconds": time.time() - started,
        }
        results = write_results(training.output_dir, describe_run(trainer, run), before, after)
        plot_over_time(folder, results)
        print_comparison(results, after["sampled"], training.output_dir)
    end_processes(trainer.accelerator)


def _read_arguments() -> tuple[ExpertIterationArguments, ModelArguments, ExpertIterationConfig, str | None]:
    arguments, model, training = parse_arguments(
        (ExpertIterationArguments, ModelArguments, ExpertIterationConfig),
        default_config=RECIPES / "configs" / "toy" / "expert_iteration.yaml",
        description="Improve a policy on its own correct responses.",
    )
    if training.output_dir == "trainer_output":
        training.output_dir = f"runs/expert-iteration-{Path(arguments.dataset_name).stem}"
    checkpoint = open_run_folder(
        training.output_dir,
        overwrite=arguments.overwrite_output_dir,
        resume_from_checkpoint=training.resume_from_checkpoint,
    )
    if checkpoint is not None and not (Path(checkpoint) / "expert_step.json").is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of expert iteration: it has no expert_step.json")
    check_trackers(training.report_to)
    return arguments, model, training, checkpoint


if __name__ == "__main__":
    main()
