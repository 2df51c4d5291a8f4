"""The checks of tasks: functions from responses to metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.data.benchmark import EMBEDDED, known_score
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.tasks.task import Row, Task
from trl_ext.names import load_function, nearest
from trl_ext.rewards.verified import KINDS, Grader, VerifiedGrader
from trl_ext.rollouts.responses import graded

# The metrics of a response by name; None if the response is not counted.
Metrics = dict[str, float | None]
# Metrics are saved in each row under this prefix, as rewards are, so that the report shows them beside the response.
PREFIX = "reward/"
PAIRS = "pairs"
CHECKS = (*KINDS, "exact", "contains", "rubric", PAIRS, *EMBEDDED)
COLUMNS = {"countdown": ("numbers",), PAIRS: ("chosen", "rejected")}


def make_check(task: Task, rows: Sequence[Row]) -> Callable[[Sequence[Row], Sequence[Any]], list[Row]]:
    """The function `f(rows, generations)` that checks responses of a task and returns columns of their rows.

    The columns are the metrics under `PREFIX` and, for verified answers, those of `graded`. The check `pairs` takes,
    instead of a generation, the log-probabilities of the tokens of both responses of a row.

    Raises:
        ValueError, FileNotFoundError: an unknown check, or the rows or the task lack what it needs.
    """
    name = task.check
    if name not in CHECKS and ":" not in name:
        known = f"{', '.join(CHECKS)}, or your own file.py:function"
        raise ValueError(f"check: {name!r} is no check{nearest(name, CHECKS)} Known: {known}")
    if name in (*KINDS, "exact", "contains") and task.answer is None:
        raise ValueError(f'the check {name} needs the key answer, such as answer: "{{answer}}"')
    if task.answer is not None and not all(isinstance(row["answer"], str) for row in rows):
        raise ValueError(f"answer: {task.answer} is a list in the data, and one text is needed")
    columns = COLUMNS.get(name, ())
    if not all(row.keys() >= set(columns) for row in rows):
        raise ValueError(f"the check {name} needs {' and '.join(columns)} in every row of the data")
    if name in KINDS:
        grade = VerifiedGrader(name)
        return lambda rows, found: [_verified(row, one, grade) for row, one in zip(rows, found, strict=True)]
    if name == "rubric":
        check = _rubric(task)
    else:
        of_one = _check_of_one(name)

        def check(rows: Sequence[Row], found: Sequence[Any]) -> list[Metrics]:
            return [of_one(row, one) for row, one in zip(rows, found, strict=True)]

    return lambda rows, found: [_columns(metrics) for metrics in check(rows, found)]


def _columns(metrics: Mapping[str, Any]) -> Row:
    return {PREFIX + name: value for name, value in metrics.items()}


def _verified(row: Row, one: Any, grade: Grader) -> Row:
    found = graded(row, one, grade)
    return found | _columns({"accuracy": found["answer_reward"], "format": found["format_reward"]})


def _check_of_one(name: str) -> Callable[[Row, Any], Metrics]:
    if name in ("exact", "contains"):
        same = str.__eq__ if name == "exact" else str.__contains__
        return lambda row, one: {"accuracy": float(same(_plain(one.text), _plain(row["answer"])))}
    if name == PAIRS:
        return lambda _, pair: _likelier(*pair)
    if name in EMBEDDED:
        score = known_score(name)
        return lambda row, one: {"score": score(last_user_text(row["prompt"]), one.text, finished=one.finished)}
    own = load_function(name, "check")

    def check(row: Row, one: Any) -> Metrics:
        found = own(one.text, row)
        return {**found} if isinstance(found, Mapping) else {"accuracy": None if found is None else float(found)}

    return check


def _likelier(chosen, rejected) -> Metrics:
    """Whether the chosen response is likelier, in sum and per token; ties are half."""
    margins = {"summed": chosen.sum() - rejected.sum(), "per token": chosen.mean() - rejected.mean()}
    return {name: 0.5 if margin == 0 else float(margin > 0) for name, margin in margins.items()}


def _plain(text: str) -> str:
    """A text without differences in case and spaces."""
    return " ".join(text.split()).casefold()


def _rubric(task: Task):
    """A judge that checks responses by the criteria of their rows or of the task."""
    if task.judge is None:
        raise ValueError("the check rubric needs the key judge, a model's name, and perhaps base_url")
    from trl_ext.evaluation.judging.openai_model import OpenAIModel
    from trl_ext.evaluation.judging.rubric import RubricReward

    api = "chat" if task.base_url else "responses"
    reward = RubricReward(OpenAIModel(task.judge, base_url=task.base_url, api=api))

    def check(rows: Sequence[Row], found: Sequence[Any]) -> list[Metrics]:
        rubrics = [row.get("rubric") or task.rubric for row in rows]
        values = reward([row["prompt"] for row in rows], [one.text for one in found], rubric=rubrics)
        return [{"rubric": value} for value in values]

    return check
