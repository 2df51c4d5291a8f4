"""The results of a policy's run: the files that it writes and the table that it prints."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_ext.evaluation import PolicyComparison, plot_run
from trl_ext.evaluation.command_line import format_interval, format_table
from trl_ext.evaluation.reporting.model_card import results_section
from trl_ext.evaluation.reporting.plots import PREFERENCE_PANELS
from trl_ext.files import write_json, write_json_lines
from trl_ext.held_out.generations import GenerationEvaluation
from trl_ext.rollouts import end_processes
from trl_ext.runs import RECIPES
from trl_ext.runs.arguments import MENDABLE_IN_TRAINING, one_line_errors
from trl_ext.runs.training_run import TrainingRun
from trl_ext.trainers.callbacks import read_metrics

SFT_PANELS = {
    "Loss (nats per token)": {"train": "loss", "held out": "eval_loss"},
    "KL to the base (nats per response)": {"sampled responses": "kl"},
    "Response length (tokens)": {"policy": "completions/mean_length"},
}
FILES = ("results.json", "generations.jsonl", "metrics.jsonl", "config.yaml", "report.png")


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

    Args:
        run: the recipe's run, after training.
        trainer: the trainer after training.
        evaluation: evaluation on held-out prompts; None for none.
        pairs: preference metrics of held-out pairs; None for none.
        panels: panels of the plot.
        described: the recipe's own entries in the description of the run, including `objective`.
    """
    with one_line_errors(MENDABLE_IN_TRAINING):
        comparison = None if evaluation is None else evaluation.compare(run.arguments.num_eval_prompts, progress=True)
    if trainer.accelerator.is_main_process:
        results = _write_results(trainer, comparison, pairs, run.describe(**described), panels)
        print_results(results, [] if comparison is None else comparison.rows, run.training.output_dir)
    end_processes(trainer.accelerator)


def _write_results(trainer, comparison: PolicyComparison | None, pairs, run: dict[str, Any], panels) -> dict[str, Any]:
    """Write `generations.jsonl`, `results.json` and `report.png` into the run folder; return the results."""
    folder = Path(trainer.args.output_dir)
    summary = {} if comparison is None else comparison.summary
    results = {"run": describe_run(trainer, run), "preferences": pairs}
    results |= {name: summary.get(name) for name in ("win_rate", "score", "rewards", "kl", "generations")}
    if comparison is not None:
        write_json_lines(folder / "generations.jsonl", comparison.rows)
    write_json(folder / "results.json", results)
    trainer.card_results = results_section(results)
    trainer.create_model_card()
    with drawing("report.png"):
        plot_run(read_metrics(folder / "metrics.jsonl"), results, folder / "report.png", panels)
    return results


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
        "processes": trainer.accelerator.num_processes,
        "device": trainer.accelerator.device.type,
        "versions": {name: version(name) for name in ("trl_ext", "trl", "transformers", "torch", "peft")},
    }


def print_results(results: dict[str, Any], generations: list[dict[str, Any]], output_dir: str) -> None:
    """Print one table of figures, and three responses next to the base's: a win, a loss and a tie."""
    run = results["run"]
    print(f"\n{run['objective']}, model {run['model']}, data {run['dataset']}, {run['optimizer_steps']} steps")
    rows = [
        row for section in (_win_rate, _score, _rewards, _preferences, _kl, _diagnostics) for row in section(results)
    ]
    if rows:
        print(f"\n{format_table(('', 'base', 'policy'), rows)}")
    else:
        print("\nno held-out rows to evaluate on; metrics.jsonl has what was logged in training")
    _print_samples(_three(generations))
    if results["win_rate"] is None and generations:
        print("\nno win rate: only the embedded benchmark comes with a judge; generations.jsonl holds both responses")
    say_written(run, output_dir, FILES)


