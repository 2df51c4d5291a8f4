"""Run folders as the report reads them: what is there, what is damaged, and what did not finish."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.evaluation.reporting.values import number, pick, text

RESULTS_NAME = "results.json"
# A folder with one of these and without results is a run that did not finish, or that still goes on.
STARTED_NAMES = ("metrics.jsonl", "config.yaml")


@dataclass(frozen=True)
class Problem:
    """Something damaged: in which file, which field (empty for whole lines), and what is wrong with it."""

    file: str
    field: str
    fault: str


@dataclass(frozen=True)
class Run:
    """A finished run, and what of its files could be read.

    Attributes:
        label: the end of its path that tells it from the other runs.
        folder: where it lies.
        results: its `results.json`, of which no shape is promised: read it with `pick`, `number` and `text`.
        metrics, generations, mistakes: rows of `metrics.jsonl`, `generations.jsonl` and `reward_mistakes.jsonl`.
        problems: the files and lines that could not be read.
    """

    label: str
    folder: Path
    results: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    generations: list[dict[str, Any]] = field(default_factory=list)
    mistakes: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

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
    def data(self) -> str:
        return text(self.results, "run", "dataset")

    @property
    def is_verified(self) -> bool:
        """Whether its responses are right or wrong, by a reward that verifies them."""
        return isinstance(pick(self.results, "reasoning"), dict)

    @property
    def task(self) -> str:
        """What it was measured on: figures compare only between runs that share it."""
        kind = "Verified problems" if self.is_verified else "Preferences"
        return f"{kind} on {self.data}" if self.data else kind

    @property
    def score_name(self) -> str:
        return "accuracy" if self.is_verified else "true score"


@dataclass(frozen=True)
class IncompleteRun:
    """A folder that has no figures, and why."""

    label: str
    folder: Path
    reason: str


def find_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[IncompleteRun]]:
    """The runs in and below the folders, and those that have no results.

    They come in the natural order of their paths, except that the runs of a method follow its first. Links to folders
    are followed, save one to a folder that it lies in; a folder that is reached twice counts once, by its own name
    rather than by a link's. Hidden folders and `checkpoint-*` are not looked into.

    Raises:
        FileNotFoundError: a folder that does not exist.
        NotADirectoryError: a file in the place of a folder.
        ValueError: no finished run in any of the folders.
    """
    folders = [Path(folder) for folder in folders]
    found = _walk(folders)
    labels = _labels(list(found.values()))
    runs, incomplete = [], []
    for folder in sorted(found, key=lambda folder: _natural(found[folder])):
        run = _read_run(labels[found[folder]], folder)
        (runs if isinstance(run, Run) else incomplete).append(run)
    if not runs:
        where = ", ".join(map(str, folders)) or "nothing"
        known = "".join(f"; {run.label}: {run.reason}" for run in incomplete)
        raise ValueError(f"no finished run in {where}: a run folder holds a {RESULTS_NAME}{known}")
    return _by_method(runs), incomplete


def _by_method(runs: Sequence[Run]) -> list[Run]:
    methods: dict[tuple[str, bool], list[Run]] = {}
    for run in runs:
        methods.setdefault((run.method, run.trains_reward_model), []).append(run)
    return [run for group in methods.values() for run in group]


def _walk(folders: Sequence[Path]) -> dict[Path, Path]:
    """The folders of runs, and for each the path by which it was found, which may lead through links."""
    for folder in folders:
        if not folder.exists():
            raise FileNotFoundError(f"no folder {folder}; give folders that hold runs")
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file; give folders that hold runs")
    # Links wait until all that lies in the folders themselves has been seen.
    waiting = deque(folder.resolve() if ".." in folder.parts else folder.absolute() for folder in folders)
    found: dict[Path, Path] = {}
    seen: set[str] = set()
    while waiting:
        for path, names, files in os.walk(waiting.popleft()):
            real = os.path.realpath(path)
            if real in seen:
                names.clear()
                continue
            seen.add(real)
            names[:] = [name for name in names if not name.startswith((".", "checkpoint-"))]
            waiting.extend(sorted(_links(Path(path), names)))
            if RESULTS_NAME in files or any(name in files for name in STARTED_NAMES):
                found[Path(real)] = Path(path)
    return found


def _links(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """The links among the names, but for those to a folder that holds them, which would lead to all that it holds."""
    real = folder.resolve()
    for name in names:
        link = folder / name
        if link.is_symlink() and not real.is_relative_to(link.resolve()):
            yield link


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
        results = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        return IncompleteRun(label, folder, f"{RESULTS_NAME} is damaged: {error}")
    except OSError as error:
        return IncompleteRun(label, folder, f"{RESULTS_NAME} cannot be read: {error.strerror}")
    if not isinstance(pick(results, "run"), dict):
        return IncompleteRun(label, folder, f"{RESULTS_NAME} has no `run`, so no recipe has written it")
    problems: list[Problem] = []
    return Run(
        label,
        folder,
        results,
        metrics=sorted(_read_rows(folder / "metrics.jsonl", ("step",), (), problems), key=lambda row: row["step"]),
        generations=_read_generations(folder / "generations.jsonl", problems),
        mistakes=_read_rows(
            folder / "reward_mistakes.jsonl", ("margin",), ("prompt_text", "chosen_text", "rejected_text"), problems
        ),
        problems=problems,
    )


def _last_step(folder: Path) -> str:
    rows = _read_rows(folder / "metrics.jsonl", ("step",), (), [])
    return f", last logged at step {rows[-1]['step']:g}" if rows else ", nothing logged"


def _read_generations(path: Path, problems: list[Problem]) -> list[dict[str, Any]]:
    """The rows of the file of responses, which holds one at least wherever it is written."""
    found: list[Problem] = []
    rows = _read_rows(path, (), ("prompt_text", "response_text"), found)
    if not rows and not found and path.exists():
        found.append(Problem(path.name, "", "the file is empty"))
    problems += found
    return rows


def _read_rows(
    path: Path, numbers: Sequence[str], texts: Sequence[str], problems: list[Problem]
) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file that have the given numbers and texts; a missing file has none."""
    try:
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(Problem(path.name, "", f"cannot be read: {error.strerror}"))
        return []
    rows, damaged = [], []
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if all(number(row, name) is not None for name in numbers) and all(
            isinstance(pick(row, name), str) for name in texts
        ):
            rows.append(row)
        else:
            damaged.append(place)
    if damaged:
        names = " and ".join((*numbers, *texts))
        many = f"{len(damaged)} of {len(damaged) + len(rows)} lines cannot be read and are left out"
        problems.append(Problem(path.name, "", f"{many}, the first is line {damaged[0]}; each must hold {names}"))
    return rows
