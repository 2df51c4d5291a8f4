"""Training on existing responses: preference pairs, labelled responses and demonstrations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers.hf_argparser import HfArg

from trl_ext.data.formats import convert_file
from trl_ext.data.rows import read_jsonl
from trl_ext.files import write_json_lines
from trl_ext.held_out.generations import pair_metrics, score_pairs
from trl_ext.losses import PreferenceScores
from trl_ext.runs.arguments import one_line_errors
from trl_ext.runs.loading import (
    EvaluatedArguments,
    can_be_resumed,
    evaluate_generations,
    load_rows,
    optional_split,
    show_generations,
)
from trl_ext.runs.results import end_with_results
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import PreferenceConfig, PreferenceTrainer
from trl_ext.trainers.defaults import check_at_least
from trl_ext.trainers.policies import remember_base


@dataclass
class OfflineArguments(EvaluatedArguments):
    """Data, evaluation and output of a run."""

    train_split: str = HfArg(default="train_prefs", help="Pairs to train on.")
    eval_split: str = HfArg(default="test_prefs", help="Held-out pairs; none for no evaluation.")
    generation_eval_every: int = HfArg(
        default=100, help="Steps between tables of generations while training; 0 for none."
    )
    max_new_tokens: int = HfArg(default=256, help="Longest generated response, in tokens.")
    generation_batch_size: int = HfArg(default=32, help="Prompts per batch of generation.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"max_new_tokens": 1})

    def generation_limits(self) -> dict[str, int]:
        """Keyword arguments of `evaluate_generations`."""
        return {"max_new_tokens": self.max_new_tokens, "batch_size": self.generation_batch_size}


@can_be_resumed()
def main(
    config_class: type[PreferenceConfig] = PreferenceConfig,
    trainer_class: type[PreferenceTrainer] = PreferenceTrainer,
) -> None:
    """Train on preference pairs, compare the policy with its base, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            OfflineArguments,
            config_class,
            config=config_class._method or "preference",
            description=config_class.__doc__,
            name=lambda training: training.loss.rpartition(":")[2],
        )
        arguments, training = run.arguments, run.training
        splits = load_rows(arguments, training.seed)
        held_out = optional_split(splits, "eval_split", arguments, "held-out pairs will not be evaluated")
        prompts = optional_split(splits, "prompt_split", arguments, "generations will not be evaluated")
        trainer = run.load_trainer(trainer_class, train_dataset=splits[arguments.train_split], eval_dataset=held_out)
        if held_out is not None:
            remember_base(trainer)
        evaluation = evaluate_generations(trainer, prompts, arguments, **arguments.generation_limits())
    run.open(trainer)
    show_generations(trainer, evaluation, arguments, arguments.generation_eval_every)

    run.train(trainer)

    pairs = None
    if trainer.eval_dataset is not None:
        batch_size = training.per_device_eval_batch_size
        scores = score_pairs(trainer, trainer.eval_dataset, batch_size=batch_size, progress=True)
        pairs = pair_metrics(scores)
        if trainer.accelerator.is_main_process:
            write_pair_scores(run.folder / "scores.jsonl", held_out["row_id"], scores)
    described = {"loss": training.loss, "objective": trainer.objective.describe()}
    end_with_results(run, trainer, evaluation, pairs=pairs, train_pairs=len(trainer.train_dataset), **described)


def write_pair_scores(path: Path, row_ids: Sequence[str], scores: PreferenceScores) -> None:
    """Write the log-probability of each response, in nats, under the policy and under its base."""
    sides = {
        "chosen_log_prob": scores.chosen,
        "rejected_log_prob": scores.rejected,
        "base_chosen_log_prob": scores.ref_chosen,
        "base_rejected_log_prob": scores.ref_rejected,
    }
    rows = zip(row_ids, *[values.tolist() for values in sides.values()], strict=True)
    write_json_lines(path, [dict(zip(("row_id", *sides), row, strict=True)) for row in rows])


# ---- Demonstrations ----


@dataclass
class DemonstrationArguments(OfflineArguments):
    """Demonstrations to train on, in addition to the data for evaluation."""

    train_split: str = HfArg(
        default="train_prefs",
        help="Pairs, whose chosen responses are learned, or prompts with reference_response_text.",
    )
    demonstrations: str | None = HfArg(
        default=None, help="A .jsonl file of prompt and completion to learn instead, as best_of_n.py --keep writes it."
    )
    eval_split: str = HfArg(default="validation_prefs", help="Held-out demonstrations, for their loss, or none.")
    num_examples: int | None = HfArg(default=None, help="Train on the first so many. Default: all.")
    max_prompt_tokens: int | None = HfArg(default=None, help="Longer prompts of the evaluation lose their beginning.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"num_examples": 1, "max_prompt_tokens": 1})


def refuse_completions(arguments: DemonstrationArguments) -> None:
    """Reject a file of prompts with completions as a benchmark, because its completions would be dropped."""
    path = Path(arguments.dataset_name)
    if not path.is_file():
        return
    first = next((row for _, row in read_jsonl(path).rows), {})
    if "completion" in first and "label" not in first:
        raise ValueError(
            f"{path} holds prompts and completions: give it as --demonstrations {path}, and as --dataset_name what to "
            "evaluate on"
        )


def load_demonstrations(arguments: DemonstrationArguments, splits) -> tuple[Dataset, Dataset | None]:
    """The demonstrations to train on and, if there are any, the held-out ones."""
    source, rows = arguments.train_split, splits[arguments.train_split]
    if arguments.demonstrations is not None:
        source = arguments.demonstrations
        rows = Dataset.from_list(convert_file(source, "prompt_completion", skip_bad_rows=arguments.skip_bad_rows))
    held_out = optional_split(splits, "eval_split", arguments, "the loss on held-out responses will not be computed")
    if held_out is not None:
        held_out = demonstrations(held_out, arguments.eval_split)
    return demonstrations(rows, source, arguments.num_examples), held_out


def demonstrations(rows, split: str, count: int | None = None) -> Dataset:
    """The first `count` rows (None for all) with `row_id`, `prompt` and `completion`."""
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


def shared_prompts(train: Dataset, prompts) -> int:
    trained = {json.dumps(prompt) for prompt in train["prompt"]}
    return sum(json.dumps(prompt) in trained for prompt in prompts["prompt"])
