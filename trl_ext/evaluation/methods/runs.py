"""Run folders of several methods and seeds, read for comparison: values per prompt, and each run's cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from trl_ext.evaluation.reporting.results import Results, read_results
from trl_ext.files import read_yaml

# The value of a row of generations.jsonl for a win rate, with ties as half.
CREDITS = {"candidate": 1.0, "tie": 0.5, "base": 0.0}
METRICS = ("score", "win_rate")
# Settings that differ between runs of one method over several seeds.
OF_THE_SEED = ("seed", "data_seed", "output_dir", "run_name", "reward_model")
# How settings begin that change neither what is learned nor the responses.
WITHOUT_EFFECT = (
    *("output_dir", "run_name", "logging_dir", "report_to", "hub_", "push_to_hub", "project", "trackio_"),
    *("generation_eval_every", "logging_", "num_kl_prompts", "save_"),
)
# The number of samples that a run learned from, and their unit.
_SAMPLES = {"sampled_responses": "sampled responses", "train_pairs": "pairs", "train_responses": "labelled responses"}


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
    """Read a finished run.

    Raises:
        FileNotFoundError: there are no results or no responses to held-out prompts.
        ValueError: the run has another seed.
    """
    folder = Path(folder)
    config, generations = folder / "config.yaml", folder / "generations.jsonl"
    results = read_results(folder / "results.json")
    if results.run.seed != seed:
        raise ValueError(f"{folder}: results.json is of seed {results.run.seed}, not {seed}")
    if not generations.is_file():
        raise FileNotFoundError(f"no file {generations}: the run was not evaluated on held-out prompts")
    rows = map(json.loads, generations.read_text(encoding="utf-8").splitlines())
    settings = read_yaml(config) if config.is_file() else {}
    return MethodRun(method, seed, folder, results, settings or {}, {row["row_id"]: row for row in rows})


def check_alike(runs: Sequence[MethodRun]) -> None:
    """Reject runs that cannot be compared.

    Raises:
        ValueError: the model, benchmark or prompts differ from the first run's, or seeds of a method have different
            settings.
    """
    first = runs[0]
    settings: dict[str, MethodRun] = {}
    for run in runs:
        for name in ("model", "dataset"):
            own, other = (getattr(one.results.run, name) for one in (run, first))
            if own != other:
                raise ValueError(f"{run.folder} has the {name} {own!r} and {first.folder} {other!r}: compare alike")
        odd = sorted(run.rows.keys() ^ first.rows.keys())
        if odd:
            raise ValueError(f"{run.folder} and {first.folder} were evaluated on different prompts, such as {odd[0]}")
        alike = settings.setdefault(run.method, run)
        digests = [one.results.run.settings_digest for one in (run, alike)]
        if digests[0] != digests[1] and (odd := _odd_settings(run.settings, alike.settings)):
            raise ValueError(
                f"{run.folder} and {alike.folder} are of one method and differ in more than their seed: {odd}"
            )


def _odd_settings(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Settings in which two runs of a method differ in more than the seed."""
    if not own or not other:
        return "no config.yaml"
    names = sorted((own.keys() | other.keys()).difference(OF_THE_SEED))
    odd = [name for name in names if own.get(name) != other.get(name) and not name.startswith(WITHOUT_EFFECT)]
    return ", ".join(odd)


def choose_metric(runs: Iterable[MethodRun], wanted: str | None = None) -> str:
    """The requested metric, or the first of `METRICS` that the runs have.

    Raises:
        ValueError: no run has the metric, or none has any.
    """
    runs = list(runs)
    for metric in [wanted] if wanted else METRICS:
        if all(any(_value(row, metric) is not None for row in run.rows.values()) for run in runs):
            return metric
    lacking = f"no {wanted!r}" if wanted else "neither a score nor an outcome"
    raise ValueError(f"the runs have {lacking} for their prompts: --metric names a number in their generations.jsonl")


