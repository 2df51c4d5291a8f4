"""A run's results: the files it leaves and the table it prints."""

from __future__ import annotations

import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_ext.evaluation import PolicyComparison, plot_run
from trl_ext.evaluation.plots import PREFERENCE_PANELS
from trl_ext.files import write_json, write_json_lines
from trl_ext.trainers.callbacks import read_metrics


def write_results(
    trainer,
    comparison: PolicyComparison | None,
    pairs: dict[str, Any] | None,
    run: dict[str, Any],
    panels: dict[str, dict[str, str]] = PREFERENCE_PANELS,
) -> dict[str, Any]:
    """Write `generations.jsonl`, `results.json` and `report.png` into the run folder; returns the results.

    Args:
        trainer: what was trained.
        comparison: of the policy with its base; None if there was none.
        pairs: preference metrics of held-out pairs; None if there are none.
        run: what was run, with `objective`, `model`, `dataset`, `training_seconds` and `total_seconds`.
        panels: of the plot.
    """
    folder = Path(trainer.args.output_dir)
    summary = {} if comparison is None else comparison.summary
    results = {
        "run": describe_run(trainer, run),
        "win_rate": summary.get("win_rate"),
        "score": summary.get("score"),
        "rewards": summary.get("rewards"),
        "preferences": pairs,
        "kl": summary.get("kl"),
        "generations": summary.get("generations"),
    }
    if comparison is not None:
        write_json_lines(folder / "generations.jsonl", comparison.rows)
    write_json(folder / "results.json", results)
    trainer.create_model_card()
    try:
        plot_run(read_metrics(folder / "metrics.jsonl"), results, folder / "report.png", panels)
    except ImportError as error:
        print(f"report.png was not drawn: {error}")
    return results


def describe_run(trainer, run: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run, with its times rounded, and what its trainer knows of it."""
    seconds = {name: round(run[name], 1) for name in ("training_seconds", "total_seconds")}
    script = Path(sys.argv[0])
    recipe = {"recipe": script.stem} if (Path(__file__).parent / script.name).is_file() else {}
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
    """Print one table of the figures, and three responses beside the base's: a win, a loss and a tie."""
    run = results["run"]
    print(f"\n{run['objective']}, model {run['model']}, data {run['dataset']}, {run['optimizer_steps']} steps")
    rows = [
        row for section in (_win_rate, _score, _rewards, _preferences, _kl, _diagnostics) for row in section(results)
    ]
    if rows:
        width = max(len(name) for name, _, _ in rows)
        print(f"\n{'':{width}}  {'base':>10}  policy")
        print("-" * (width + 45))
        for name, base, policy in rows:
            print(f"{name:{width}}  {base:>10}  {policy}")
    else:
        print("\nno held-out rows to evaluate on; metrics.jsonl has what was logged in training")
    _print_samples(_three(generations))
    if results["win_rate"] is None and generations:
        print("\nno win rate: only the embedded benchmark comes with a judge; generations.jsonl holds both responses")
    files = ("results.json", "generations.jsonl", "metrics.jsonl", "config.yaml", "report.png")
    names = ", ".join(name for name in files if (Path(output_dir) / name).exists())
    print(
        f"\n{run['total_seconds']:.0f} s in all, {run['training_seconds']:.0f} s of training; in {output_dir}: {names}"
    )


def _interval(value: float, low: float, high: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}  [{low:.{digits}f}, {high:.{digits}f}]"


def _win_rate(results):
    win_rate = results["win_rate"]
    if win_rate is None:
        return
    for label, rule in (("win rate, ties as half", "half"), ("win rate, ties dropped", "agreed")):
        interval = win_rate[rule]
        figure = _interval(interval["rate"], interval["low"], interval["high"]) if interval["n"] else "-"
        yield label, "", f"{figure}  n {interval['n']}"


def _score(results):
    score = results["score"]
    if score is not None:
        yield "ground-truth score", f"{score['base']:.3f}", f"{score['policy']:.3f}"
        yield "  gain", "", _interval(score["gain"]["mean"], score["gain"]["low"], score["gain"]["high"])


def _rewards(results):
    for name, reward in (results["rewards"] or {}).items():
        base, policy = (_figure(reward.get(source)) for source in ("base", "policy"))
        yield f"reward, {name}", base, policy
        for key, label in (("gain", "  gain"), ("gain_over_reference", "  gain over the reference responses")):
            if key in reward:
                yield label, "", _interval(reward[key]["mean"], reward[key]["low"], reward[key]["high"])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _preferences(results):
    if results["preferences"] is None:
        return
    before, after = results["preferences"]["before"], results["preferences"]["after"]
    for key, label in (("summed", "summed log-prob"), ("mean", "mean log-prob"), ("reference_corrected", "log-ratio")):
        base = f"{before[key]['accuracy']:.3f}" if key in before else ""
        own = after[key]
        # Where the model has not moved, every log-ratio is a tie, and an accuracy of 0 would mislead.
        figure = "-" if own["ties"] == after["n"] else _interval(own["accuracy"], own["low"], own["high"])
        yield f"held-out accuracy, {label}", base, figure


def _kl(results):
    if results["kl"] is not None:
        kl = results["kl"]
        yield "KL to the base (nats per response)", "", _interval(kl["mean"], kl["low"], kl["high"], digits=2)


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
        values = (model[key] for model in (base, policy))
        yield (label, *("" if value is None else f"{value:.3f}" for value in values))
    yield "collapsed", *("yes" if model["collapsed"] else "no" for model in (base, policy))
    for reason in policy["collapse_reasons"]:
        yield "", "", reason


def _three(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first prompt that the policy wins, the first that the base wins, and the first tie; else the first three."""
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
