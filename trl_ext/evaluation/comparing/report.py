"""The comparison of methods as files: compare.json, and its tables in compare.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from trl_ext.evaluation.command_line import markdown_table
from trl_ext.evaluation.comparing.runs import (
    MethodRun,
    check_alike,
    choose_metric,
    inequalities,
    mean_by_method,
    metric_values,
)
from trl_ext.evaluation.statistics.crossed import compare_with_baseline, crossed_mean
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import write_json, write_text

_WHAT_IT_SAYS = (
    "Intervals are 95% and cover other prompts and other seeds (crossed random effects, t quantiles mixed as by "
    "Cochran and Cox). Differences are paired by prompt and seed; each interval is of one comparison, and the verdict "
    "follows p-values adjusted for all comparisons (Holm). With two or three seeds, verdicts on many methods whose "
    "seeds differ much are a little too certain."
)
_UNTUNED = "This comparison searched no settings: a verdict is on the methods with the settings that they were given."


def compare_runs(
    runs: Sequence[MethodRun],
    baseline: str,
    *,
    metric: str | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare finished runs, as JSON-ready figures.

    Args:
        runs: runs of all methods and seeds; methods are reported in this order.
        baseline: the method with which each other method is compared, on the seeds that both have.
        metric: `score`, `win_rate` (ties as half) or a number in generations.jsonl; None for the first available one.
        notes: additional sentences.
    """
    by_method: dict[str, dict[int, MethodRun]] = {}
    for run in runs:
        by_method.setdefault(run.method, {})[run.seed] = run
    if baseline not in by_method:
        raise ValueError(f"no finished run of the baseline {baseline!r}, only of {', '.join(by_method) or 'nothing'}")
    check_alike(runs)
    metric = choose_metric(runs, metric)
    values, left_out = metric_values(runs, metric)
    shared = {
        method: sorted(own.keys() & by_method[baseline].keys())
        for method, own in by_method.items()
        if method != baseline
    }
    compared = {
        method: tuple(numpy.stack([values[name, seed] for seed in seeds], axis=1) for name in (method, baseline))
        for method, seeds in shared.items()
        if seeds
    }
    seeds = {method: ", ".join(map(str, sorted(own))) for method, own in by_method.items()}
    found = [f"{left_out} prompts lack a value in some run, and are left out for all."] if left_out else []
    if len(set(seeds.values())) > 1:
        listed = "; ".join(f"{method}: {own}" for method, own in seeds.items())
        found.append(f"Methods do not have the same seeds ({listed}); each is compared on those it shares.")
    found += [f"{name} shares no seed with the baseline and is not compared." for name in shared if not shared[name]]
    steps, seconds = (mean_by_method(runs, name) for name in ("optimizer_steps", "training_seconds"))
    return {
        "metric": metric,
        "baseline": baseline,
        "model": runs[0].results.run.model or "",
        "dataset": runs[0].results.run.dataset or "",
        "prompts": len(next(iter(values.values()))),
        "methods": [
            {
                "method": method,
                "objective": next(iter(own.values())).results.run.objective or "",
                "by_seed": {str(seed): float(values[method, seed].mean()) for seed in own},
                **dataclasses.asdict(crossed_mean(numpy.stack([values[method, seed] for seed in own], axis=1))),
                "optimizer_steps": steps[method],
                "training_seconds": seconds[method],
            }
            for method, own in by_method.items()
        ],
        "comparisons": [
            {"method": method, "paired_seeds": shared[method], **dataclasses.asdict(difference)}
            for method, difference in compare_with_baseline(compared).items()
        ],
        "notes": [*notes, _UNTUNED, *found, *inequalities(runs)],
    }


def write_comparison(summary: Mapping[str, Any], folder: str | Path) -> list[str]:
    """Write compare.json and compare.md; return the names."""
    write_json(Path(folder) / "compare.json", summary)
    write_text(Path(folder) / "compare.md", render(summary))
    return ["compare.json", "compare.md"]


def render(summary: Mapping[str, Any]) -> str:
    """The comparison in Markdown."""
    title = f"# {_metric(summary)} by method: {summary['model']} on {summary['dataset']}, {summary['prompts']} prompts"
    parts = [title, markdown_table(*method_table(summary))]
    if summary["comparisons"]:
        parts += [f"## Against {summary['baseline']}", markdown_table(*difference_table(summary))]
    parts += ["## To keep in mind", "\n".join(f"- {note}" for note in summary["notes"])]
    return "\n\n".join(part.strip() for part in [*parts, _WHAT_IT_SAYS]) + "\n"


def method_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: each method with its mean, steps and training time."""
    header = ["method", "seeds", _metric(summary), "lowest and highest seed", "steps", "training (s)"]
    rows = []
    for one in summary["methods"]:
        means, spent = one["by_seed"].values(), (Estimate(one[n]) for n in ("optimizer_steps", "training_seconds"))
        mean, spread = Estimate(one["mean"], one["low"], one["high"]), f"{min(means):.3f} to {max(means):.3f}"
        rows.append([one["method"], one["seeds"], f"{mean:.3f}", spread, *(f"{value:,.0f}" for value in spent)])
    return header, rows


def difference_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: each comparison with the baseline."""
    rows = []
    for one in summary["comparisons"]:
        found = one["difference"]
        p_values = ("< 0.001" if one[name] < 0.001 else f"{one[name]:.3f}" for name in ("p_value", "adjusted_p_value"))
        difference = f"{Estimate(found['mean'], found['low'], found['high']):+.4f}"
        rows.append([one["method"], difference, *p_values, one["verdict"]])
    return ["method", "difference", "p", "p, Holm", "verdict"], rows


def _metric(summary: Mapping[str, Any]) -> str:
    return "win rate, ties as half" if summary["metric"] == "win_rate" else str(summary["metric"])
