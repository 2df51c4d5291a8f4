"""Runs of several methods and seeds, compared on the same prompts: compare.json, and its tables in compare.md."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pandas

from trl_ext.evaluation.command_line import markdown_table
from trl_ext.evaluation.reporting.results import Results, read_results
from trl_ext.evaluation.statistics.crossed import compare_with_baseline, crossed_mean
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.evaluation.statistics.win_rate import OUTCOME_VALUES
from trl_ext.files import read_yaml, write_json, write_text

METRICS = ("score", "win_rate")
# Settings that differ between runs of one method over several seeds.
OF_THE_SEED = ("seed", "data_seed", "output_dir", "run_name", "reward_model")
# How settings begin that change neither what is learned nor the responses.
WITHOUT_EFFECT = (
    *("output_dir", "run_name", "logging_dir", "report_to", "hub_", "push_to_hub", "project", "trackio_"),
    *("generation_eval_every", "logging_", "num_kl_prompts", "save_"),
)


_WHAT_IT_SAYS = (
    "Intervals are 95% and cover other prompts and other seeds (crossed random effects, t quantiles mixed as by "
    "Cochran and Cox). Differences are paired by prompt and seed; each interval is of one comparison, and the verdict "
    "follows p-values adjusted for all comparisons (Holm). With two or three seeds, verdicts on many methods whose "
    "seeds differ much are a little too certain."
)
_UNTUNED = "This comparison searched no settings: a verdict is on the methods with the settings that they were given."


@dataclass(frozen=True)
class MethodRun:
    """One method on one seed: its results.json, its config.yaml (empty if missing), and its generations by row_id."""

    method: str
    seed: int
    folder: Path
    results: Results
    settings: dict[str, Any]
    rows: dict[str, dict[str, Any]]


def read_method_run(folder: str | Path, method: str, seed: int) -> MethodRun:
    """Read a finished run; ValueError if it is of another seed."""
    folder = Path(folder)
    config, generations = folder / "config.yaml", folder / "generations.jsonl"
    results = read_results(folder / "results.json")
    if results.run.seed != seed:
        raise ValueError(f"{folder}: results.json is of seed {results.run.seed}, not {seed}")
    rows = map(json.loads, generations.read_text(encoding="utf-8").splitlines())
    settings = read_yaml(config) if config.is_file() else {}
    return MethodRun(method, seed, folder, results, settings or {}, {row["row_id"]: row for row in rows})


def check_alike(runs: Sequence[MethodRun]) -> None:
    """Reject runs of another model, benchmark or prompts, and seeds of a method that have different settings."""
    first, of_method = runs[0], {}
    for run in runs:
        for name in ("model", "dataset"):
            own, other = (getattr(one.results.run, name) for one in (run, first))
            if own != other:
                raise ValueError(f"{run.folder} has the {name} {own!r} and {first.folder} {other!r}: compare alike")
        if odd := sorted(run.rows.keys() ^ first.rows.keys()):
            raise ValueError(f"{run.folder} and {first.folder} were evaluated on different prompts, such as {odd[0]}")
        alike = of_method.setdefault(run.method, run)
        if run.results.run.settings_digest == alike.results.run.settings_digest:
            continue
        own, other = run.settings, alike.settings
        names = sorted((own.keys() | other.keys()).difference(OF_THE_SEED))
        odd = [name for name in names if own.get(name) != other.get(name) and not name.startswith(WITHOUT_EFFECT)]
        if odd or not own or not other:
            odd = ", ".join(odd) if own and other else "no config.yaml"
            raise ValueError(
                f"{run.folder} and {alike.folder} are of one method and differ in more than their seed: {odd}"
            )


def metric_values(runs: Sequence[MethodRun], wanted: str | None = None) -> tuple[str, pandas.DataFrame]:
    """The wanted metric, or the first of `METRICS` that all runs have, and its values.

    The values have a row for each prompt and a column for each method and seed, and are NaN where a run has none.
    """
    for metric in [wanted] if wanted else METRICS:
        columns = {
            (run.method, run.seed): {row_id: _value(row, metric) for row_id, row in run.rows.items()} for run in runs
        }
        values = pandas.DataFrame(columns, dtype=float)
        if values.notna().any().all():
            return metric, values
    lacking = f"no {wanted!r}" if wanted else "neither a score nor an outcome"
    raise ValueError(f"the runs have {lacking} for their prompts: --metric names a number in their generations.jsonl")


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    if metric == "win_rate":
        return OUTCOME_VALUES.get(str(row.get("outcome")))
    value = row.get(metric)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


# ---- Figures and tables ----


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
    metric, values = metric_values(runs, metric)
    # A method that fails on hard prompts does not win by it.
    complete = values.dropna()
    if complete.empty:
        raise ValueError(f"no prompt has a {metric} in every run")

    def of(method: str, seeds: Iterable[int]) -> numpy.ndarray:
        return numpy.stack([complete[method, seed] for seed in seeds], axis=1)

    shared = {
        method: sorted(own.keys() & by_method[baseline].keys())
        for method, own in by_method.items()
        if method != baseline
    }
    compared = {method: (of(method, seeds), of(baseline, seeds)) for method, seeds in shared.items() if seeds}
    seeds = {method: ", ".join(map(str, sorted(own))) for method, own in by_method.items()}
    left_out = len(values) - len(complete)
    found = [f"{left_out} prompts lack a value in some run, and are left out for all."] if left_out else []
    if len(set(seeds.values())) > 1:
        listed = "; ".join(f"{method}: {own}" for method, own in seeds.items())
        found.append(f"Methods do not have the same seeds ({listed}); each is compared on those it shares.")
    found += [f"{name} shares no seed with the baseline and is not compared." for name in shared if not shared[name]]
    return {
        "metric": metric,
        "baseline": baseline,
        "model": runs[0].results.run.model or "",
        "dataset": runs[0].results.run.dataset or "",
        "prompts": len(complete),
        "methods": [
            {
                "method": method,
                "objective": next(iter(own.values())).results.run.objective or "",
                "by_seed": {str(seed): float(complete[method, seed].to_numpy().mean()) for seed in own},
                **dataclasses.asdict(crossed_mean(of(method, own))),
                **{name: _mean_of(own.values(), name) for name in ("optimizer_steps", "training_seconds")},
            }
            for method, own in by_method.items()
        ],
        "comparisons": [
            {"method": method, "paired_seeds": shared[method], **dataclasses.asdict(difference)}
            for method, difference in compare_with_baseline(compared).items()
        ],
        "notes": [*notes, _UNTUNED, *found],
    }


def _mean_of(runs: Iterable[MethodRun], name: str) -> float | None:
    """The mean of a field of `RunInfo`; None if it is unknown for any run."""
    values = [getattr(run.results.run, name) for run in runs]
    return None if None in values else statistics.fmean(values)


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
