"""The end of a training run: the files that it writes and the table that it prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from trl_ext.evaluation import plot_run
from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.reporting.model_card import results_section
from trl_ext.evaluation.reporting.plots import PREFERENCE_PANELS
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import write_json, write_json_lines
from trl_ext.held_out.generations import GenerationEvaluation
from trl_ext.rollouts import end_processes
from trl_ext.runs import RECIPES
from trl_ext.runs.arguments import MENDABLE_IN_TRAINING, one_line_errors
from trl_ext.runs.folder import RESULT_FILES
from trl_ext.runs.training_run import TrainingRun
from trl_ext.trainers.callbacks import read_metrics

SFT_PANELS = {
    "Loss (nats per token)": {"train": "loss", "held out": "eval_loss"},
    "KL to the base (nats per response)": {"sampled responses": "kl"},
    "Response length (tokens)": {"policy": "completions/mean_length"},
}
DIAGNOSTICS = {
    "mean_tokens": "mean length (tokens)",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "unique_token_ratio": "unique-token ratio",
    "dominant_token_fraction": "dominant-token fraction",
    "repetition": "repeated 4-grams",
    "empty_fraction": "empty responses",
    "truncated_fraction": "cut at the token limit",
}
ACCURACIES = {"summed": "summed log-prob", "mean": "mean log-prob", "reference_corrected": "log-ratio"}
OUTCOMES = {"candidate": "   (the policy wins)", "base": "   (the base wins)", "tie": "   (a tie)"}


def end_with_results(
    run: TrainingRun,
    trainer,
    evaluation: GenerationEvaluation | None,
    *,
    pairs: dict[str, Any] | None = None,
    panels: dict[str, dict[str, str]] = PREFERENCE_PANELS,
    **described: Any,
) -> None:
    """Compare the policy with its base, write and print the results, and shut the processes down.

    `evaluation` is on held-out prompts, `pairs` are preference metrics of held-out pairs, and `described` are the
    recipe's own entries in the description of the run, including `objective`.
    """
    with one_line_errors(MENDABLE_IN_TRAINING):
        comparison = None if evaluation is None else evaluation.compare(run.arguments.num_eval_prompts, progress=True)
    if trainer.accelerator.is_main_process:
        summary, rows = ({}, []) if comparison is None else (comparison.summary, comparison.rows)
        results = {"run": describe_run(trainer, run.describe(**described)), "preferences": pairs}
        results |= {name: summary.get(name) for name in ("win_rate", "score", "rewards", "kl", "generations")}
        if rows:
            write_json_lines(run.folder / "generations.jsonl", rows)
        write_results(
            trainer,
            results,
            lambda metrics, path: plot_run(metrics, results, path, panels),
            lambda: _show(results, rows),
        )
    end_processes(trainer.accelerator)


def write_results(
    trainer, results: dict[str, Any], plot: Callable[[list[dict], Path], None], show: Callable[[], None]
) -> None:
    """Write `results.json`, the model card and `report.png` into the run folder, and print the results.

    `plot` draws `report.png` from the rows of `metrics.jsonl` and a path, and `show` prints the tables.
    """
    folder = Path(trainer.args.output_dir)
    write_json(folder / "results.json", results)
    trainer.card_results = results_section(results)
    trainer.create_model_card()
    with drawing("report.png"):
        plot(read_metrics(folder / "metrics.jsonl"), folder / "report.png")
    run = results["run"]
    print(f"\n{run['objective']}, model {run['model']}, data {run['dataset']}, {run['optimizer_steps']} steps")
    show()
    say_written(run, trainer.args.output_dir, RESULT_FILES)


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Skip a plot with a message, instead of failing, if matplotlib is missing."""
    try:
        yield
    except ImportError as error:
        print(f"{name} was not drawn: {error}")


def describe_run(trainer, run: dict[str, Any]) -> dict[str, Any]:
    """The description of a run, with rounded times and its trainer's own entries."""
    seconds = {name: round(run[name], 1) for name in ("training_seconds", "total_seconds")}
    script = Path(sys.argv[0])
    recipe = {"recipe": script.stem} if (RECIPES / script.name).is_file() else {}
    return {
        **recipe,
        **run,
        **seconds,
        "optimizer_steps": trainer.state.global_step,
        "seed": trainer.args.seed,
        **describe_machine(trainer.accelerator),
    }


