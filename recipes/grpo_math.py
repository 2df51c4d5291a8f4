"""GRPO and related algorithms with verified rewards. Trains the embedded model on additions by default."""

from functools import partial

from trl_ext.held_out.reasoning import ReasoningCallback
from trl_ext.rewards import verified_reward
from trl_ext.runs.arguments import one_line_errors
from trl_ext.runs.course_config import CourseConfig
from trl_ext.runs.loading import can_be_resumed
from trl_ext.runs.reasoning import GRPOMathArguments, load_problem_sets, rollout_settings
from trl_ext.runs.reasoning_results import end_with_comparison, evaluate_on, require_base
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import PolicyTrainer


@can_be_resumed()
def main() -> None:
    """Train, validate, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            GRPOMathArguments,
            CourseConfig,
            config="grpo_math",
            description="Train a policy with verified rewards.",
            name=lambda training: f"{training.algorithm.rpartition(':')[2]}-math",
        )
        arguments, training = run.arguments, run.training
        arguments.sample_as(training)
        train, validation, final = load_problem_sets(arguments)
        # Do this before the trainer is created, which reads the stop strings.
        settings = rollout_settings(arguments, training, train.reward)
        reward = verified_reward(train.reward, fast=not arguments.use_math_verify)
        trainer = run.load_trainer(partial(PolicyTrainer, reward_funcs=reward), train_dataset=train.dataset())
        evaluation = evaluate_on(trainer, final, settings)
        require_base(evaluation, run)
    run.open(trainer)
    while_training = evaluate_on(trainer, validation, settings)
    trainer.add_callback(ReasoningCallback(while_training, every=arguments.eval_every, final=evaluation))
    budget = run.time_budget(trainer, period=training.updates_per_rollout)
    if budget is not None:
        trainer.add_callback(budget)

    run.train(trainer)

    end_with_comparison(
        run,
        trainer,
        evaluation,
        done=trainer.state.global_step,
        of=trainer.state.max_steps,
        algorithm=training.algorithm,
        objective=trainer.algorithm.describe(),
        settings=trainer.algorithm.to_dict(),
        reward=train.reward,
        prompt_template=train.template_name,
        train_problems=len(train.rows),
        updates_per_rollout=training.updates_per_rollout,
        sampled_responses=trainer.sampled_responses,
        skipped_updates=dict(trainer.update_guard.skipped),
    )


if __name__ == "__main__":
    main()