def metric_values(runs: Sequence[MethodRun], metric: str) -> tuple[dict[tuple[str, int], numpy.ndarray], int]:
    """Values by (method, seed), in the same order of prompts, and how many prompts were left out.

    A prompt that lacks a value in any run is left out for all.

    Raises:
        ValueError: no prompt has a value in every run.
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


def budget(run: MethodRun) -> dict[str, Any]:
    """The cost of a run: `samples` with their `unit`, `optimizer_steps`, `training_seconds`, and `reward_seconds`.

    Samples are the rows of all optimizer steps, or sampled responses. `reward_seconds` is the duration of its reward
    models' runs, 0 without reward models. Unknown values are None.
    """
    about = run.results.run
    name = next((name for name in _SAMPLES if getattr(about, name) is not None), None)
    samples = None if name is None else getattr(about, name)
    if samples is not None and name != "sampled_responses":
        samples = _rows_seen(run, samples)
    rewards = [_reward_seconds(run.folder, Path(path)) for path in about.reward_models or []]
    return {
        "samples": samples,
        "unit": None if name is None else _SAMPLES[name],
        "optimizer_steps": about.optimizer_steps,
        "training_seconds": about.training_seconds,
        "reward_seconds": None if None in rewards else math.fsum(rewards),
    }


def _rows_seen(run: MethodRun, rows: int) -> int | None:
    """The number of rows that a run over `rows` rows learned from, counting repeats.

    The last step of each epoch is smaller than the others. None if the settings of the run are unknown.
    """
    steps = run.results.run.optimizer_steps
    sizes = [run.settings.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    sizes.append(run.results.run.processes)
    if steps is None or None in sizes:
        return None
    batch, micro_batch = math.prod(sizes), sizes[0] * sizes[2]
    if run.settings.get("dataloader_drop_last"):
        rows = rows // micro_batch * micro_batch
    epochs, rest = divmod(steps, max(math.ceil(rows / batch), 1))
    return epochs * rows + rest * batch


def mean_budget(budgets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over a method's seeds; None for values that are unknown for any of them."""
    mean: dict[str, Any] = {"unit": budgets[0]["unit"]}
    for name in ("samples", "optimizer_steps", "training_seconds", "reward_seconds"):
        values = [one[name] for one in budgets]
        mean[name] = None if None in values else math.fsum(values) / len(values)
    return mean


def inequalities(budgets: Mapping[str, Mapping[str, Any]], runs: Sequence[MethodRun]) -> list[str]:
    """Sentences on differences between the methods in budget, decoding and devices."""
    notes = []
    units: dict[str, list[str]] = {}
    for method, one in budgets.items():
        units.setdefault(one["unit"] or "unknown", []).append(method)
    if len(units) > 1:
        kinds = "; ".join(f"{unit}: {', '.join(methods)}" for unit, methods in units.items())
        notes.append(f"Samples are not of one kind ({kinds}).")
    for unit, methods in units.items():
        notes += _unequal(f"{unit} learned from", {method: budgets[method]["samples"] for method in methods}, 1.01)
    notes += _unequal("optimizer steps", {method: one["optimizer_steps"] for method, one in budgets.items()}, 1.01)
    seconds = {method: _total_seconds(one) for method, one in budgets.items()}
    notes += _unequal("seconds of training, with reward models", seconds, 1.25)
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


def _unequal(what: str, values: Mapping[str, float | None], factor: float) -> list[str]:
    known = {method: value for method, value in values.items() if value is not None}
    if len(known) < 2 or max(known.values()) <= factor * min(known.values()):
        return []
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    return [f"Unequal budgets, {what}: {known[least]:,.0f} ({least}) to {known[most]:,.0f} ({most})."]


def _total_seconds(one: Mapping[str, Any]) -> float | None:
    parts = [one["training_seconds"], one["reward_seconds"]]
    return None if None in parts else math.fsum(parts)


def max_new_tokens(run: MethodRun) -> int | None:
    """Maximum response length of the evaluation, which has one of its own only if training does not sample."""
    return run.settings.get("max_new_tokens", run.settings.get("max_completion_length"))


def _decoding(run: MethodRun) -> str:
    return f"temperature {run.settings.get('generation_temperature')} and at most {max_new_tokens(run)} tokens"


def _reward_seconds(folder: Path, path: Path) -> float | None:
    """Duration of a reward model's run, found at its recorded path, or else next to this run."""
    for place in (path, folder.parent / path.name):
        if (place / "results.json").is_file():
            return read_results(place / "results.json").run.training_seconds
    return None


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    if metric == "win_rate":
        return CREDITS.get(str(row.get("outcome")))
    value = row.get(metric)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
