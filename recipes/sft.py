"""Supervised fine-tuning on worked problems. Without arguments it trains the embedded model on embedded additions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common import one_line_errors
from datasets import Dataset
from reasoning import (
    ProblemArguments,
    Problems,
    compare_with_base,
    evaluate_on,
    first,
    load_problems,
    require_base,
    sampling_settings,
)
from run_folder import begin_run
from time_budget import TimeBudgetArguments, check_time_left, say_stopped, time_budget
from training import can_be_resumed

from trl_ext import SFTConfig, SFTTrainer
from trl_ext.data.math import demonstration, math_prompt
from trl_ext.rollouts import end_processes
from trl_ext.trainers.defaults import is_main_process
from trl_ext.trainers.reasoning_evaluation import ReasoningCallback


@dataclass
class SFTArguments(TimeBudgetArguments, ProblemArguments):
    """Problems to train on and how long, beside what the evaluation is of."""

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


@can_be_resumed()
def main() -> None:
    """Read the arguments, train, evaluate before and after, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            SFTArguments,
            SFTConfig,
            config="sft",
            description="Fine-tune a model on worked problems.",
            name=lambda training: "sft",
        )
        arguments = run.arguments
        check_time_left(run)
        train = load_problems(arguments, arguments.train_split)
        held_out = load_problems(arguments, arguments.eval_split, arguments.num_eval_prompts)
        demonstrations, kept = choose_demonstrations(arguments, train)
        trainer = run.load_trainer(SFTTrainer, train_dataset=Dataset.from_list(demonstrations))
        evaluation = evaluate_on(trainer, held_out, sampling_settings(arguments, reward=held_out.reward))
        require_base(evaluation, run)
    metrics = run.open(trainer)
    every, prompts = arguments.generation_eval_every, arguments.num_generation_prompts
    trainer.add_callback(ReasoningCallback(evaluation, every=every, prompts=prompts))
    budget = time_budget(run, trainer, metrics)
    if budget is not None:
        trainer.add_callback(budget)

    run.train(trainer)

    state = trainer.state
    stopped = budget is not None and state.global_step < state.max_steps
    results = compare_with_base(
        run,
        trainer,
        evaluation,
        objective=f"SFT ({describe_data(arguments, len(demonstrations))}, {held_out.template_name} prompt)",
        reward=held_out.reward,
        train_problems=len(train.rows),
        train_responses=len(demonstrations),
        filtered=kept,
        stopped_by_max_hours=stopped,
    )
    if results is not None and stopped:
        say_stopped(run, state.global_step, state.max_steps)
    end_processes(trainer.accelerator)


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
