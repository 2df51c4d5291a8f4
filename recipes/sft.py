"""Supervised fine-tuning on worked problems. Without arguments it trains the embedded model on embedded additions."""

from __future__ import annotations

import os

# A run says nothing to anybody unless it is asked to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from datasets import Dataset
from reasoning import ProblemArguments, Problems, first, load_problems, print_comparison, sampling_settings
from reasoning import write_comparison as write_results
from results import describe_run
from training import ModelArguments, can_be_resumed, load_finished, load_trainer

from trl_ext import SFTConfig, SFTTrainer
from trl_ext.data.math import demonstration, math_prompt
from trl_ext.files import write_text
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import MetricsFileCallback
from trl_ext.trainers.defaults import is_main_process
from trl_ext.trainers.reasoning_evaluation import DECODINGS, ReasoningCallback, ReasoningEvaluation


@dataclass
class SFTArguments(ProblemArguments):
    """Problems to train on, beside what the evaluation is of."""

    train_split: str = field(default="train", metadata={"help": "Problems with solutions to train on."})
    num_examples: int | None = field(
        default=None, metadata={"help": "Train on the first so many, after filtering. Default: all."}
    )
    filter_correct: bool = field(
        default=False, metadata={"help": "Train only on responses whose answer verifies; says how many do."}
    )
    generation_eval_every: int = field(
        default=50, metadata={"help": "Steps between evaluations on held-out problems; 0 for none."}
    )
    num_generation_prompts: int = field(default=64, metadata={"help": "Problems in each of these evaluations."})

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("generation_eval_every", 0), ("num_generation_prompts", 1), ("num_examples", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def main() -> None:
    """Read the arguments, train, evaluate before and after, and write the run folder."""
    with can_be_resumed():
        _run()


def _run() -> None:
    started = time.time()
    with one_line_errors():
        arguments, model, training, checkpoint = _read_arguments()
        train = load_problems(arguments, arguments.train_split)
        held_out = load_problems(arguments, arguments.eval_split, arguments.num_eval_prompts)
        demonstrations, kept = choose_demonstrations(arguments, train)
        resolved = config_text(arguments, model, training)
        trainer = load_trainer(SFTTrainer, model, training, train_dataset=Dataset.from_list(demonstrations))
        settings = sampling_settings(arguments, reward=held_out.reward)
        evaluation = ReasoningEvaluation(trainer, held_out.rows, held_out.template, held_out.grade, settings)
        if checkpoint is not None and not evaluation.base_is_known():
            raise ValueError(
                f"{training.output_dir}/samples does not hold the base's responses to the {len(held_out.rows)} "
                "held-out problems, which a run leaves there at its start: begin anew with --overwrite_output_dir"
            )
    if trainer.accelerator.is_main_process:
        if arguments.overwrite_output_dir:
            clear_run_folder(training.output_dir)
        write_text(Path(training.output_dir) / "config.yaml", resolved)
    trainer.add_callback(MetricsFileCallback(Path(training.output_dir) / "metrics.jsonl"))
    every, prompts = arguments.generation_eval_every, arguments.num_generation_prompts
    trainer.add_callback(ReasoningCallback(evaluation, every=every, prompts=prompts))

    training_started = time.time()
    with one_line_errors(MENDABLE_IN_TRAINING):
        if not load_finished(trainer, checkpoint):
            trainer.train(resume_from_checkpoint=checkpoint)
    training_seconds = time.time() - training_started
    trainer.save_model(training.output_dir)

    after = {decoding: evaluation.evaluate(decoding, progress=f"policy, {decoding}") for decoding in DECODINGS}
    before = evaluation.base()
    if trainer.accelerator.is_main_process:
        run = {
            "objective": f"SFT ({describe_data(arguments, len(demonstrations))}, {held_out.template_name} prompt)",
            "model": model.model_name_or_path,
            "dataset": arguments.dataset_name,
            "reward": held_out.reward,
            "train_problems": len(train.rows),
            "train_responses": len(demonstrations),
            "filtered": kept,
            "settings_digest": settings_digest(resolved),
            "training_seconds": training_seconds,
            "total_seconds": time.time() - started,
        }
        results = write_results(training.output_dir, describe_run(trainer, run), before, after)
        print_comparison(results, after["sampled"], training.output_dir)
    end_processes(trainer.accelerator)


def _read_arguments() -> tuple[SFTArguments, ModelArguments, SFTConfig, str | None]:
    arguments, model, training = parse_arguments(
        (SFTArguments, ModelArguments, SFTConfig),
        default_config=RECIPES / "configs" / "toy" / "sft.yaml",
        description="Fine-tune a model on worked problems.",
    )
    if training.output_dir == "trainer_output":
        training.output_dir = f"runs/sft-{Path(arguments.dataset_name).absolute().stem}"
    checkpoint = open_run_folder(
        training.output_dir,
        overwrite=arguments.overwrite_output_dir,
        resume_from_checkpoint=training.resume_from_checkpoint,
    )
    check_trackers(training.report_to)
    return arguments, model, training, checkpoint


def choose_demonstrations(
    arguments: SFTArguments, problems: Problems
) -> tuple[list[dict[str, Any]], dict[str, int] | None]:
    """The rows to train on, with `prompt` and `completion`, and how many of how many the filter kept (None without).

    Raises:
        ValueError: no problem has a response or a solution, none is left, or fewer than are asked for.
    """
    boxed = problems.reward == "question_only"
    pairs = [(row, demonstration(row, problems.template, boxed=boxed)) for row in problems.rows]
    pairs = [(row, response) for row, response in pairs if response is not None]
    if not pairs:
        raise ValueError(
            f"{arguments.dataset_name}, split {arguments.train_split!r}, has no response or solution to train on"
        )
    counts = None
    if arguments.filter_correct:
        right = [(row, response) for row, response in pairs if problems.grade(response, row)["reward"]]
        counts = {"kept": len(right), "of": len(pairs)}
        if is_main_process():
            print(f"filter_correct: kept {len(right)} of {len(pairs)} responses, whose answers verify")
        if not right:
            raise ValueError(
                f"filter_correct: no response of {arguments.train_split!r} verifies under {problems.reward}: look at "
                "--prompt_template and --reward"
            )
        pairs = right
    pairs = first(pairs, arguments.num_examples, f"what is left of {arguments.train_split!r} to train on")
    prompts = [(row, math_prompt(row, problems.template), response) for row, response in pairs]
    return [
        # Messages on both sides, or text on both.
        {
            "row_id": row["row_id"],
            "prompt": prompt,
            "completion": response if isinstance(prompt, str) else [{"role": "assistant", "content": response}],
        }
        for row, prompt, response in prompts
    ], counts


def describe_data(arguments: SFTArguments, count: int) -> str:
    """How many responses, and whether they were filtered."""
    return f"{count} {'correct ' if arguments.filter_correct else ''}responses"


if __name__ == "__main__":
    main()
