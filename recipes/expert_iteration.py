"""Expert iteration: sample, keep verified responses, fine-tune, repeat. Uses the embedded additions by default."""

from functools import partial

from trl_ext.held_out.reasoning import log_reasoning
from trl_ext.runs.arguments import MENDABLE_IN_TRAINING, one_line_errors
from trl_ext.runs.loading import can_be_resumed
from trl_ext.runs.reasoning import ExpertIterationArguments, load_problem_sets, sampling_settings
from trl_ext.runs.reasoning_results import end_with_comparison, evaluate_on, require_base
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.trainers.expert_iteration import NoCorrectResponseError


@can_be_resumed()
def main() -> None:
    """Train, validate after each round, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            ExpertIterationArguments,
            ExpertIterationConfig,
            config="expert_iteration",
            description="Improve a policy on its own correct responses.",
            name=lambda training: "expert-iteration",
        )
        arguments, training = run.arguments, run.training
        arguments.check_checkpoint(run.checkpoint)
        train, validation, final = load_problem_sets(arguments)
        settings = sampling_settings(arguments, reward=train.reward)
        sampled = {"rows": train.rows, "prompts": train.prompts(), "grade": train.grade, "settings": settings}
        trainer = run.load_trainer(partial(ExpertIterationTrainer, **sampled))
        evaluation = evaluate_on(trainer, final, settings)
        require_base(evaluation, run)
    run.open(trainer, metrics=trainer.metrics_file)
    evaluation.base(progress=True)
    trainer.validate = partial(log_reasoning, evaluate_on(trainer, validation, settings))
    budget = run.time_budget(trainer)
    if budget is not None:
        trainer.stops = budget.is_spent

    run.train(trainer, mendable=(NoCorrectResponseError, *MENDABLE_IN_TRAINING))

    done = trainer.rounds
    rounds = f"{done} round{'s' * (done != 1)} of {training.questions_per_step} questions"
    each = f"{training.rollouts_per_question} rollouts each, {training.sft_epochs} epochs"
    end_with_comparison(
        run,
        trainer,
        evaluation,
        done=done,
        of=training.n_steps,
        unit="rounds",
        objective=f"expert iteration ({rounds}, {each})",
        reward=train.reward,
        prompt_template=train.template_name,
        train_problems=len(train.rows),
        sampled_responses=done * training.questions_per_step * training.rollouts_per_question,
    )


if __name__ == "__main__":
    main()
