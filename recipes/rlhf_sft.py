"""Fine-tuning on demonstrations: chosen responses of pairs, responses that come with prompts, or the best of n."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from common import one_line_errors
from datasets import Dataset
from offline import RecipeArguments
from results import print_results, write_results
from run_folder import begin_run
from training import can_be_resumed, load_rows

from trl_ext import SFTConfig, SFTTrainer
from trl_ext.data.formats import convert_file
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation import GroundTruthJudge
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import GenerationTableCallback
from trl_ext.trainers.defaults import warn_once_per_run
from trl_ext.trainers.generation_evaluation import GenerationEvaluation, GenerationSettings
from trl_ext.trainers.policies import remember_base

# What the logs of a fine-tuning hold.
PANELS = {
    "Loss (nats per token)": {"train": "loss", "held out": "eval_loss"},
    "KL to the base (nats per response)": {"sampled responses": "kl"},
    "Response length (tokens)": {"policy": "completions/mean_length"},
}


@dataclass
class DemonstrationArguments(RecipeArguments):
    """Demonstrations to train on, beside what the evaluation is of."""

    train_split: str = field(
        default="train_prefs",
        metadata={"help": "Pairs, whose chosen responses are learned, or prompts with reference_response_text."},
    )
    demonstrations: str | None = field(
        default=None,
        metadata={
            "help": "A .jsonl file of prompt and completion to learn instead, as best_of_n.py --keep writes it."
        },
    )
    eval_split: str = field(
        default="validation_prefs", metadata={"help": "Held-out demonstrations, for their loss; none if missing."}
    )
    num_examples: int | None = field(default=None, metadata={"help": "Train on the first so many. Default: all."})
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Longer prompts of the evaluation lose their beginning."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_examples", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@can_be_resumed()
def main() -> None:
    """Read the arguments, train, compare with the model before, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            DemonstrationArguments,
            SFTConfig,
            config="rlhf_sft",
            description="Fine-tune a model on demonstrations.",
            name=lambda training: "sft-demonstrations",
        )
        arguments = run.arguments
        skipping = {"skip_bad_rows": arguments.skip_bad_rows}
        _refuse_completions(arguments)
        splits = load_rows(arguments.dataset_name, arguments.train_split, **skipping)
        source, rows = arguments.train_split, splits[arguments.train_split]
        if arguments.demonstrations is not None:
            source = arguments.demonstrations
            rows = Dataset.from_list(convert_file(source, "prompt_completion", **skipping))
        train = demonstrations(rows, source, arguments.num_examples)
        held_out = None
        if arguments.eval_split in splits:
            held_out = demonstrations(splits[arguments.eval_split], arguments.eval_split)
        prompts = splits.get(arguments.prompt_split)
        if prompts is None:
            warn_once_per_run(f"{arguments.dataset_name} has no split {arguments.prompt_split!r}: no generations")
        elif shared := _shared_prompts(train, prompts):
            warn_once_per_run(
                f"{shared} of the {len(prompts)} prompts of {arguments.prompt_split} are trained on, too"
            )
        trainer = run.load_trainer(SFTTrainer, train_dataset=train, eval_dataset=held_out)
        if prompts is not None:
            remember_base(trainer)
        evaluation = None if prompts is None else _evaluation(trainer, prompts, arguments)
    run.open(trainer)
    if evaluation is not None and arguments.generation_eval_every:
        shown = {"every": arguments.generation_eval_every, "prompts": arguments.num_generation_prompts}
        trainer.add_callback(GenerationTableCallback(evaluation, **shown))

    run.train(trainer)

    comparison = None if evaluation is None else evaluation.compare(arguments.num_eval_prompts, progress=True)
    if trainer.accelerator.is_main_process:
        described = run.describe(objective=f"SFT ({len(train)} demonstrations)", train_responses=len(train))
        results = write_results(trainer, comparison, None, described, panels=PANELS)
        print_results(results, [] if comparison is None else comparison.rows, run.training.output_dir)
    end_processes(trainer.accelerator)


def _refuse_completions(arguments: DemonstrationArguments) -> None:
    """A file of prompts with completions is no benchmark: its completions would be dropped.

    Raises:
        ValueError: names the flag that takes such a file.
    """
    path = Path(arguments.dataset_name)
    if not path.is_file():
        return
    first = next((row for _, row in read_jsonl(path).rows), {})
    if "completion" in first and "label" not in first:
        raise ValueError(
            f"{path} holds prompts and completions: give it as --demonstrations {path}, and as --dataset_name what to "
            "evaluate on"
        )


def demonstrations(rows, split: str, count: int | None = None) -> Dataset:
    """The first `count` rows (None for all) with `row_id`, `prompt` and `completion`.

    Raises:
        ValueError: the split has no responses, or fewer rows than are asked for.
    """
    name = next((name for name in ("chosen", "reference_response_text") if name in rows.column_names), None)
    if name is None:
        raise ValueError(
            f"the split {split!r} holds no demonstrations: it needs chosen responses, or prompts with "
            "reference_response_text"
        )
    if count is not None and count > len(rows):
        raise ValueError(f"num_examples {count}: {split!r} has {len(rows)} rows")
    rows = rows.select(range(len(rows) if count is None else count))
    completions = [
        [{"role": "assistant", "content": response}]
        if isinstance(response, str) and isinstance(prompt, list)
        else response
        for prompt, response in zip(rows["prompt"], rows[name], strict=True)
    ]
    return Dataset.from_dict({"row_id": rows["row_id"], "prompt": rows["prompt"], "completion": completions})


def _shared_prompts(train: Dataset, prompts) -> int:
    trained = {json.dumps(prompt) for prompt in train["prompt"]}
    return sum(json.dumps(prompt) in trained for prompt in prompts["prompt"])


def _evaluation(trainer, prompts, arguments: DemonstrationArguments) -> GenerationEvaluation:
    settings = GenerationSettings(
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.generation_temperature,
        batch_size=arguments.generation_batch_size,
        seed=trainer.args.seed,
    )
    judge = GroundTruthJudge() if arguments.dataset_name == "toy" else None
    score_function = judge.score_function if judge else None
    return GenerationEvaluation(trainer, prompts, settings, judge=judge, score_function=score_function)


if __name__ == "__main__":
    main()
