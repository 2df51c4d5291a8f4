"""Training a reward model: on pairs, with the best checkpoint chosen on one split and evaluated on another."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from common import one_line_errors
from reward_results import print_reward_results, write_reward_results
from run_folder import begin_run
from training import ModelArguments, can_be_resumed, load_pairs
from transformers import AutoModelForCausalLM

from trl_ext import RewardConfig, RewardTrainer, toy
from trl_ext.data import encode_turn
from trl_ext.evaluation.judge import last_user_text
from trl_ext.models import resolve_model_path
from trl_ext.rollouts import end_processes, generate_responses
from trl_ext.trainers.defaults import is_main_process, warn_once_per_run
from trl_ext.trainers.reward_selection import CheckpointSelection, ScoredSamples

DEFAULT_SELECTION_SPLIT = "validation_prefs"


@dataclass
class RewardArguments:
    """Data, evaluation and output of a run."""

    dataset_name: str = field(
        default="toy", metadata={"help": "toy, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."}
    )
    train_split: str = field(default="train_prefs", metadata={"help": "Pairs to train on."})
    eval_split: str = field(default="test_prefs", metadata={"help": "Held-out pairs; not evaluated if missing."})
    selection_split: str | None = field(
        default=None,
        metadata={
            "help": "Pairs by which the best checkpoint is chosen. Default: validation_prefs where there is one, "
            "else eval_split."
        },
    )
    best_of_n: int = field(
        default=4, metadata={"help": "From how many samples the model picks, for select_best best_of_n."}
    )
    samples_per_prompt: int = field(
        default=8, metadata={"help": "Responses sampled for each prompt, for select_best best_of_n."}
    )
    num_train_pairs: int | None = field(
        default=None, metadata={"help": "Train on the first so many pairs. Default: all."}
    )
    label_noise: float = field(
        default=0.0, metadata={"help": "Share of the training pairs whose labels are turned round, for a weak model."}
    )
    num_mistakes: int = field(default=50, metadata={"help": "Most held-out pairs in reward_mistakes.jsonl."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop bad rows and say how many and why."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in output_dir."})

    def __post_init__(self):
        if not 1 <= self.best_of_n <= self.samples_per_prompt:
            raise ValueError(
                f"best_of_n must lie between 1 and samples_per_prompt {self.samples_per_prompt}, got {self.best_of_n}"
            )
        if self.num_mistakes < 0:
            raise ValueError(f"num_mistakes must be at least 0, got {self.num_mistakes}")
        if self.num_train_pairs is not None and self.num_train_pairs < 1:
            raise ValueError(f"num_train_pairs must be at least 1, got {self.num_train_pairs}")
        if not 0 <= self.label_noise <= 1:
            raise ValueError(f"label_noise must lie between 0 and 1, got {self.label_noise}")


@can_be_resumed()
def main() -> None:
    """Read the arguments, train, choose a checkpoint, evaluate it, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            RewardArguments,
            RewardConfig,
            config="reward_model",
            description="Train a reward model on preference pairs.",
            name=lambda training: "reward-model",
        )
        arguments, training = run.arguments, run.training
        benchmark = load_pairs(arguments.dataset_name, arguments.train_split, skip_bad_rows=arguments.skip_bad_rows)
        held_out = _split(benchmark, arguments.eval_split, arguments, "held-out pairs will not be evaluated")
        selection_split = _selection_split(benchmark, arguments, training)
        train = training_pairs(benchmark[arguments.train_split], arguments, training.seed)
        trainer = run.load_trainer(RewardTrainer, train_dataset=train, eval_dataset=held_out)
        selection = None
        if selection_split is not None:
            pairs = benchmark[selection_split]
            samples = _samples(trainer, pairs, arguments, run.model) if training.select_best == "best_of_n" else None
            selection = CheckpointSelection(trainer, pairs, samples=samples)
    run.open(trainer)
    if selection is not None:
        trainer.add_callback(selection)

    run.train(trainer, save=False)
    with one_line_errors():
        selected = None if selection is None else selection.load_best(split=selection_split)
    trainer.save_model(training.output_dir)

    scores = None
    if held_out is not None:
        scores = trainer.score_pairs(trainer.eval_dataset, progress="held-out pairs")
    if trainer.accelerator.is_main_process:
        results = write_reward_results(
            trainer,
            run.describe(
                objective=_objective(training, arguments),
                train_pairs=len(trainer.train_dataset),
                label_noise=arguments.label_noise,
                eval_split=None if held_out is None else arguments.eval_split,
            ),
            held_out,
            scores,
            selected,
            true_score=toy.score if arguments.dataset_name == "toy" else None,
            num_mistakes=arguments.num_mistakes,
        )
        print_reward_results(results, training.output_dir)
    end_processes(trainer.accelerator)


