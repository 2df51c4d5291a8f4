"""From raw rows to a checked `datasets.Dataset`: validation with the place of every error, and the columns to keep."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trl_ext.data.schemas import PreferenceRow, PromptRow, UnpairedRow, has_label_fields, has_response_field
from trl_ext.files import MAX_LINE_BYTES, brief, numbered_lines, parse_json, refuse_other_formats

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 5
# A message stays readable, and what a row holds cannot flood the screen.
SHOWN_CHARACTERS = 320
SHOWN_COLUMNS = 20
PROMPT_COLUMNS = ("row_id", "prompt")
PREFERENCE_COLUMNS = ("row_id", "prompt", "chosen", "rejected")
UNPAIRED_COLUMNS = ("row_id", "prompt", "completion", "label")
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

    @property
    def holds_labels(self) -> bool:
        """True if the first row is a single response with a label."""
        return bool(self.rows) and has_label_fields(self.rows[0][1])


def read_jsonl(path: Path) -> RawSplit:
    """Read one JSON object per line; blank lines are passed over, lines that do not parse become problems.

    Raises:
        ValueError: the file as a whole is in another format, such as an archive, or in another encoding.
    """
    split = RawSplit(source=str(path), stem=path.stem)
    with open(path, "rb") as file:
        refuse_other_formats(file, path)
        for number, line in numbered_lines(file):
            try:
                split.rows.append((number, parse_row(line)))
            except ValueError as error:
                message = str(error)
                reasons = ("bad JSON", "not UTF-8", "too long")
                reason = next((reason for reason in reasons if reason in message), "invalid Unicode")
                split.problems.append(Problem(number, None, reason, message))
    return split


def parse_row(line: bytes | None) -> dict[str, Any]:
    """The object in a line of `numbered_lines`; a ValueError says in a short phrase what is wrong with it."""
    if line is None:
        raise ValueError(f"too long: over {MAX_LINE_BYTES // 2**20} MB")
    try:
        row = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line is not UTF-8") from None
    if not isinstance(row, dict):
        raise ValueError(f"bad JSON: expected an object, got {type(row).__name__}")
    return row


def first_few(problems: Sequence[str], limit: int = SHOWN_CHARACTERS) -> str:
    """Up to five of the problems of a file in one line of about `limit` characters, and how many more there are."""
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
        pairs: whether they are to be preference pairs, or labelled responses where the first row is one; else prompts.
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
    problems = sorted([*split.problems, *problems], key=lambda problem: problem.position)
    if problems and not skip_bad_rows:
        raise ValueError(_describe(split, problems, columns))
    if problems:
        reasons = Counter(problem.reason for problem in problems)
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        if not rows:
            raise ValueError(f"{split.source}: every row is bad, none of {total} remains ({counts})")
        places = f"{split.unit}s {_ranges([problem.position for problem in problems])}"
        logger.warning("%s: dropped %d of %d rows (%s): %s", split.source, len(problems), total, counts, places)
        for problem in problems:
            logger.info("%s: dropped %s", split.source, _in_words(split, problem))
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
    message = brief(f"{location}: {first['msg']}" if location else first["msg"], 160)
    reason = f"invalid {first['loc'][0]}" if location else first["type"]
    return Problem(position, raw.get("row_id"), reason, message)


def _describe(split: RawSplit, problems: list[Problem], columns: tuple[str, ...]) -> str:
    count = f"{len(problems)} bad row" + "s" * (len(problems) > 1)
    alike = {problem.reason for problem in problems} == {"missing field"} and len({p.message for p in problems}) == 1
    if alike and len(problems) == len(split.rows):
        expected = ", ".join(columns[1:])
        if columns == PROMPT_COLUMNS and not split.stem.endswith("_gen"):
            # One file, whose first row was to tell what it holds.
            expected = "prompt, chosen, rejected for pairs, or prompt alone"
        found = brief(", ".join(split.rows[0][1]), SHOWN_CHARACTERS // 2)
        return f"{split.source}: expected the columns {expected}; found {found or 'none'}: rename them ({count})"
    if alike and len(problems) > 1:
        places = _ranges([problem.position for problem in problems])
        shown = f"{split.unit}s {places}: {problems[0].message}"
    else:
        shown = first_few([_in_words(split, problem) for problem in problems])
    return f"{split.source}: {count}: {shown} (fix the data, or drop such rows with skip_bad_rows)"


def _in_words(split: RawSplit, problem: Problem) -> str:
    row_id = "" if problem.row_id is None else f", row_id {brief(problem.row_id)}"
    return f"{split.unit} {problem.position}{row_id}: {problem.message}"


def _ranges(numbers: Iterable[int]) -> str:
    """`2, 4-7`: ascending numbers, cut short where there are many gaps."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return brief(", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges), 200)


def _to_dataset(source: str, rows: list[dict[str, Any]], format_columns: tuple[str, ...]) -> datasets.Dataset:
    """Keep the columns that every row has and that hold one scalar type, with a warning for every other."""
    from datasets import Dataset

    columns = {name: [row[name] for row in rows] for name in format_columns}
    counts = Counter(name for row in rows for name in row if name not in columns)
    dropped = []
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
        dropped.append(name)
        if len(dropped) <= SHOWN_COLUMNS:
            logger.warning("%s: dropped column %r: %s", source, brief(name), reason)
    if len(dropped) > SHOWN_COLUMNS:
        logger.warning("%s: dropped %d more columns", source, len(dropped) - SHOWN_COLUMNS)
    return Dataset.from_dict(columns)


def _uniform_scalars(values: list[Any]) -> list[Any] | None:
    """The values if one column can hold them, integers among floats turned into floats; otherwise None."""
    types = {type(value) for value in values}
    if types in ({str}, {bool}, {float}):
        return values
    fits = types <= {int, float} and all(-INT64_LIMIT <= value < INT64_LIMIT for value in values if type(value) is int)
    if fits and types == {int, float}:
        return [float(value) for value in values]
    return values if fits and types == {int} else None
