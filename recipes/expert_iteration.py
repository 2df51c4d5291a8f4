"""Expert iteration: sample, keep verified responses, fine-tune, repeat. Uses the embedded additions by default."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trl_ext.held_out.reasoning import log_reasoning
from trl_ext.runs.arguments import MENDABLE_IN_TRAINING, one_line_errors
from trl_ext.runs.finish import write_reasoning_results
from trl_ext.runs.loading import can_be_resumed
from trl_ext.runs.reasoning import ValidatedProblems, load_problem_sets, sampling_settings
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.trainers.expert_iteration import ROUND_FILE, NoCorrectResponseError


@dataclass
class ExpertIterationArguments(ValidatedProblems):
    """Problems, prompts and rewards. Responses are sampled as in evaluations; validation follows each round."""

    def __post_init__(self):
        super().__post_init__()
        if self.generation_temperature == 0:
            raise ValueError("generation_temperature 0 samples the same response again and again: give a positive one")


@can_be_resumed()
def main() -> None:
    """Train, validate after each round, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = begin_run(ExpertIterationArguments, ExpertIterationConfig, config="expert_iteration")
        arguments, training = run.arguments, run.training
        if run.checkpoint is not None and not (Path(run.checkpoint) / ROUND_FILE).is_file():
            raise ValueError(f"{run.checkpoint} is no checkpoint of expert iteration: it has no {ROUND_FILE}")

        # The problems with their prompt template and grader.
        train, validation, final = load_problem_sets(arguments)
        settings = sampling_settings(arguments, reward=train.reward)

        sampled = {"rows": train.rows, "prompts": train.prompts(), "grade": train.grade, "settings": settings}
        trainer = run.load_trainer(partial(ExpertIterationTrainer, **sampled))
        evaluation = final.evaluation(trainer, settings)
        evaluation.require_base(run.checkpoint)

    run.open(trainer, metrics=trainer.metrics_file)
    evaluation.base(progress=True)
    trainer.validate = partial(log_reasoning, validation.evaluation(trainer, settings))

    run.train(trainer, mendable=(NoCorrectResponseError, *MENDABLE_IN_TRAINING))

    done = trainer.rounds
    rounds = f"{done} round{'s' * (done != 1)} of {training.questions_per_step} questions"
    each = f"{training.rollouts_per_question} rollouts each, {training.sft_epochs} epochs"
    write_reasoning_results(
        run,
        trainer,
        evaluation,
        objective=f"expert iteration ({rounds}, {each})",
        reward=train.reward,
        prompt_template=train.template_name,
        train_problems=len(train.rows),
        sampled_responses=done * training.questions_per_step * training.rollouts_per_question,
    )


if __name__ == "__main__":
    main()
