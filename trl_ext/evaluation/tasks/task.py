"""A task: one YAML row of data, a prompt and a check."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator

from trl_ext.data.math import load_math
from trl_ext.data.rows import first_error, read_json_rows
from trl_ext.files import brief, read_yaml
from trl_ext.names import check_choice

TASKS = Path(__file__).parent / "tasks.yaml"
Row = dict[str, Any]
_COLUMN = re.compile(r"\{(\w+)\}")


class Task(BaseModel, extra="forbid", strict=True):
    """The keys of a row.

    Attributes:
        data: a file of JSON lines, or of a JSON array; a path is relative to the YAML file, or to `--data`.
        layout: `math` for the layouts of `load_math`; None for rows that are used as they are.
        prompt: the prompt, with `{column}` for columns of the data; `{column}` alone may be a list of messages.
        check: a name of `evaluate.CHECKS`, or your own `file.py:function`.
        answer: the right answer, for checks that need one.
        max_new_tokens: the longest response.
        samples: responses to each prompt; with verified answers, several give pass@k and maj@k.
        temperature, top_p: of the sampling; temperature 0 is greedy decoding.
        stop: strings that end a response, and remain in it.
        template: a prompt template of the library, or a text file with `{question}`, for a prompt of plain text; None
            for the model's chat template.
    """

    data: str
    layout: Literal["math"] | None = None
    prompt: str
    check: str
    answer: str | None = None
    max_new_tokens: PositiveInt = 512
    samples: PositiveInt = 1
    temperature: float = 0.0
    top_p: float = 1.0
    stop: list[str] = Field(default_factory=list)
    template: str | None = None

    @model_validator(mode="after")
    def _samples_differ(self) -> Task:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples {self.samples} at temperature 0 would all be the same: set temperature")
        return self


def task_names() -> list[str]:
    """The library's tasks."""
    return list(read_yaml(TASKS))


def read_task(name: str) -> tuple[str, Task, Path]:
    """A task by its name in the library or by its YAML file: its name, the row, and the folder of the file.

    Raises:
        FileNotFoundError, ValueError: no such task or file, or a wrong row; the message names the key.
    """
    if name.endswith((".yaml", ".yml")):
        path, row = Path(name), read_yaml(name)
    else:
        tasks = read_yaml(TASKS)
        check_choice("task", name, [*tasks, "your own .yaml file"])
        path, row = TASKS, tasks[name]
    try:
        return Path(name).stem, Task.model_validate(row), path.parent
    except ValidationError as error:
        raise ValueError(f"{path}: {first_error(error)}") from None


def read_rows(task: Task, folders: list[Path]) -> list[Row]:
    """The data's rows, each with `row_id`, `prompt` (text or messages) and, if the task has one, `answer`.

    Raises:
        FileNotFoundError: the data is in none of the folders.
        ValueError: a row is wrong, or lacks a column.
    """
    places = [folder / task.data for folder in folders]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"no file {' or '.join(map(str, places))}: --data is the folder of {task.data}")
    raw = load_math(path) if task.layout == "math" else [row for _, row in read_json_rows(path)]
    rows = []
    for number, row in enumerate(raw, start=1):
        own = {"row_id": str(row.get("row_id", number))}
        try:
            own |= {name: fill(getattr(task, name), row) for name in ("prompt", "answer") if getattr(task, name)}
        except KeyError as error:
            raise ValueError(
                f"{path}: row {number} has no column {error}; it has {brief(', '.join(row), 160)}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: {error}") from None
        rows.append({**row, **own})
    return rows


def fill(template: str, row: Mapping[str, Any]) -> Any:
    """The template with the row's columns; a column alone keeps its type if it is a list.

    Raises:
        KeyError: the row lacks a column.
        ValueError: a column is null or not a number.
    """
    alone = _COLUMN.fullmatch(template)
    if alone and isinstance(row[alone[1]], list):
        return row[alone[1]]

    def text(found: re.Match) -> str:
        value = row[found[1]]
        if value is None or value != value:
            raise ValueError(f"the column {found[1]!r} is {value}; give a text, or leave out the row")
        # Data often has whole numbers as floats.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        return value if isinstance(value, str) else json.dumps(value)

    return _COLUMN.sub(text, template)
