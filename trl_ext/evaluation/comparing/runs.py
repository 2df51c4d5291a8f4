"""Run folders of several methods and seeds, read for comparison: values per prompt, and what differs between them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from trl_ext.evaluation.reporting.results import Results, read_results
from trl_ext.evaluation.statistics.win_rate import OUTCOME_VALUES
from trl_ext.files import read_yaml

METRICS = ("score", "win_rate")
# Settings that differ between runs of one method over several seeds.
OF_THE_SEED = ("seed", "data_seed", "output_dir", "run_name", "reward_model")
# How settings begin that change neither what is learned nor the responses.
WITHOUT_EFFECT = (
    *("output_dir", "run_name", "logging_dir", "report_to", "hub_", "push_to_hub", "project", "trackio_"),
    *("generation_eval_every", "logging_", "num_kl_prompts", "save_"),
)


@dataclass(frozen=True)
class MethodRun:
    """One method on one seed.

    Attributes:
        method, seed: the run's method and seed.
        folder: its folder.
        results: its results.json.
        settings: its config.yaml; empty if missing.
        rows: its generations.jsonl, by row_id.
    """

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


def choose_metric(runs: Iterable[MethodRun], wanted: str | None = None) -> str:
    """The requested metric, or the first of `METRICS` that the runs have."""
    runs = list(runs)
    for metric in [wanted] if wanted else METRICS:
        if all(any(_value(row, metric) is not None for row in run.rows.values()) for run in runs):
            return metric
    lacking = f"no {wanted!r}" if wanted else "neither a score nor an outcome"
    raise ValueError(f"the runs have {lacking} for their prompts: --metric names a number in their generations.jsonl")


def metric_values(runs: Sequence[MethodRun], metric: str) -> tuple[dict[tuple[str, int], numpy.ndarray], int]:
    """Values by (method, seed), in the same order of prompts, and how many prompts were left out.

    A prompt that lacks a value in any run is left out for all.
    """
    row_ids = [
        row_id for row_id in runs[0].rows if all(_value(run.rows.get(row_id, {}), metric) is not None for run in runs)
    ]
    if not row_ids:
        raise ValueError(f"no prompt has a {metric} in every run")
    values = {
        (run.method, run.seed): numpy.array([_value(run.rows[row_id], metric) for row_id in row_ids]) for run in runs
    }
    return values, len(runs[0].rows) - len(row_ids)


def mean_by_method(runs: Iterable[MethodRun], name: str) -> dict[str, float | None]:
    """The mean over seeds of a field of `RunInfo`; None if it is unknown for any of them."""
    by_method: dict[str, list[float | None]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(getattr(run.results.run, name))
    return {method: None if None in values else statistics.fmean(values) for method, values in by_method.items()}


def inequalities(runs: Sequence[MethodRun]) -> list[str]:
    """Sentences on differences between the runs in steps, training time, decoding and devices."""
    notes = []
    of_runs = ("optimizer steps", "optimizer_steps", 1.01), ("seconds of training", "training_seconds", 1.25)
    for what, name, factor in of_runs:
        known = {method: mean for method, mean in mean_by_method(runs, name).items() if mean is not None}
        least, most = (pick(known, key=known.__getitem__, default=None) for pick in (min, max))
        if known and known[most] > factor * known[least]:
            notes.append(f"Unequal {what}: {known[least]:,.0f} ({least}) to {known[most]:,.0f} ({most}).")
    for what, of in (
        ("decoding of the evaluation", _decoding),
        ("device", lambda run: run.results.run.device),
        ("precision", lambda run: "bfloat16" if run.settings.get("bf16") else "float32"),
        ("number of processes", lambda run: run.results.run.processes),
    ):
        kinds = sorted({str(of(run)) for run in runs})
        if len(kinds) > 1:
            notes.append(f"Not all runs have the same {what}: {' and '.join(kinds)}.")
    return notes


def _decoding(run: MethodRun) -> str:
    # The evaluation has a limit of its own only if training does not sample.
    limit = run.settings.get("max_new_tokens", run.settings.get("max_completion_length"))
    return f"temperature {run.settings.get('generation_temperature')} and at most {limit} tokens"


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    if metric == "win_rate":
        return OUTCOME_VALUES.get(str(row.get("outcome")))
    value = row.get(metric)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
