"""From raw rows to a checked `datasets.Dataset`: validation with the place of every error, and the columns to keep."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trl_ext.data.schemas import PreferenceRow, PromptRow, has_response_field

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 5
PROMPT_COLUMNS = ("row_id", "prompt")
PREFERENCE_COLUMNS = ("row_id", "prompt", "chosen", "rejected")
# TRL tells the format of a data set by any one of these columns, so a left-over one could misname it.
TRL_FORMAT_COLUMNS = {"prompt", "chosen", "rejected", "completion", "messages"}
INT64_LIMIT = 2**63


@dataclass(frozen=True)
class Problem:
    """What is wrong with one row. `reason` is a phrase to count by, `message` names the field."""

    position: int
    row_id: Any
    reason: str
    message: str


@dataclass
class RawSplit:
    """The rows of one file or hub split as (position, fields) pairs, and what could not even be parsed."""

    source: str
    stem: str
    unit: str = "line"
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def holds_pairs(self) -> bool:
        """True if the first row is a preference pair; False as well where there is no row."""
        return bool(self.rows) and has_response_field(self.rows[0][1])


def read_jsonl(path: Path) -> RawSplit:
    """Read one JSON object per line; blank lines are passed over, lines that do not parse become problems."""
    split = RawSplit(source=str(path), stem=path.stem)
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                # A byte-order mark, which some editors write, is legal at the start of the file only.
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip())
            except UnicodeDecodeError as error:
                problem = f"byte {error.start + 1} of the line is not UTF-8"
                split.problems.append(Problem(number, None, "not UTF-8", problem))
            except json.JSONDecodeError as error:
                problem = f"bad JSON: {error.msg} at column {error.colno}"
                split.problems.append(Problem(number, None, "bad JSON", problem))
            else:
                if isinstance(row, dict):
                    split.rows.append((number, row))
                else:
                    problem = f"bad JSON: expected an object, got {type(row).__name__}"
                    split.problems.append(Problem(number, None, "bad JSON", problem))
    return split


def build_split(split: RawSplit, *, pairs: bool, skip_bad_rows: bool) -> datasets.Dataset:
    """Check every row and build the data set.

    Raises:
        ValueError: the split is empty, a row is bad and `skip_bad_rows` is False, or no good row remains.
    """
    total = len(split.rows) + len(split.problems)
    if total == 0:
        raise ValueError(f"{split.source}: empty; expected at least one row")
    rows, problems = _validate(split, PreferenceRow if pairs else PromptRow)
    problems = sorted([*split.problems, *problems], key=lambda problem: problem.position)
    if problems and not skip_bad_rows:
        raise ValueError(_describe(split, problems))
    if problems:
        reasons = Counter(problem.reason for problem in problems)
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        if not rows:
            raise ValueError(f"{split.source}: every row is bad, none of {total} remains ({counts})")
        logger.warning("%s: dropped %d of %d rows (%s)", split.source, len(problems), total, counts)
    return _to_dataset(split.source, rows, PREFERENCE_COLUMNS if pairs else PROMPT_COLUMNS)


def _validate(split: RawSplit, model: type[PreferenceRow] | type[PromptRow]) -> tuple[list[dict], list[Problem]]:
    rows, problems = [], []
    position_of_row_id: dict[str, int] = {}
    conversational = None
    for position, raw in split.rows:
        try:
            parsed = model.model_validate(raw)
        except ValidationError as error:
            problems.append(_problem_of(error, position, raw))
            continue
        row_id = parsed.row_id or f"{split.stem}:{position}"
        first_position = position_of_row_id.setdefault(row_id, position)
        if first_position != position:
            message = f"row_id: already used on {split.unit} {first_position}"
            problems.append(Problem(position, row_id, "duplicate row_id", message))
            continue
        if conversational is None:
            conversational = parsed.conversational
        elif parsed.conversational != conversational:
            kinds = ("plain strings", "messages")
            message = f"prompt: {kinds[parsed.conversational]}, but earlier rows are {kinds[conversational]}"
            problems.append(Problem(position, row_id, "mixed formats", message))
            continue
        rows.append({**parsed.model_dump(exclude_none=True), "row_id": row_id})
    return rows, problems


def _problem_of(error: ValidationError, position: int, raw: dict[str, Any]) -> Problem:
    """The first error of a row: the others often follow from it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    location = ".".join(str(part) for part in first["loc"])
    message = f"{location}: {first['msg']}" if location else first["msg"]
    reason = f"invalid {first['loc'][0]}" if location else first["type"]
    return Problem(position, raw.get("row_id"), reason, message)


def _describe(split: RawSplit, problems: list[Problem]) -> str:
    shown = []
    for problem in problems[:SHOWN_PROBLEMS]:
        row_id = "" if problem.row_id is None else f", row_id {problem.row_id}"
        shown.append(f"{split.unit} {problem.position}{row_id}: {problem.message}")
    hidden = len(problems) - len(shown)
    if hidden:
        shown.append(f"and {hidden} more")
    count = f"{len(problems)} bad row" + "s" * (len(problems) > 1)
    return f"{split.source}: {count}: {'; '.join(shown)} (fix the data, or drop such rows with skip_bad_rows)"


def _to_dataset(source: str, rows: list[dict[str, Any]], format_columns: tuple[str, ...]) -> datasets.Dataset:
    """Keep the columns that every row has and that hold one scalar type, with a warning for every other."""
    from datasets import Dataset

    columns = {name: [row[name] for row in rows] for name in format_columns}
    counts = Counter(name for row in rows for name in row if name not in columns)
    for name, count in counts.items():
        values = _uniform_scalars([row[name] for row in rows]) if count == len(rows) else None
        if name in TRL_FORMAT_COLUMNS:
            reason = "TRL would mistake the format of the data set by it"
        elif count < len(rows):
            reason = f"only {count} of {len(rows)} rows have it"
        elif values is None:
            reason = "it does not hold strings, booleans or 64-bit numbers throughout"
        else:
            columns[name] = values
            continue
        logger.warning("%s: dropped column %r: %s", source, name, reason)
    return Dataset.from_dict(columns)


def _uniform_scalars(values: list[Any]) -> list[Any] | None:
    """The values if one column can hold them, integers among floats turned into floats; otherwise None."""
    types = {type(value) for value in values}
    if types in ({str}, {bool}, {float}):
        return values
    if types == {int, float}:
        return [float(value) for value in values]
    return values if types == {int} and all(-INT64_LIMIT <= value < INT64_LIMIT for value in values) else None
