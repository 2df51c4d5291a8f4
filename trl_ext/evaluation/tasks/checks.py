"""The checks of tasks: functions from responses to metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.data.benchmark import EMBEDDED, known_score
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.tasks import ifeval
from trl_ext.evaluation.tasks.task import Row, Task
from trl_ext.names import load_function
from trl_ext.registry import nearest
from trl_ext.rewards.verified import KINDS, grader

# The metrics of a response by name: a number, several, or None if the response is not counted.
Metrics = dict[str, Any]
Check = Callable[[Sequence[Row], Sequence[str], Sequence[bool]], list[Metrics]]
PAIRS = "pairs"
CHECKS = (*KINDS, "exact", "contains", "ifeval", "rubric", PAIRS, *EMBEDDED)


def make_check(task: Task, rows: Sequence[Row]) -> Check:
    """The function `f(rows, responses, finished)` that checks responses of a task.

    Raises:
        ValueError, FileNotFoundError: an unknown check, or the rows or the task lack what it needs.
    """
    name = task.check
    if ":" in name:
        own = load_function(name, "check")
        return each(lambda row, text, finished: named(own(text, row)))
    if name not in CHECKS:
        known = f"{', '.join(CHECKS)}, or your own file.py:function"
        raise ValueError(f"check: {name!r} is no check{nearest(name, CHECKS)} Known: {known}")
    if name in (*KINDS, "exact", "contains"):
        if task.answer is None:
            raise ValueError(f'the check {name} needs the key answer, such as answer: "{{answer}}"')
        if name in KINDS:
            grade = grader(name)
            return each(
                lambda row, text, finished: {
                    "accuracy": (found := grade(text, row))["answer_reward"],
                    "format": found["format_reward"],
                }
            )
        same = str.__eq__ if name == "exact" else str.__contains__
        return each(lambda row, text, finished: {"accuracy": float(same(plain(text), plain(row["answer"])))})
    if name == "ifeval":
        ifeval.check_rows(rows)
        return each(lambda row, text, finished: ifeval.metrics(row, text))
    if name == "rubric":
        return rubric_check(task)
    score = known_score(name)
    return each(lambda row, text, finished: {"score": score(last_user_text(row["prompt"]), text, finished=finished)})


def each(check: Callable[[Row, str, bool], Metrics]) -> Check:
    """A check of one response, applied to all."""
    return lambda rows, texts, finished: [check(*one) for one in zip(rows, texts, finished, strict=True)]


def named(found: Any) -> Metrics:
    """What a user's check returns, as metrics; a number is the accuracy."""
    return {**found} if isinstance(found, Mapping) else {"accuracy": None if found is None else float(found)}


def plain(text: str) -> str:
    """A text without differences in case and spaces."""
    return " ".join(text.split()).casefold()


def rubric_check(task: Task) -> Check:
    """A judge that checks responses by the criteria of the task or of their rows.

    Raises:
        ValueError: the task names no judge.
    """
    if task.judge is None:
        raise ValueError("the check rubric needs the key judge, a model's name, and perhaps base_url")
    from trl_ext.evaluation.judging.openai_model import OpenAIModel
    from trl_ext.evaluation.judging.rubric import RubricReward

    api = {"api": "chat"} if task.base_url else {}
    reward = RubricReward(OpenAIModel(task.judge, base_url=task.base_url, **api))

    def check(rows: Sequence[Row], texts: Sequence[str], finished: Sequence[bool]) -> list[Metrics]:
        rubrics = [row.get("rubric") or task.rubric for row in rows]
        return [{"rubric": value} for value in reward([row["prompt"] for row in rows], texts, rubric=rubrics)]

    return check
