"""GRPO and related algorithms with verified rewards. Trains the embedded model on additions by default."""

from dataclasses import dataclass
from functools import partial

from trl_ext.held_out.reasoning import ReasoningCallback
from trl_ext.rewards import VerifiedReward
from trl_ext.runs.arguments import HfArg, one_line_errors
from trl_ext.runs.course_config import CourseConfig
from trl_ext.runs.finish import write_reasoning_results
from trl_ext.runs.loading import can_be_resumed
from trl_ext.runs.reasoning import ValidatedProblems, load_problem_sets, rollout_settings
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import PolicyTrainer
from trl_ext.trainers.defaults import check_at_least


@dataclass
class GRPOMathArguments(ValidatedProblems):
    """Problems, prompts and rewards, and how often to validate."""

    eval_every: int = HfArg(default=10, help="Steps between validations; 0 for none.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"eval_every": 0})


@can_be_resumed()
def main() -> None:
    """Train, validate, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            GRPOMathArguments,
            CourseConfig,
            config="grpo_math",
            name=lambda training: f"{training.algorithm.rpartition(':')[2]}-math",
        )
        arguments, training = run.arguments, run.training

        # The problems with their prompt template and grader; the reward is any function with TRL's signature.
        train, validation, final = load_problem_sets(arguments)
        reward = VerifiedReward(train.reward)
        # Do this before the trainer is created, which reads the stop strings.
        settings = rollout_settings(arguments, training, train.reward)

        trainer = run.load_trainer(partial(PolicyTrainer, reward_funcs=reward), train_dataset=train.dataset())
        evaluation = final.evaluation(trainer, settings)
        evaluation.require_base(run.checkpoint)

    run.open(trainer)
    validations = validation.evaluation(trainer, settings)
    trainer.add_callback(ReasoningCallback(validations, every=arguments.eval_every, final=evaluation))

    run.train(trainer)

    write_reasoning_results(
        run,
        trainer,
        evaluation,
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
