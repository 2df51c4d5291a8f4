"""A reward model from preference pairs. Without arguments it trains on the embedded benchmark."""

from dataclasses import dataclass

from trl_ext.runs.arguments import HfArg, one_line_errors
from trl_ext.runs.finish import finish
from trl_ext.runs.loading import BenchmarkArguments, can_be_resumed, load_rows, optional_split
from trl_ext.runs.reward import (
    describe_objective,
    evaluate_reward_model,
    find_selection_split,
    kept_checkpoint,
    show_reward_model,
    training_pairs,
)
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import RewardConfig, RewardTrainer
from trl_ext.trainers.context import PAIRS, check_dataset
from trl_ext.trainers.defaults import check_at_least


@dataclass
class RewardArguments(BenchmarkArguments):
    """Data, evaluation and output of a run."""

    train_split: str = HfArg(default="train_prefs", help="Pairs to train on.")
    eval_split: str = HfArg(default="test_prefs", help="Held-out pairs; none for no evaluation.")
    selection_split: str | None = HfArg(
        default=None,
        help="Pairs by which the best checkpoint is chosen. Default: validation_prefs where there is one, "
        "else eval_split.",
    )
    num_train_pairs: int | None = HfArg(default=None, help="Train on the first N pairs. Default: all.")
    label_noise: float = HfArg(default=0.0, help="Fraction of the training labels to flip, for a weak model.")

    def __post_init__(self):
        check_at_least(self, {"num_train_pairs": 1})
        if not 0 <= self.label_noise <= 1:
            raise ValueError(f"label_noise must lie between 0 and 1, got {self.label_noise}")


@can_be_resumed()
def main() -> None:
    """Read the arguments, train, choose a checkpoint, evaluate it, and write the run folder."""
    with one_line_errors():
        run = begin_run(RewardArguments, RewardConfig, config="reward_model")
        arguments, training = run.arguments, run.training

        benchmark = load_rows(arguments)
        held_out = optional_split(benchmark, "eval_split", arguments, "held-out pairs will not be evaluated")
        if held_out is not None:
            check_dataset("eval_dataset", held_out, PAIRS)
        selection_split = find_selection_split(benchmark, arguments, training)
        train = training_pairs(benchmark[arguments.train_split], arguments, training.seed)

        evaluated = held_out if selection_split is None else benchmark[selection_split]
        trainer = run.load_trainer(RewardTrainer, train_dataset=train, eval_dataset=evaluated)
        pairs = trainer.eval_dataset
        if selection_split is not None:
            prepare, about = trainer._prepare_dataset, (trainer.processing_class, training, "eval")
            pairs = None if held_out is None else prepare(held_out, *about)

    run.open(trainer)
    run.train(trainer)

    selected = None if selection_split is None else kept_checkpoint(trainer, selection_split)
    found = evaluate_reward_model(run, trainer, pairs, held_out)
    finish(
        run,
        trainer,
        {"selection": selected, **found},
        show=show_reward_model,
        objective=describe_objective(training, arguments),
        train_pairs=len(trainer.train_dataset),
        label_noise=arguments.label_noise,
        eval_split=None if held_out is None else arguments.eval_split,
        weights="last" if selected is None else f"checkpoint-{selected['step']}",
    )


if __name__ == "__main__":
    main()
