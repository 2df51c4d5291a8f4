"""Results of a reward model's run: the files it leaves and the table it prints."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import describe_run

from trl_ext.evaluation import plot_reward_run, reward_metrics, reward_mistakes, true_order_metrics
from trl_ext.evaluation.judge import last_user_text
from trl_ext.files import write_json, write_json_lines
from trl_ext.trainers.callbacks import read_metrics


def write_reward_results(
    trainer,
    run: dict[str, Any],
    held_out,
    scores: tuple[Sequence[float], Sequence[float]] | None,
    selection: dict[str, Any] | None,
    *,
    true_score: Callable[[str, str], float] | None,
    num_mistakes: int,
) -> dict[str, Any]:
    """Write scores, mistakes, `results.json` and `report.png` into the run folder; returns the results.

    Args:
        trainer: what was trained.
        run: what was run, with `training_seconds` and `total_seconds`.
        held_out: rows of the held-out pairs; None if there are none.
        scores: of their chosen and of their rejected responses.
        selection: what chose the checkpoint that was scored and saved; None for the last one.
        true_score: `f(prompt_text, response)`, a known quality; None for none.
        num_mistakes: most rows of `reward_mistakes.jsonl`.
    """
    folder = Path(trainer.args.output_dir)
    run["weights"] = "last" if selection is None else f"checkpoint-{selection['step']}"
    results = {"run": describe_run(trainer, run), "selection": selection, "pairs": None, "true_order": None}
    margins: list[float] = []
    if scores is not None:
        chosen, rejected = ([float(score) for score in side] for side in scores)
        margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
        results["pairs"] = reward_metrics(chosen, rejected)
        if true_score is not None:
            results["true_order"] = true_order_metrics(chosen, rejected, *_true_scores(held_out, true_score))
        rows = zip(held_out["row_id"], chosen, rejected, margins, strict=True)
        keys = ("row_id", "chosen_score", "rejected_score", "margin")
        write_json_lines(folder / "scores.jsonl", [dict(zip(keys, row, strict=True)) for row in rows])
        mistakes = reward_mistakes(held_out, chosen, rejected, num_mistakes)
        write_json_lines(folder / "reward_mistakes.jsonl", mistakes)
    write_json(folder / "results.json", results)
    trainer.create_model_card()
    title = f"{run['objective']}, model {run['model']}, data {run['dataset']}"
    try:
        metrics = read_metrics(folder / "metrics.jsonl")
        plot_reward_run(metrics, results["pairs"], margins, folder / "report.png", title=title)
    except ImportError as error:
        print(f"report.png was not drawn: {error}")
    return results


def _true_scores(rows, true_score: Callable[[str, str], float]) -> tuple[list[float], list[float]]:
    prompts = [last_user_text(prompt) for prompt in rows["prompt"]]
    chosen, rejected = (
        [true_score(prompt, response[0]["content"]) for prompt, response in zip(prompts, rows[side], strict=True)]
        for side in ("chosen", "rejected")
    )
    return chosen, rejected


def print_reward_results(results: dict[str, Any], output_dir: str) -> None:
    """Print the checkpoints that were compared, and the figures of the one that is kept."""
    run = results["run"]
    print(f"\n{run['objective']}, model {run['model']}, data {run['dataset']}, {run['optimizer_steps']} steps")
    if results["selection"] is not None:
        _print_checkpoints(results["selection"])
    rows = [*_pairs(results), *_true_order(results)]
    if rows:
        width = max(len(name) for name, _ in rows)
        print(f"\nheld-out pairs, {run['eval_split']}, {run['weights']}")
        print("-" * (width + 40))
        for name, figure in rows:
            print(f"{name:{width}}  {figure}")
    files = ("results.json", "scores.jsonl", "reward_mistakes.jsonl", "metrics.jsonl", "config.yaml", "report.png")
    names = ", ".join(name for name in files if (Path(output_dir) / name).exists())
    print(f"\n{run['total_seconds']:.0f} s in all, {run['training_seconds']:.0f} s of training")
    print(textwrap.fill(f"in {output_dir}: the reward model ({run['weights']}), {names}", 119))


def _print_checkpoints(selection: dict[str, Any]) -> None:
    criterion = selection["criterion"]
    if criterion == "calibration":
        criterion = "calibration (lowest negative log-likelihood)"
    print(f"\ncheckpoints by {criterion} on {selection['n']} pairs of {selection['split']}")
    names = [name for name in selection["checkpoints"][0] if name != "step"]
    print("  ".join(f"{name:>9}" for name in ("step", *names)))
    for entry in selection["checkpoints"]:
        figures = "  ".join(f"{entry[name]:9.3f}" for name in names)
        kept = "  <- kept in best/" if entry["step"] == selection["step"] else ""
        print(f"{entry['step']:9}  {figures}{kept}")


def _pairs(results):
    pairs = results["pairs"]
    if pairs is None:
        return
    interval = f"[{pairs['low']:.3f}, {pairs['high']:.3f}]"
    ties = f", {pairs['ties']} ties" if pairs["ties"] else ""
    yield "accuracy", f"{pairs['accuracy']:.3f}  {interval}  n {pairs['n']}{ties}"
    yield "mean margin", f"{pairs['margin']:.3f}"
    yield "negative log-likelihood", f"{pairs['nll']:.3f}  (0.693 where nothing is known)"
    yield "Brier score", f"{pairs['brier']:.3f}  (0.250 where nothing is known)"
    yield f"ECE, {len(pairs['calibration'])} bins", f"{pairs['ece']:.3f}"


def _true_order(results):
    order = results["true_order"]
    if order is not None and order["n"]:
        interval = f"[{order['low']:.3f}, {order['high']:.3f}]"
        yield "accuracy, true order", f"{order['accuracy']:.3f}  {interval}  n {order['n']}, {order['ties']} ties"
        yield "  of the labels", f"{order['label_agreement']:.3f}"
