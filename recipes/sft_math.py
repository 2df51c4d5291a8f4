"""Supervised fine-tuning on worked problems. Without arguments it trains the embedded model on embedded additions."""

from dataclasses import dataclass

from trl_ext.held_out.reasoning import ReasoningCallback
from trl_ext.runs.arguments import HfArg, one_line_errors
from trl_ext.runs.finish import write_reasoning_results
from trl_ext.runs.loading import can_be_resumed
from trl_ext.runs.reasoning import ProblemArguments, choose_demonstrations, load_problems, sampling_settings
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import SFTConfig, SFTTrainer
from trl_ext.trainers.defaults import check_at_least


@dataclass
class SFTArguments(ProblemArguments):
    """The worked problems to train on, and how often to evaluate."""

    num_examples: int | None = HfArg(default=None, help="Train on the first N, after filtering. Default: all.")
    filter_correct: bool = HfArg(
        default=False, help="Train only on responses whose answer verifies; says how many do."
    )
    generation_eval_every: int = HfArg(default=50, help="Steps between evaluations on held-out problems; 0 for none.")
    num_generation_prompts: int = HfArg(default=64, help="Problems in each of these evaluations.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"generation_eval_every": 0, "num_generation_prompts": 1, "num_examples": 1})


@can_be_resumed()
def main() -> None:
    """Train, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = begin_run(SFTArguments, SFTConfig, config="sft_math", name=lambda training: "sft")
        arguments = run.arguments

        # The problems with their prompt template and grader, and the responses to learn.
        train = load_problems(arguments, arguments.train_split)
        held_out = load_problems(arguments, arguments.eval_split, "num_eval_prompts")
        demonstrations, kept = choose_demonstrations(arguments, train)

        trainer = run.load_trainer(SFTTrainer, train_dataset=demonstrations)
        evaluation = held_out.evaluation(trainer, sampling_settings(arguments, reward=held_out.reward))
        evaluation.require_base(run.checkpoint)

    run.open(trainer)
    every, prompts = arguments.generation_eval_every, arguments.num_generation_prompts
    trainer.add_callback(ReasoningCallback(evaluation, every=every, prompts=prompts))

    run.train(trainer)

    responses = f"{len(demonstrations)} {'correct ' if arguments.filter_correct else ''}responses"
    write_reasoning_results(
        run,
        trainer,
        evaluation,
        objective=f"SFT ({responses}, {held_out.template_name} prompt)",
        reward=held_out.reward,
        train_problems=len(train.rows),
        train_responses=len(demonstrations),
        filtered=kept,
    )


if __name__ == "__main__":
    main()
