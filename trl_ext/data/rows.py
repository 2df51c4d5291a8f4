"""Build a checked `datasets.Dataset` from raw rows: locate every error, and choose the columns to keep."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from trl_ext.data.schemas import PreferenceRow, PromptRow, UnpairedRow, has_label_fields, has_response_field
from trl_ext.files import brief, numbered_lines, parse_json

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 5
# Keeps messages readable: the content of a row cannot flood the screen.
SHOWN_CHARACTERS = 320
PROMPT_COLUMNS = ("row_id", "prompt")
PREFERENCE_COLUMNS = ("row_id", "prompt", "chosen", "rejected")
UNPAIRED_COLUMNS = ("row_id", "prompt", "completion", "label")
# TRL infers the format of a data set from these columns, so a leftover column could mislead it.
TRL_FORMAT_COLUMNS = {"prompt", "chosen", "rejected", "completion", "messages"}


class Problem(NamedTuple):
    """An error in a row, and the number of its line or row."""

    position: int
    message: str
    row_id: Any = None


@dataclass
class RawSplit:
    """The rows of one file or hub split as (position, fields) pairs, and the rows that could not be parsed."""

    source: str
    stem: str
    unit: str = "line"
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def holds_pairs(self) -> bool:
        """True if the first row is a preference pair; False if it is not or there is no row."""
        return bool(self.rows) and has_response_field(self.rows[0][1])

    @property
    def holds_labels(self) -> bool:
        """True if the first row is a single response with a label."""
        return bool(self.rows) and has_label_fields(self.rows[0][1])

    def describe(self, problems: Sequence[Problem], limit: int = SHOWN_CHARACTERS) -> str:
        """One line with the source, the number of problems and the first few of them."""
        lines = []
        for position, message, row_id in problems:
            place = f"{self.unit} {position}" + (f", row_id {brief(row_id)}" if row_id is not None else "")
            lines.append(f"{place}: {message}")
        return f"{self.source}: {len(lines)} bad row{'s' * (len(lines) > 1)}: {first_few(lines, limit)}"


def read_jsonl(path: Path) -> RawSplit:
    """Read one JSON object per line, also from a `.gz` file; skip blank lines and record bad lines as problems.

    Raises:
        ValueError: the file holds a JSON array, or its compressed data is damaged.
    """
    split = RawSplit(source=str(path), stem=path.stem)
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        try:
            for number, line in numbered_lines(file):
                if not split.rows and not split.problems and line in (b"[", b"[{"):
                    raise ValueError(f"{path}: a JSON array; give JSON lines, one object per line without commas")
                try:
                    split.rows.append((number, _parse_row(line)))
                except ValueError as error:
                    split.problems.append(Problem(number, str(error)))
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: cannot be decompressed after line {number}: {error}") from error
    return split


def _parse_row(line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line is not UTF-8") from None
    if not isinstance(row, dict):
        raise ValueError(f"bad JSON: expected an object, got {type(row).__name__}")
    return row


def first_few(problems: Sequence[str], limit: int = SHOWN_CHARACTERS) -> str:
    """One line of about `limit` characters with up to five problems of a file and the number of others."""
    shown: list[str] = []
    for problem in problems[:SHOWN_PROBLEMS]:
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
        skip_bad_rows: drop bad rows instead of raising.

    Raises:
        ValueError: the split is empty, a row is bad and `skip_bad_rows` is False, or no good row remains.
    """
    total = len(split.rows) + len(split.problems)
    if total == 0:
        raise ValueError(f"{split.source}: empty; expected at least one row")
    model, columns = (PreferenceRow, PREFERENCE_COLUMNS) if pairs else (PromptRow, PROMPT_COLUMNS)
    if pairs and split.holds_labels:
        model, columns = UnpairedRow, UNPAIRED_COLUMNS
    rows, problems = _validate(split, model)
    problems = sorted([*split.problems, *problems])
    if len(problems) == total and (message := _wrong_columns(split, problems, columns)):
        raise ValueError(message)
    if problems and not (rows and skip_bad_rows):
        advice = "fix the data" if skip_bad_rows else "fix the data, or drop such rows with skip_bad_rows"
        raise ValueError(f"{split.describe(problems)} ({advice})")
    if problems:
        logger.warning("%s (dropped of %d)", split.describe(problems), total)
    return _to_dataset(split.source, rows, columns)