def say_written(run: Mapping[str, Any], output_dir: str | Path, files: Sequence[str]) -> None:
    """Print the times of a run and the files that it wrote."""
    training = f" in all, {run['training_seconds']:.0f} s of training" if "training_seconds" in run else ""
    names = ", ".join(name for name in files if (Path(output_dir) / name).exists())
    print(f"\n{run['total_seconds']:.0f} s{training}; in {output_dir}: {names}")


def _interval(estimate: Mapping[str, float], name: str = "mean", digits: int = 3) -> str:
    return format_interval(estimate[name], estimate["low"], estimate["high"], digits)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _win_rate(results):
    if results["win_rate"] is not None:
        for label, rule in (("win rate, ties as half", "half"), ("win rate, ties dropped", "agreed")):
            interval = results["win_rate"][rule]
            yield label, "", f"{_interval(interval, 'rate') if interval['n'] else '-'}  n {interval['n']}"


def _score(results):
    score = results["score"]
    if score is not None:
        yield "ground-truth score", f"{score['base']:.3f}", f"{score['policy']:.3f}"
        yield "  gain", "", _interval(score["gain"])


def _rewards(results):
    for name, reward in (results["rewards"] or {}).items():
        base, policy = (_figure(reward.get(source)) for source in ("base", "policy"))
        yield f"reward, {name}", base, policy
        for key, label in (("gain", "  gain"), ("gain_over_reference", "  gain over the reference responses")):
            if key in reward:
                yield label, "", _interval(reward[key])


def _preferences(results):
    if results["preferences"] is None:
        return
    before, after = results["preferences"]["before"], results["preferences"]["after"]
    for key, label in (("summed", "summed log-prob"), ("mean", "mean log-prob"), ("reference_corrected", "log-ratio")):
        base = f"{before[key]['accuracy']:.3f}" if key in before else ""
        own = after[key]
        # If the model has not moved, every log-ratio is a tie, and an accuracy of 0 would be misleading.
        figure = "-" if own["ties"] == after["n"] else _interval(own, "accuracy")
        yield f"held-out accuracy, {label}", base, figure


def _kl(results):
    if results["kl"] is not None:
        yield "KL to the base (nats per response)", "", _interval(results["kl"], digits=2)


def _diagnostics(results):
    if results["generations"] is None:
        return
    base, policy = results["generations"]["base"], results["generations"]["policy"]
    for key, label in (
        ("mean_tokens", "mean length (tokens)"),
        ("distinct_1", "distinct-1"),
        ("distinct_2", "distinct-2"),
        ("unique_token_ratio", "unique-token ratio"),
        ("dominant_token_fraction", "dominant-token fraction"),
        ("repetition", "repeated 4-grams"),
        ("empty_fraction", "empty responses"),
        ("truncated_fraction", "cut at the token limit"),
    ):
        yield label, _figure(base[key]), _figure(policy[key])
    yield "collapsed", *("yes" if model["collapsed"] else "no" for model in (base, policy))
    for reason in policy["collapse_reasons"]:
        yield "", "", reason


def _three(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first prompt that the policy wins, the first that it loses, and the first tie; else the first three."""
    firsts = [next((r for r in rows if r.get("outcome") == o), None) for o in ("candidate", "base", "tie")]
    chosen = [row for row in firsts if row is not None]
    return (chosen + [row for row in rows if row not in chosen])[:3]


def _print_samples(rows: list[dict[str, Any]]) -> None:
    column = 50
    for row in rows:
        prompt = textwrap.shorten(row["prompt_text"], 100)
        outcome = {"candidate": "   (the policy wins)", "base": "   (the base wins)", "tie": "   (a tie)"}.get(
            row.get("outcome"), ""
        )
        print(f"\nprompt: {prompt}{outcome}")
        left, right = (
            textwrap.wrap(text, column)[:8] or ["(empty)"]
            for text in ("base: " + row["base_response_text"], "policy: " + row["response_text"])
        )
        for index in range(max(len(left), len(right))):
            pair = [lines[index] if index < len(lines) else "" for lines in (left, right)]
            print(f"  {pair[0]:{column}}  {pair[1]}".rstrip())