def describe_machine(accelerator) -> dict[str, Any]:
    """The processes, their device, and the versions of the libraries."""
    versions = {name: version(name) for name in ("trl_ext", "trl", "transformers", "torch", "peft")}
    return {"processes": accelerator.num_processes, "device": accelerator.device.type, "versions": versions}


def say_written(run: Mapping[str, Any], output_dir: str | Path, files: Sequence[str]) -> None:
    """Print the times of a run and the files that it wrote."""
    training = f" in all, {run['training_seconds']:.0f} s of training" if "training_seconds" in run else ""
    names = ", ".join(name for name in files if (Path(output_dir) / name).exists())
    print(f"\n{run['total_seconds']:.0f} s{training}; in {output_dir}: {names}")


def estimate(found: Mapping[str, float], name: str = "mean", digits: int = 3) -> str:
    """A figure and its interval, formatted for a table."""
    return f"{Estimate(found[name], found['low'], found['high']):.{digits}f}"


def figure(value: float | None) -> str:
    """A figure formatted for a table."""
    return "-" if value is None else f"{value:.3f}"


def _show(results: dict[str, Any], generations: list[dict[str, Any]]) -> None:
    """Print one table of figures, and three responses with the base's: a win, a loss and a tie."""
    rows = list(_rows(results))
    if rows:
        print(f"\n{format_table(('', 'base', 'policy'), rows)}")
    else:
        print("\nno held-out rows to evaluate on; metrics.jsonl has what was logged in training")
    firsts = list({row.get("outcome"): row for row in reversed(generations)}.values())
    for row in [*firsts, *(row for row in generations if row not in firsts)][:3]:
        print(f"\nprompt: {shorten(row['prompt_text'], 100)}{OUTCOMES.get(row.get('outcome'), '')}")
        print(f"  base: {shorten(row['base_response_text'], 400) or '(empty)'}")
        print(f"  policy: {shorten(row['response_text'], 400) or '(empty)'}")
    if generations and all(row["response_text"] == row["base_response_text"] for row in generations):
        print(f"\nthe policy's and the base's responses are identical, all {len(generations)} of them")
    if results["win_rate"] is None and generations:
        print("\nno win rate: only the embedded benchmark comes with a judge; generations.jsonl holds both responses")


def _rows(results: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The rows of the table: label, figure of the base, figure of the policy."""
    if results["win_rate"] is not None:
        for label, rule in (("win rate, ties as half", "half"), ("win rate, ties dropped", "agreed")):
            rate = results["win_rate"][rule]
            yield label, "", f"{estimate(rate, 'rate') if rate['n'] else '-'}  n {rate['n']}"
    score = results["score"]
    if score is not None:
        yield "ground-truth score", figure(score["base"]), figure(score["policy"])
        yield "  gain", "", estimate(score["gain"])
    for name, reward in (results["rewards"] or {}).items():
        yield f"reward, {name}", figure(reward.get("base")), figure(reward.get("policy"))
        for key, label in (("gain", "  gain"), ("gain_over_reference", "  gain over the reference responses")):
            if key in reward:
                yield label, "", estimate(reward[key])
    if results["preferences"] is not None:
        before, after = results["preferences"]["before"], results["preferences"]["after"]
        for key, label in ACCURACIES.items():
            base, own = figure(before[key]["accuracy"]) if key in before else "", after[key]
            # If the model has not moved, every log-ratio is a tie, and an accuracy of 0 would be misleading.
            yield f"held-out accuracy, {label}", base, "-" if own["ties"] == after["n"] else estimate(own, "accuracy")
    if results["kl"] is not None:
        yield "KL to the base (nats per response)", "", estimate(results["kl"], digits=2)
    if results["generations"] is not None:
        base, policy = results["generations"]["base"], results["generations"]["policy"]
        for key, label in DIAGNOSTICS.items():
            yield label, figure(base[key]), figure(policy[key])
        yield "collapsed", *("yes" if model["collapsed"] else "no" for model in (base, policy))
        for reason in policy["collapse_reasons"]:
            yield "", "", reason
