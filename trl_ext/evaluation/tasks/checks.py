"""The checks of tasks: functions from responses to metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.data.benchmark import EMBEDDED, known_score
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.tasks.task import Row, Task
from trl_ext.names import check_choice, load_function
from trl_ext.rewards.verified import KINDS, Grader, VerifiedGrader
from trl_ext.rollouts.generation import Generation
from trl_ext.rollouts.responses import graded

# The metrics of a response by name; None if the response is not counted.
Metrics = dict[str, float | None]
# Metrics are saved in each row under this prefix, as rewards are, so that the report shows them beside the response.
PREFIX = "reward/"
CHECKS = (*KINDS, "exact", "contains", *EMBEDDED)


def make_check(task: Task, rows: Sequence[Row]) -> Callable[[Sequence[Row], Sequence[Generation]], list[Row]]:
    """The function `f(rows, generations)` that checks responses of a task and returns columns of their rows.

    The columns are the metrics under `PREFIX` and, for verified answers, those of `graded`.

    Raises:
        ValueError, FileNotFoundError: an unknown check, or the rows or the task lack what it needs.
    """
    name = task.check
    if ":" not in name:
        check_choice("check", name, [*CHECKS, "your own file.py:function"])
    if name in (*KINDS, "exact", "contains") and task.answer is None:
        raise ValueError(f'the check {name} needs the key answer, such as answer: "{{answer}}"')
    if task.answer is not None and not all(isinstance(row["answer"], str) for row in rows):
        raise ValueError(f"answer: {task.answer} is a list in the data, and one text is needed")
    if name == "countdown" and not all("numbers" in row for row in rows):
        raise ValueError("the check countdown needs numbers in every row of the data")
    if name in KINDS:
        grade = VerifiedGrader(name)
        return lambda rows, found: [_verified(row, one, grade) for row, one in zip(rows, found, strict=True)]
    of_one = _check_of_one(name)
    return lambda rows, found: [_columns(of_one(row, one)) for row, one in zip(rows, found, strict=True)]


def _columns(metrics: Mapping[str, Any]) -> Row:
    return {PREFIX + name: value for name, value in metrics.items()}


def _verified(row: Row, one: Generation, grade: Grader) -> Row:
    found = graded(row, one, grade)
    return found | _columns({"accuracy": found["answer_reward"], "format": found["format_reward"]})


def _check_of_one(name: str) -> Callable[[Row, Generation], Metrics]:
    if name in ("exact", "contains"):
        same = str.__eq__ if name == "exact" else str.__contains__
        return lambda row, one: {"accuracy": float(same(_plain(one.text), _plain(row["answer"])))}
    if name in EMBEDDED:
        score = known_score(name)
        return lambda row, one: {"score": score(last_user_text(row["prompt"]), one.text, finished=one.finished)}
    own = load_function(name, "check")

    def check(row: Row, one: Generation) -> Metrics:
        found = own(one.text, row)
        return {**found} if isinstance(found, Mapping) else {"accuracy": None if found is None else float(found)}

    return check


def _plain(text: str) -> str:
    """A text without differences in case and spaces."""
    return " ".join(text.split()).casefold()