def training_pairs(pairs, arguments: RewardArguments, seed: int):
    """The first pairs that are asked for, with a share of the labels turned round: always round(share * pairs).

    Raises:
        ValueError: there are not so many.
    """
    count = arguments.num_train_pairs
    if count is not None and count > len(pairs):
        raise ValueError(f"num_train_pairs {count}: {arguments.train_split!r} has {len(pairs)} pairs")
    pairs = pairs.select(range(len(pairs) if count is None else count))
    if not arguments.label_noise:
        return pairs
    turned = set(random.Random(seed).sample(range(len(pairs)), round(arguments.label_noise * len(pairs))))

    def turn(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {"chosen": row["rejected"], "rejected": row["chosen"]} if index in turned else {}

    return pairs.map(turn, with_indices=True, desc="Label noise")


def _split(benchmark, name: str, arguments: RewardArguments, consequence: str):
    """A split of pairs, or None with a line that says what follows."""
    if name not in benchmark:
        warn_once_per_run(f"{arguments.dataset_name} has no split {name!r}: {consequence}")
        return None
    if "chosen" not in benchmark[name].column_names:
        raise ValueError(
            f"the split {name!r} holds prompts and no pairs: it has {', '.join(benchmark[name].features)}"
        )
    return benchmark[name]


def _selection_split(benchmark, arguments: RewardArguments, training: RewardConfig) -> str | None:
    """The name of the split to choose a checkpoint by; None, with the reason, where none is chosen."""
    if training.select_best is None:
        return None
    if training.save_strategy == "no":
        warn_once_per_run("save_strategy is no, so there are no checkpoints to choose from: the last weights are kept")
        return None
    if arguments.selection_split is not None:
        if arguments.selection_split not in benchmark:
            raise ValueError(
                f"{arguments.dataset_name} has no split {arguments.selection_split!r} to choose a checkpoint by: it "
                f"has {', '.join(benchmark)}; name one with --selection_split"
            )
        _split(benchmark, arguments.selection_split, arguments, "")
        return arguments.selection_split
    if DEFAULT_SELECTION_SPLIT in benchmark:
        return DEFAULT_SELECTION_SPLIT
    if arguments.eval_split in benchmark:
        warn_once_per_run(
            f"{arguments.dataset_name} has no split {DEFAULT_SELECTION_SPLIT!r}: the checkpoint is chosen on "
            f"{arguments.eval_split}, whose figures are therefore no longer held out, but a little too good"
        )
        return arguments.eval_split
    warn_once_per_run("there are no pairs to choose a checkpoint by: the last weights are kept")
    return None


def _samples(trainer: RewardTrainer, pairs, arguments: RewardArguments, model: ModelArguments) -> ScoredSamples:
    """Responses of the base model to the prompts of the pairs, with their known scores."""
    if arguments.dataset_name != "toy":
        raise ValueError(
            "select_best best_of_n needs a known score of every response, which only toy has: choose accuracy, margin "
            "or calibration"
        )
    generator = AutoModelForCausalLM.from_pretrained(resolve_model_path(model.model_name_or_path), dtype="float32")
    generator.to(trainer.accelerator.device)
    count, tokenizer = arguments.samples_per_prompt, trainer.processing_class
    prompts = [prompt for prompt in pairs["prompt"] for _ in range(count)]
    responses = generate_responses(
        generator,
        tokenizer,
        prompts,
        max_new_tokens=toy.MAX_NEW_TOKENS,
        temperature=1.0,
        batch_size=100,
        seed=trainer.args.seed,
        progress="samples for the selection" if is_main_process() else None,
    )
    sequences, gold = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = encode_turn(
            tokenizer,
            prompt,
            response.text,
            finished=response.finished,
            max_prompt_tokens=trainer.args.max_prompt_tokens,
            max_response_tokens=trainer.args.max_response_tokens,
        )
        sequences.append([*ids[0], *ids[1]])
        gold.append(toy.score(last_user_text(prompt), response.text, finished=response.finished))
    starts = range(0, len(prompts), count)
    return ScoredSamples(
        sequences=[sequences[start : start + count] for start in starts],
        gold=[gold[start : start + count] for start in starts],
        n=arguments.best_of_n,
    )


def _objective(training: RewardConfig, arguments: RewardArguments) -> str:
    """The loss and those of its options that are on."""
    options: dict[str, Any] = {
        "margin": training.margin_column,
        "margin scale": training.margin_scale if training.margin_scale != 1 else None,
        "label smoothing": training.label_smoothing or None,
        "centring": training.center_rewards_coefficient or None,
        "pairs": arguments.num_train_pairs,
        "label noise": arguments.label_noise or None,
    }
    given = ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    return f"Bradley-Terry ({given})" if given else "Bradley-Terry"
