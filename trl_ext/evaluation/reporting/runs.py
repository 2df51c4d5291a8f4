"""Run folders as the report reads them: what is there, what is damaged, and what did not finish."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS_NAME = "results.json"
# A folder with one of these and without results is a run that did not finish, or that still goes on.
STARTED_NAMES = ("metrics.jsonl", "config.yaml")


@dataclass(frozen=True)
class Run:
    """A finished run, and what of its files could be read.

    Attributes:
        label: the end of its path that tells it from the other runs.
        folder: where it lies.
        results: its `results.json`, of which no shape is promised: read it with `pick`, `number` and `text`.
        metrics, generations, mistakes: rows of `metrics.jsonl`, `generations.jsonl` and `reward_mistakes.jsonl`.
        notes: one sentence for each file with lines that could not be read.
    """

    label: str
    folder: Path
    results: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    generations: list[dict[str, Any]] = field(default_factory=list)
    mistakes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def trains_reward_model(self) -> bool:
        return "pairs" in self.results

    @property
    def objective(self) -> str:
        return text(self.results, "run", "objective")

    @property
    def method(self) -> str:
        """The objective without its settings."""
        return self.objective.split(" (")[0] or self.label

    @property
    def setting(self) -> tuple[str, str]:
        """Model and data: KL and scores compare only between runs that share both."""
        return text(self.results, "run", "model"), text(self.results, "run", "dataset")


@dataclass(frozen=True)
class IncompleteRun:
    """A folder that has no figures, and why."""

    label: str
    folder: Path
    reason: str


def find_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[IncompleteRun]]:
    """The runs in and below the folders, in the natural order of their paths, and those that have no results.

    Hidden folders and `checkpoint-*` are not looked into, and links to folders are not followed.

    Raises:
        FileNotFoundError: a folder that does not exist.
        NotADirectoryError: a file in the place of a folder.
        ValueError: no finished run in any of the folders.
    """
    folders = [Path(folder) for folder in folders]
    found = sorted({run for folder in folders for run in _walk(folder)}, key=_natural)
    labels = _labels(found)
    runs, incomplete = [], []
    for folder in found:
        run = _read_run(labels[folder], folder)
        (runs if isinstance(run, Run) else incomplete).append(run)
    if not runs:
        where = ", ".join(map(str, folders)) or "nothing"
        known = "".join(f"; {run.label}: {run.reason}" for run in incomplete)
        raise ValueError(f"no finished run in {where}: a run folder holds a {RESULTS_NAME}{known}")
    return runs, incomplete


def pick(value: Any, *keys: str) -> Any:
    """What lies under the keys, one below the other; None where a key is missing or has nothing below it."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number(value: Any, *keys: str) -> float | None:
    """The finite number under the keys; None for anything else."""
    value = pick(value, *keys)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond what a float can hold
        return None


def text(value: Any, *keys: str) -> str:
    """The string under the keys, or an empty one."""
    value = pick(value, *keys)
    return value if isinstance(value, str) else ""


def _walk(folder: Path) -> Iterable[Path]:
    if not folder.exists():
        raise FileNotFoundError(f"no folder {folder}; give folders that hold runs")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; give folders that hold runs")
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith((".", "checkpoint-"))]
        if RESULTS_NAME in files or any(name in files for name in STARTED_NAMES):
            yield Path(path).resolve()


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """Orders `run-10` behind `run-9`."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path))]


def _labels(folders: Sequence[Path]) -> dict[Path, str]:
    """The shortest end of each path that no other has."""
    labels: dict[Path, str] = {}
    longest = max((len(folder.parts) for folder in folders), default=0)
    for length in range(1, longest + 1):
        ends = {folder: "/".join(folder.parts[-length:]) for folder in folders}
        times = Counter(ends.values())
        for folder, end in ends.items():
            if times[end] == 1:
                labels.setdefault(folder, end)
    return labels


def _read_run(label: str, folder: Path) -> Run | IncompleteRun:
    path = folder / RESULTS_NAME
    if not path.is_file():
        return IncompleteRun(label, folder, f"no {RESULTS_NAME}{_last_step(folder)}")
    try:
        results = _parse(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        return IncompleteRun(label, folder, f"{RESULTS_NAME} is damaged: {error}")
    except OSError as error:
        return IncompleteRun(label, folder, f"{RESULTS_NAME} cannot be read: {error.strerror}")
    if not isinstance(pick(results, "run"), dict):
        return IncompleteRun(label, folder, f"{RESULTS_NAME} has no `run`, so no recipe has written it")
    notes: list[str] = []
    return Run(
        label,
        folder,
        results,
        metrics=sorted(_read_rows(folder / "metrics.jsonl", ("step",), (), notes), key=lambda row: row["step"]),
        generations=_read_rows(folder / "generations.jsonl", (), ("prompt_text", "response_text"), notes),
        mistakes=_read_rows(
            folder / "reward_mistakes.jsonl", ("margin",), ("prompt_text", "chosen_text", "rejected_text"), notes
        ),
        notes=notes,
    )


def _last_step(folder: Path) -> str:
    rows = _read_rows(folder / "metrics.jsonl", ("step",), (), [])
    return f", last logged at step {rows[-1]['step']:g}" if rows else ", nothing logged"


def _read_rows(path: Path, numbers: Sequence[str], texts: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file that have the given numbers and texts; a missing file has none."""
    try:
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    except OSError:
        return []
    rows, damaged = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            row = _parse(line)
        except (ValueError, RecursionError):
            row = None
        if all(number(row, name) is not None for name in numbers) and all(
            isinstance(pick(row, name), str) for name in texts
        ):
            rows.append(row)
        else:
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged} of {damaged + len(rows)} lines cannot be read and are left out")
    return rows


def _parse(source: str) -> Any:
    """JSON, with null for the NaN and the infinities that Python writes and JSON has not."""
    return json.loads(source, parse_constant=lambda name: None)
