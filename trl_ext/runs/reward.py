"""Pairs, the choice of a checkpoint and the figures of a reward model, as `recipes/reward_model.py` uses them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from trl_ext.data.benchmark import known_score
from trl_ext.evaluation import reward_metrics, true_order_metrics
from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.files import write_json_lines
from trl_ext.processes import warn_once_per_run
from trl_ext.runs.finish import estimate
from trl_ext.runs.loading import missing_split
from trl_ext.runs.training_run import TrainingRun
from trl_ext.trainers import RewardConfig, RewardTrainer
from trl_ext.trainers.context import PAIRS, check_dataset


def training_pairs(pairs, arguments, seed: int):
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


def find_selection_split(benchmark, arguments, training: RewardConfig) -> str | None:
    """The name of the split for choosing a checkpoint; None, with the reason printed, if none is chosen."""
    if not training.load_best_model_at_end:
        return None
    wanted = (arguments.selection_split,) if arguments.selection_split else ("validation_prefs", arguments.eval_split)
    name = next((name for name in wanted if name in benchmark), None)
    if name is None and arguments.selection_split:
        raise missing_split(benchmark, "selection_split", arguments)
    if name is None:
        training.load_best_model_at_end = False
        warn_once_per_run("there are no pairs to choose a checkpoint by: the last weights are kept")
        return None
    if name == arguments.eval_split:
        warn_once_per_run(
            f"the checkpoint is chosen on {name}: its figures are therefore no longer held out, but a little too good"
        )
    check_dataset("selection_split", benchmark[name], PAIRS)
    return name


def kept_checkpoint(trainer: RewardTrainer, split: str) -> dict[str, Any] | None:
    """The checkpoint whose weights the trainer has loaded; None if no checkpoint was saved at an evaluation."""
    state, metric = trainer.state, trainer.args.metric_for_best_model
    if state.best_model_checkpoint is None:
        return None
    step = int(Path(state.best_model_checkpoint).name.rpartition("-")[2])
    kept = {"step": step, "metric": metric, "value": state.best_metric}
    return {**kept, "split": split, "n": len(trainer.eval_dataset)}


def describe_objective(training: RewardConfig, arguments) -> str:
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


def evaluate_reward_model(run: TrainingRun, trainer, pairs, held_out) -> dict[str, Any]:
    """The figures on the held-out pairs; writes scores.jsonl.

    `pairs` are the rows of `held_out` as the trainer prepared them; None without pairs.
    """
    results: dict[str, Any] = {"pairs": None, "true_order": None}
    if pairs is None:
        return results
    scores = trainer.score_pairs(pairs, progress="held-out pairs")
    chosen, rejected = ([float(score) for score in side] for side in scores)
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    results["pairs"] = reward_metrics(chosen, rejected)
    true_score = known_score(run.arguments.dataset_name)
    if true_score is not None:
        prompts = [last_user_text(prompt) for prompt in held_out["prompt"]]
        sides = [[response[0]["content"] for response in held_out[side]] for side in ("chosen", "rejected")]
        true = [list(map(true_score, prompts, texts)) for texts in sides]
        results["true_order"] = true_order_metrics(chosen, rejected, *true)
    if trainer.accelerator.is_main_process:
        rows = zip(held_out["row_id"], chosen, rejected, margins, strict=True)
        keys = ("row_id", "chosen_score", "rejected_score", "margin")
        write_json_lines(run.folder / "scores.jsonl", [dict(zip(keys, row, strict=True)) for row in rows])
    return results


def show_reward_model(results: dict[str, Any]) -> None:
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
