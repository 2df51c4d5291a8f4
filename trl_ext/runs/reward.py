"""Training a reward model on pairs, with the best checkpoint chosen on one split and evaluated on another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext.data.benchmark import known_score
from trl_ext.evaluation import plot_run, reward_metrics, reward_mistakes, true_order_metrics
from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.reporting.plots import REWARD_PANELS
from trl_ext.files import write_json_lines
from trl_ext.processes import warn_once_per_run
from trl_ext.rollouts import end_processes
from trl_ext.runs.arguments import one_line_errors
from trl_ext.runs.loading import EVAL_FRACTION, can_be_resumed, check_fraction, load_rows, optional_split
from trl_ext.runs.results import describe_run, estimate, write_results
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import RewardConfig, RewardTrainer
from trl_ext.trainers.context import PAIRS, check_dataset
from trl_ext.trainers.defaults import check_at_least

DEFAULT_SELECTION_SPLIT = "validation_prefs"


@dataclass
class RewardArguments:
    """Data, evaluation and output of a run."""

    dataset_name: str = HfArg(default="toy", help="toy, a folder of {split}.jsonl, one .jsonl file, or a hub dataset.")
    train_split: str = HfArg(default="train_prefs", help="Pairs to train on.")
    eval_split: str = HfArg(default="test_prefs", help="Held-out pairs; none for no evaluation.")
    selection_split: str | None = HfArg(
        default=None,
        help="Pairs by which the best checkpoint is chosen. Default: validation_prefs where there is one, "
        "else eval_split.",
    )
    num_train_pairs: int | None = HfArg(default=None, help="Train on the first so many pairs. Default: all.")
    label_noise: float = HfArg(default=0.0, help="Fraction of the training labels to flip, for a weak model.")
    num_mistakes: int = HfArg(default=50, help="Most held-out pairs in reward_mistakes.jsonl.")
    eval_fraction: float | None = HfArg(default=None, help=EVAL_FRACTION)
    skip_bad_rows: bool = HfArg(default=False, help="Drop bad rows and say how many and why.")
    overwrite_output_dir: bool = HfArg(default=False, help="Replace an earlier run in output_dir.")

    def __post_init__(self):
        check_at_least(self, {"num_mistakes": 0, "num_train_pairs": 1})
        check_fraction(self.eval_fraction)
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
        benchmark = load_rows(arguments, training.seed)
        held_out = optional_split(benchmark, "eval_split", arguments, "held-out pairs will not be evaluated")
        if held_out is not None:
            check_dataset("eval_dataset", held_out, PAIRS)
        selection_split = _selection_split(benchmark, arguments, training)
        train = training_pairs(benchmark[arguments.train_split], arguments, training.seed)
        evaluated = held_out if selection_split is None else benchmark[selection_split]
        trainer = run.load_trainer(RewardTrainer, train_dataset=train, eval_dataset=evaluated)
        pairs = trainer.eval_dataset
        if selection_split is not None:
            prepare, about = trainer._prepare_dataset, (trainer.processing_class, training, "eval")
            pairs = None if held_out is None else prepare(held_out, *about)
    run.open(trainer)
    run.train(trainer)
    selected = None if selection_split is None else _selection(trainer, selection_split)

    scores = None
    if pairs is not None:
        scores = trainer.score_pairs(pairs, progress="held-out pairs")
    if trainer.accelerator.is_main_process:
        described = run.describe(
            objective=_objective(training, arguments),
            train_pairs=len(trainer.train_dataset),
            label_noise=arguments.label_noise,
            eval_split=None if held_out is None else arguments.eval_split,
            weights="last" if selected is None else f"checkpoint-{selected['step']}",
        )
        results = {"run": describe_run(trainer, described), "selection": selected, "pairs": None, "true_order": None}
        margins: list[float] = []
        if scores is not None:
            true_score = known_score(arguments.dataset_name)
            found, margins = evaluate_scores(run.folder, held_out, scores, true_score, arguments.num_mistakes)
            results |= found
        write_results(
            trainer,
            results,
            lambda metrics, path: plot_run(metrics, results, path, REWARD_PANELS, margins),
            lambda: _show(results),
        )
    end_processes(trainer.accelerator)


def training_pairs(pairs, arguments: RewardArguments, seed: int):
    """The first pairs, as many as requested, with exactly round(share * pairs) labels flipped."""
    count = len(pairs) if arguments.num_train_pairs is None else arguments.num_train_pairs
    if count > len(pairs):
        raise ValueError(f"num_train_pairs {count}: {arguments.train_split!r} has {len(pairs)} pairs")
    pairs = pairs.select(range(count))
    if not arguments.label_noise:
        return pairs
    flipped = set(random.Random(seed).sample(range(count), round(arguments.label_noise * count)))

    def flip(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {"chosen": row["rejected"], "rejected": row["chosen"]} if index in flipped else {}

    return pairs.map(flip, with_indices=True, desc="Label noise")


def _selection_split(benchmark, arguments: RewardArguments, training: RewardConfig) -> str | None:
    """The name of the split for choosing a checkpoint; None, with the reason printed, if none is chosen."""
    if not training.load_best_model_at_end:
        return None
    name = arguments.selection_split
    if name is not None and name not in benchmark:
        raise ValueError(
            f"{arguments.dataset_name} has no split {name!r} to choose a checkpoint by: it has "
            f"{', '.join(benchmark)}; name one with --selection_split"
        )
    if name is None and DEFAULT_SELECTION_SPLIT in benchmark:
        name = DEFAULT_SELECTION_SPLIT
    elif name is None and arguments.eval_split in benchmark:
        name = arguments.eval_split
        warn_once_per_run(
            f"{arguments.dataset_name} has no split {DEFAULT_SELECTION_SPLIT!r}: the checkpoint is chosen on {name}, "
            "whose figures are therefore no longer held out, but a little too good"
        )
    if name is None:
        training.load_best_model_at_end = False
        warn_once_per_run("there are no pairs to choose a checkpoint by: the last weights are kept")
    else:
        check_dataset("selection_split", benchmark[name], PAIRS)
    return name


def _selection(trainer: RewardTrainer, split: str) -> dict[str, Any] | None:
    """The checkpoint whose weights the trainer has loaded; None if no checkpoint was saved at an evaluation."""
    state, metric = trainer.state, trainer.args.metric_for_best_model
    if state.best_model_checkpoint is None:
        return None
    step = int(Path(state.best_model_checkpoint).name.rpartition("-")[2])
    value = next(
        entry[f"eval_{metric}"] for entry in state.log_history if entry["step"] == step and f"eval_{metric}" in entry
    )
    return {"step": step, "metric": metric, "value": value, "split": split, "n": len(trainer.eval_dataset)}


def _objective(training: RewardConfig, arguments: RewardArguments) -> str:
    """The loss and the options that are on."""
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


# ---- Results ----


def evaluate_scores(
    folder: Path,
    held_out,
    scores: tuple[Sequence[float], Sequence[float]],
    true_score: Callable[[str, str], float] | None,
    num_mistakes: int,
) -> tuple[dict[str, Any], list[float]]:
    """Write the scores and the mistakes into the run folder; return the results and each pair's margin.

    `scores` are those of the chosen and of the rejected responses, and `true_score` is `f(prompt_text, response)`, a
    known quality.
    """
    chosen, rejected = ([float(score) for score in side] for side in scores)
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    results: dict[str, Any] = {"pairs": reward_metrics(chosen, rejected)}
    if true_score is not None:
        prompts = [last_user_text(prompt) for prompt in held_out["prompt"]]
        sides = [[response[0]["content"] for response in held_out[side]] for side in ("chosen", "rejected")]
        true = [list(map(true_score, prompts, texts)) for texts in sides]
        results["true_order"] = true_order_metrics(chosen, rejected, *true)
    rows = zip(held_out["row_id"], chosen, rejected, margins, strict=True)
    keys = ("row_id", "chosen_score", "rejected_score", "margin")
    write_json_lines(folder / "scores.jsonl", [dict(zip(keys, row, strict=True)) for row in rows])
    write_json_lines(folder / "reward_mistakes.jsonl", reward_mistakes(held_out, chosen, rejected, num_mistakes))
    return results, margins


def _show(results: dict[str, Any]) -> None:
    """Print which checkpoint was kept, and its figures."""
    run, selected, pairs, order = (results[name] for name in ("run", "selection", "pairs", "true_order"))
    if selected is not None:
        kept = "step {step}, by {metric} {value:.3f} on {n} pairs of {split}".format(**selected)
        print(f"\nkept the checkpoint of {kept}")
    if pairs is None:
        return
    ties = f", {pairs['ties']} ties" if pairs["ties"] else ""
    rows = [
        ("accuracy", f"{estimate(pairs, 'accuracy')}  n {pairs['n']}{ties}"),
        ("mean margin", f"{pairs['margin']:.3f}"),
        ("negative log-likelihood", f"{pairs['nll']:.3f}  (0.693 where nothing is known)"),
        ("Brier score", f"{pairs['brier']:.3f}  (0.250 where nothing is known)"),
        (f"ECE, {len(pairs['calibration'])} bins", f"{pairs['ece']:.3f}"),
    ]
    if order is not None and order["n"]:
        rows.append(("accuracy, true order", f"{estimate(order, 'accuracy')}  n {order['n']}, {order['ties']} ties"))
        rows.append(("  of the labels", f"{order['label_agreement']:.3f}"))
    header = (f"held-out pairs, {run['eval_split']}, {run['weights']}", "")
    print(f"\n{format_table(header, rows)}")