def _validate(
    split: RawSplit, model: type[PreferenceRow] | type[UnpairedRow] | type[PromptRow]
) -> tuple[list[dict], list[Problem]]:
    rows, problems = [], []
    position_of_row_id: dict[str, int] = {}
    conversational = None
    for position, raw in split.rows:
        try:
            parsed = model.model_validate(raw)
            _check_encodable(raw)
            row_id = parsed.row_id or f"{split.stem}:{position}"
            first_position = position_of_row_id.setdefault(row_id, position)
            if first_position != position:
                raise ValueError(f"row_id: already used on {split.unit} {first_position}")
            conversational = parsed.conversational if conversational is None else conversational
            if parsed.conversational != conversational:
                kinds = ("plain strings", "messages")
                raise ValueError(
                    f"prompt: {kinds[parsed.conversational]}, but earlier rows are {kinds[conversational]}"
                )
        except ValueError as error:
            message = _first_error(error) if isinstance(error, ValidationError) else str(error)
            problems.append(Problem(position, message, raw.get("row_id")))
            continue
        rows.append({**parsed.model_dump(exclude_none=True), "row_id": row_id})
    return rows, problems


def _first_error(error: ValidationError) -> str:
    """The first error of a row; the others are often consequences of it."""
    first = error.errors(include_url=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    return brief(": ".join([".".join(map(str, first["loc"]))] * bool(first["loc"]) + [message]), 160)


def _check_encodable(row: Any) -> None:
    """Refuse half a surrogate pair, which is what an emoji cut in two leaves in JSON."""
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: holds an unpaired surrogate, such as half an emoji") from None


def _wrong_columns(split: RawSplit, problems: list[Problem], columns: tuple[str, ...]) -> str | None:
    """A message if no row of a file has a required field; None for any other problem."""
    name, _, fault = problems[0].message.partition(": ")
    if not fault.startswith("missing") or {problem.message for problem in problems} != {problems[0].message}:
        return None
    expected = ", ".join(columns[1:])
    if columns == PROMPT_COLUMNS and not split.stem.endswith("_gen"):
        # A single file: its first row decides between pairs and prompts.
        expected = "prompt, chosen, rejected for pairs, or prompt alone"
    found = list(split.rows[0][1])
    near = [] if name in found else get_close_matches(name, found, n=1)
    count = len(problems)
    return (
        f"{split.source}: expected the columns {expected}; found {brief(', '.join(found), 160) or 'none'}: rename "
        f"{f'{near[0]!r} to {name!r}' if near else 'them'} ({count} bad row{'s' * (count > 1)})"
    )


def _to_dataset(source: str, rows: list[dict[str, Any]], format_columns: tuple[str, ...]) -> datasets.Dataset:
    """Keep the columns that every row has with a single scalar type, and warn about each of the others."""
    from datasets import Dataset

    columns = {name: [row[name] for row in rows] for name in format_columns}
    counts = Counter(name for row in rows for name in row if name not in columns)
    for name, count in counts.items():
        values = [row.get(name) for row in rows]
        types = {type(value) for value in values}
        if name in TRL_FORMAT_COLUMNS:
            reason = "TRL would mistake the format of the data set by it"
        elif count < len(rows):
            reason = f"only {count} of {len(rows)} rows have it"
        elif types not in ({str}, {bool}, {float}, {int, float}) and not (types == {int} and _fit_64_bits(values)):
            reason = "it does not hold strings, booleans or 64-bit numbers throughout"
        else:
            columns[name] = [float(value) for value in values] if float in types else values
            continue
        logger.warning("%s: dropped column %r: %s", source, brief(name), reason)
    return Dataset.from_dict(columns)


def _fit_64_bits(values: list[int]) -> bool:
    return min(values) >= -(2**63) and max(values) < 2**63
