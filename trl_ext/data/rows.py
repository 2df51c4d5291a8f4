"""Rows of files: read JSON lines, locate every error, and build a checked `datasets.Dataset`."""

from __future__ import annotations

import gzip
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trl_ext.data.schemas import COLUMNS, convert_row, kind_of
from trl_ext.files import brief, existing_file, parse_json, read_json

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

# Keeps messages readable: the content of a row cannot flood the screen.
SHOWN_CHARACTERS = 320
# TRL infers the format of a data set from these columns, so a leftover column could mislead it.
TRL_FORMAT_COLUMNS = {"prompt", "chosen", "rejected", "completion", "messages"}


@dataclass
class RawSplit:
    """The rows of one file or hub split, and what is wrong with others, each with its position."""

    source: str
    stem: str
    unit: str = "line"
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of the first row; that of prompts if there is no row."""
        return kind_of(self.rows[0][1] if self.rows else ())

    def check(self, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows as `convert` returns them, each with a `row_id`, by default `stem:position`.

        A row that `convert` refuses with a ValueError, or whose row_id is not new, becomes a problem.
        """
        checked = []
        position_of_row_id: dict[str, int] = {}
        for position, raw in self.rows:
            row_id = f"{self.stem}:{position}" if raw.get("row_id") is None else str(raw["row_id"])
            try:
                row = convert(raw)
                if position_of_row_id.setdefault(row_id, position) != position:
                    raise ValueError(f"row_id: already used on {self.unit} {position_of_row_id[row_id]}")
            except ValueError as error:
                given = "" if raw.get("row_id") is None else f"row_id {brief(row_id)}: "
                self.problems.append((position, f"{given}{error}"))
            else:
                checked.append({**row, "row_id": row_id})
        return checked

    def describe(self) -> str:
        """One line with the source, the number of problems and the first few of them."""
        lines = [f"{self.unit} {position}: {message}" for position, message in sorted(self.problems)]
        return f"{self.source}: {len(lines)} bad row{'s' * (len(lines) > 1)}: {first_few(lines)}"


def read_jsonl(path: str | Path) -> RawSplit:
    """Read one JSON object per line, also from a `.gz` file; skip blank lines and record bad lines as problems.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not text in UTF-8.
    """
    path = existing_file(path)
    split = RawSplit(source=str(path), stem=path.stem)
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"bad JSON: expected an object, got {type(row).__name__}")
                    split.rows.append((number, row))
                except ValueError as error:
                    split.problems.append((number, str(error)))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
    return split


def read_json_rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a file and their numbers, from JSON lines, or from a JSON array if the name ends in `.json`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a row is bad, or there are none.
    """
    if Path(path).suffix == ".json":
        content = read_json(path)
        rows = list(enumerate(content, start=1)) if isinstance(content, list) else []
    else:
        split = read_jsonl(path)
        if split.problems:
            raise ValueError(split.describe())
        rows = split.rows
    if not rows or not all(isinstance(row, dict) for _, row in rows):
        raise ValueError(f"{path}: must hold rows, and at least one")
    return rows


def split_file(folder: Path, split: str) -> Path:
    """The file of a split in a folder of `{split}.jsonl` files.

    Raises:
        FileNotFoundError: there is none; the message lists the folder.
    """
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.name} for the split {split!r}; {list_folder(folder)}")
    return path


def list_folder(folder: Path) -> str:
    """What a folder holds, for an error message."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))
    return f"{folder} holds {brief(', '.join(names) or 'nothing', 320)}"


def text_field(row: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    """The text in a field of a row.

    Raises:
        ValueError: it is missing, not a text or empty; the message begins with the field.
    """
    if name not in row:
        raise ValueError(f"{name}: missing; the row has {brief(', '.join(row) or 'nothing', 80)}")
    if not isinstance(row[name], str):
        raise ValueError(f"{name}: must be text, got {brief(repr(row[name]), 40)}")
    if not may_be_empty and not row[name].strip():
        raise ValueError(f"{name}: empty")
    return row[name]


def first_few(problems: Sequence[str], limit: int = SHOWN_CHARACTERS) -> str:
    """One line of about `limit` characters with up to five problems of a file and the number of others."""
    shown: list[str] = []
    for problem in problems[:5]:
        problem = brief(problem, max(limit // 2, 80))
        if shown and sum(map(len, shown)) + len(problem) > limit:
            break
        shown.append(problem)
    hidden = len(problems) - len(shown)
    return "; ".join([*shown, f"and {hidden} more"] if hidden else shown)


def build_split(split: RawSplit, *, pairs: bool, skip_bad_rows: bool) -> datasets.Dataset:
    """Check every row and build the data set.

    Args:
        split: the raw rows.
        pairs: True if rows must be preference pairs, or labelled responses if the first row is one; False for prompts.
        skip_bad_rows: drop bad rows instead of raising ValueError; at least one good row must remain.
    """
    total = len(split.rows) + len(split.problems)
    if total == 0:
        raise ValueError(f"{split.source}: empty; expected at least one row")
    kind = "prompt" if not pairs else "labelled" if split.kind == "labelled" else "pair"
    rows = split.check(lambda raw: convert_row(kind, raw))
    if split.problems and not (rows and skip_bad_rows):
        advice = "fix the data" if skip_bad_rows else "fix the data, or drop such rows with skip_bad_rows"
        raise ValueError(f"{split.describe()} ({advice})")
    if split.problems:
        logger.warning("%s (dropped of %d)", split.describe(), total)
    if len({type(row["prompt"]) for row in rows}) > 1:
        raise ValueError(f"{split.source}: some prompts are plain strings and others messages; give one kind")
    return _to_dataset(split.source, rows, COLUMNS[kind])


def first_error(error: ValidationError) -> str:
    """The first error of a row; the others are often consequences of it."""
    first = error.errors(include_url=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    return brief(": ".join([".".join(map(str, first["loc"]))] * bool(first["loc"]) + [message]), 160)


def _to_dataset(source: str, rows: list[dict[str, Any]], format_columns: tuple[str, ...]) -> datasets.Dataset:
    """Keep the columns with a text, a boolean or a number in every row, and warn about the others."""
    from datasets import Dataset

    columns = {name: [row[name] for row in rows] for name in format_columns}
    dropped = []
    for name in dict.fromkeys(name for row in rows for name in row if name not in columns):
        values = [row.get(name) for row in rows]
        types = {type(value) for value in values}
        if name == "rubric" and types == {list}:
            columns[name] = [[_criterion(one) for one in value] for value in values]
        elif name in TRL_FORMAT_COLUMNS or types not in ({str}, {bool}, {int}, {float}, {int, float}):
            dropped.append(name)
        else:
            columns[name] = [float(value) for value in values] if float in types else values
    if dropped:
        names = brief(", ".join(dropped), 160)
        logger.warning("%s: dropped columns: %s (without a text, boolean or number in every row)", source, names)
    return Dataset.from_dict(columns)


def _criterion(one: Any) -> dict[str, Any]:
    """A criterion in the one form that all rows of a column must have; `RubricReward` refuses a None and a NaN."""
    text, weight = (one.get("criterion"), one.get("weight")) if isinstance(one, dict) else (one, None)
    weight = 1.0 if weight is None else float(weight) if isinstance(weight, (int, float)) else math.nan
    return {"criterion": text if isinstance(text, str) else None, "weight": weight}
