"""Fine-tuning on demonstrations: chosen responses of pairs, responses given with prompts, or the best of n."""

from dataclasses import dataclass

from trl_ext import load_benchmark
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
from trl_ext.runs.offline import demonstrations, tell_shared_prompts
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import SFTConfig, SFTTrainer
from trl_ext.trainers.defaults import check_at_least


@dataclass
class DemonstrationArguments(ResponseArguments):
    """Demonstrations to train on, in addition to the data for evaluation."""

    train_split: str = HfArg(
        default="train_prefs",
        help="Pairs, whose chosen responses are learned, or prompts with reference_response_text.",
    )
    demonstrations: str | None = HfArg(
        default=None, help="A .jsonl file of prompt and completion to learn instead, as best_of_n.py --keep writes it."
    )
    eval_split: str = HfArg(default="validation_prefs", help="Held-out demonstrations, for their loss, or none.")
    num_examples: int | None = HfArg(default=None, help="Train on the first N. Default: all.")
    max_prompt_tokens: int | None = HfArg(default=None, help="Longer prompts of the evaluation lose their beginning.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"num_examples": 1, "max_prompt_tokens": 1})


@can_be_resumed()
def main() -> None:
    """Train, compare with the initial model, and write the run folder."""
    with one_line_errors():
        run = begin_run(DemonstrationArguments, SFTConfig, config="sft", name=lambda training: "sft-demonstrations")
        arguments = run.arguments

        splits = load_rows(arguments)
        source, rows = arguments.train_split, splits[arguments.train_split]
        if arguments.demonstrations is not None:
            source = arguments.demonstrations
            (rows,) = load_benchmark(source, skip_bad_rows=arguments.skip_bad_rows).values()
        train = demonstrations(rows, source, arguments.num_examples)
        held_out = optional_split(splits, "eval_split", arguments, "the loss on held-out responses is not computed")
        if held_out is not None:
            held_out = demonstrations(held_out, arguments.eval_split)
        prompts = optional_split(splits, "prompt_split", arguments, "no generations")
        if prompts is not None:
            tell_shared_prompts(train, prompts, arguments.prompt_split)

        trainer = run.load_trainer(SFTTrainer, train_dataset=train, eval_dataset=held_out)
        evaluation = evaluate_generations(trainer, prompts, arguments)

    run.open(trainer)
    show_generations(trainer, evaluation, arguments, arguments.generation_eval_every)

    run.train(trainer)

    write_results(
        run,
        trainer,
        evaluation,
        objective=f"SFT ({len(train)} demonstrations)",
        train_responses=len(train),
    )


if __name__ == "__main__":
    main()
