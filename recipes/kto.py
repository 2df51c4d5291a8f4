"""KTO on single labelled responses, or on split pairs. Trains the embedded model on the embedded benchmark."""

from dataclasses import dataclass

from trl_ext.runs.arguments import HfArg, one_line_errors
from trl_ext.runs.finish import write_results
from trl_ext.runs.loading import (
    ResponseArguments,
    can_be_resumed,
    evaluate_generations,
    load_rows,
    optional_split,
    show_generations,
)
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import KTOConfig, KTOTrainer


@dataclass
class KTOArguments(ResponseArguments):
    """Data, evaluation and output of a run."""

    train_split: str = HfArg(default="train_prefs", help="Labelled responses or pairs to train on.")
    eval_split: str = HfArg(default="test_prefs", help="Held-out ones; none for no evaluation.")


@can_be_resumed()
def main() -> None:
    """Train, compare the policy with its base, and write the run folder."""
    with one_line_errors():
        run = begin_run(KTOArguments, KTOConfig, config="kto")
        arguments, training = run.arguments, run.training

        splits = load_rows(arguments)
        held_out = optional_split(splits, "eval_split", arguments, "held-out responses will not be evaluated")
        prompts = optional_split(splits, "prompt_split", arguments, "generations will not be evaluated")

        trainer = run.load_trainer(KTOTrainer, train_dataset=splits[arguments.train_split], eval_dataset=held_out)
        evaluation = evaluate_generations(trainer, prompts, arguments)

    run.open(trainer)
    # TRL's own `kl` and `eval_kl` are the loss's estimate from mismatched responses.
    show_generations(trainer, evaluation, arguments, arguments.generation_eval_every, kl_name="sampled_kl")

    run.train(trainer)

    weights = f"weights {training.desirable_weight:g} and {training.undesirable_weight:g}"
    write_results(
        run,
        trainer,
        evaluation,
        loss=training.loss_type,
        objective=f"{training.loss_type} (beta {training.beta:g}, {weights})",
        train_responses=len(trainer.train_dataset),
    )


if __name__ == "__main__":
    main()
