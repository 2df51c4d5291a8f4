"""Run folders as read by the report: existing, damaged and unfinished ones."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trl_ext.evaluation.reporting.results import (
    HARNESS_NAMES,
    RESULTS_NAME,
    Logged,
    Mistake,
    Response,
    Results,
    first_fault,
    read_harness,
    read_results,
)

# A folder with one of these files and without results is an unfinished or current run.
STARTED_NAMES = ("metrics.jsonl", "config.yaml")
Row = TypeVar("Row", bound=BaseModel)
Faults = list[dict[str, str]]


@dataclass(frozen=True)
class Run:
    """A finished run, with the readable parts of its files.

    Attributes:
        label: its path below the folder that holds all runs.
        folder: its folder.
        results: its `results.json`.
        metrics: rows of `metrics.jsonl`, by step; non-finite values are None.
        generations, mistakes: rows of `generations.jsonl` and `reward_mistakes.jsonl`.
        problems: the parts that could not be read, each as `file` and `problem`.
    """

    label: str
    folder: Path
    results: Results
    metrics: list[dict[str, Any]] = field(default_factory=list)
    generations: list[Response] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
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
    """The runs in and below the folders, and those whose results are missing or damaged: `run`, `folder`, `reason`.

    They are in the natural order of their paths, except that the runs of a method follow its first. Links are
    followed, and a folder that is reached twice counts once. Hidden folders and `checkpoint-*` are skipped.
    """
    folders = [Path(folder) for folder in folders]
    found = sorted(_walk(folders), key=_natural)
    common = os.path.commonpath([folder.parent for folder in found]) if found else ""
    methods: dict[tuple[str, bool], list[Run]] = {}
    incomplete = []
    for folder in found:
        label = folder.relative_to(common).as_posix()
        try:
            run = _read_run(label, folder)
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


def _walk(folders: Sequence[Path]) -> list[Path]:
    """The folders of runs, without duplicates."""
    found: list[Path] = []
    seen: set[str] = set()
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}; give folders that hold runs")
        start = folder.resolve() if ".." in folder.parts else folder.absolute()
        for path, names, files in os.walk(start, followlinks=True):
            if os.path.realpath(path) in seen:
                names.clear()
                continue
            seen.add(os.path.realpath(path))
            names[:] = sorted(name for name in names if not name.startswith((".", "checkpoint-")))
            if not {RESULTS_NAME, *STARTED_NAMES}.isdisjoint(files) or fnmatch.filter(files, HARNESS_NAMES):
                found.append(Path(path))
    return found


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """A sort key that puts `run-10` after `run-9`."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path))]


def _read_run(label: str, folder: Path) -> Run:
    """Read a run; ValueError says why it has no figures."""
    problems: Faults = []
    metrics = _read_metrics(folder / "metrics.jsonl", problems)
    if not (folder / RESULTS_NAME).is_file():
        # The names of the harness's files end in the time of writing.
        if of_harness := sorted(folder.glob(HARNESS_NAMES)):
            return Run(label, folder, read_harness(of_harness[-1]))
        logged = f"last logged at step {metrics[-1]['step']}" if metrics else "nothing logged"
        raise ValueError(f"no {RESULTS_NAME}, {logged}")
    results = read_results(folder / RESULTS_NAME)
    # An evaluation on a task has responses of one model.
    generations = _read_rows(folder / "generations.jsonl", Response, problems) or _read_rows(
        folder / "responses.jsonl", Response, problems
    )
    mistakes = _read_rows(folder / "reward_mistakes.jsonl", Mistake, problems)
    return Run(label, folder, results, metrics, generations, mistakes, problems)


def _read_metrics(path: Path, problems: Faults) -> list[dict[str, Any]]:
    """The numbers of each row, by step; those that are not finite are None, and named among the problems."""
    rows, lost = [], Counter()
    for row in sorted(_read_rows(path, Logged, problems), key=lambda row: row.step):
        values = {"step": row.step}
        for name, value in (row.model_extra or {}).items():
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                values[name] = None
                lost[name] += 1
            elif isinstance(value, (int, float)):
                values[name] = value
        rows.append(values)
    for name, times in lost.items():
        step = next(row["step"] for row in rows if name in row and row[name] is None)
        problems.append({"file": path.name, "problem": f"{name}: {times} values are not finite, first at step {step}"})
    return rows


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
