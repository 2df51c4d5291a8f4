"""Run folders as read by the report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trl_ext.evaluation.reporting.results import RESULTS_NAME, Logged, Response, Results, first_fault, read_results

Row = TypeVar("Row", bound=BaseModel)
Faults = list[dict[str, str]]


@dataclass(frozen=True)
class Run:
    """A finished run, with the readable parts of its files.

    Attributes:
        label: its path below the folder that holds all runs.
        folder: its folder.
        results: its `results.json`.
        metrics: rows of `metrics.jsonl`, by step; None stands for a value that is not finite.
        generations: rows of `generations.jsonl`.
        problems: the parts that could not be read, each as `file` and `problem`.
    """

    label: str
    folder: Path
    results: Results
    metrics: list[dict[str, Any]] = field(default_factory=list)
    generations: list[Response] = field(default_factory=list)
    problems: Faults = field(default_factory=list)

    @property
    def trains_reward_model(self) -> bool:
        """Reward models have `pairs`, which is null without held-out pairs."""
        return "pairs" in self.results.model_fields_set

    @property
    def method(self) -> str:
        """The objective without its settings."""
        return (self.results.run.objective or "").split(" (")[0] or self.label

    @property
    def is_verified(self) -> bool:
        """Whether a reward verifies its responses as right or wrong."""
        return self.results.reasoning is not None

    @property
    def task(self) -> str:
        """The data that the figures are based on. Figures are comparable only between runs of one task."""
        if self.results.tasks:
            return "Evaluations"
        kind, data = "Verified problems" if self.is_verified else "Preferences", self.results.run.dataset
        return f"{kind} on {data}" if data else kind

    @property
    def score_name(self) -> str:
        return "accuracy" if self.is_verified else "true score"


def find_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[dict[str, str]]]:
    """The runs in and below the folders, and those whose results are damaged: `run`, `folder`, `reason`.

    They are in the natural order of their paths, except that the runs of a method follow its first. A folder that is
    reached twice counts once.
    """
    folders = [Path(folder) for folder in folders]
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}; give folders that hold runs")
    paths: dict[str, Path | None] = {}
    for folder in folders:
        # Runs may be linked from another disk.
        for path, names, files in os.walk(folder.absolute(), followlinks=True):
            names.sort()
            if (real := os.path.realpath(path)) in paths:
                names.clear()
            else:
                paths[real] = Path(path) if RESULTS_NAME in files else None
    found = sorted(filter(None, paths.values()), key=_natural)
    common = os.path.commonpath([folder.parent for folder in found]) if found else ""
    methods: dict[tuple[str, bool], list[Run]] = {}
    incomplete = []
    for folder in found:
        label = folder.relative_to(common).as_posix()
        try:
            run = read_run(label, folder)
        except ValueError as error:
            reason = str(error).removeprefix(f"{folder}{os.sep}")
            incomplete.append({"run": label, "folder": str(folder), "reason": reason})
        else:
            methods.setdefault((run.method, run.trains_reward_model), []).append(run)
    if not methods:
        known = "".join(f"; {run['run']}: {run['reason']}" for run in incomplete)
        where = ", ".join(map(str, folders))
        raise ValueError(f"no finished run in {where}: a run folder holds a {RESULTS_NAME}{known}")
    return [run for group in methods.values() for run in group], incomplete


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """A sort key that puts `run-10` after `run-9`."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path))]


def read_run(label: str, folder: Path) -> Run:
    """Read a finished run; ValueError says why it has no figures."""
    run = Run(label, folder, read_results(folder / RESULTS_NAME))
    for row in sorted(_read_rows(folder / "metrics.jsonl", Logged, run.problems), key=lambda row: row.step):
        numbers = {name: value for name, value in row.model_extra.items() if isinstance(value, int | float | None)}
        run.metrics.append({"step": row.step, **numbers})
    # An evaluation on a task has responses of one model.
    for name in ("generations.jsonl", "responses.jsonl"):
        run.generations.extend([] if run.generations else _read_rows(folder / name, Response, run.problems))
    return run


def _read_rows(path: Path, model: type[Row], problems: Faults) -> list[Row]:
    """The rows of a JSON-lines file that fit the model; none if the file is missing."""
    rows, faults = [], []
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else [], start=1):
        try:
            if line.strip():
                rows.append(model.model_validate_json(line))
        except ValidationError as error:
            faults.append(f"line {number}: {first_fault(error)}")
    if faults:
        many = f"{len(faults)} of {len(faults) + len(rows)} lines cannot be read and are left out"
        problems.append({"file": path.name, "problem": f"{many}; {faults[0]}"})
    return rows
