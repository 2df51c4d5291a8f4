"""The library's functions that an assignment can ask for, with their test inputs.

`python -m trl_ext.assignment --list` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

from trl_ext.assignment.catalog.loss_tasks import LOSS_TASKS
from trl_ext.assignment.catalog.mistakes import MISTAKES
from trl_ext.assignment.catalog.task import Task
from trl_ext.assignment.catalog.text_tasks import TEXT_TASKS
from trl_ext.registry import nearest

TASKS: dict[str, Task] = {**LOSS_TASKS, **TEXT_TASKS}


def task(name: str) -> Task:
    """The task with this name.

    Raises:
        ValueError: there is no such task; the message suggests the nearest name.
    """
    if name in TASKS:
        return TASKS[name]
    known = list(TASKS)
    same = [each for each in known if each.rpartition(".")[2] == name.rpartition(".")[2]]
    hint = f"; did you mean {' or '.join(map(repr, same))}?" if same else nearest(name, known)
    raise ValueError(f"unknown function {name!r}{hint} python -m trl_ext.assignment --list names all {len(known)}")


def mistakes_of(name: str) -> dict[str, Callable]:
    """The known wrong answers to a task, by the message of a test."""
    tables = (rows for tasks, rows in MISTAKES.items() if name in tasks.split())
    return {message: wrong for rows in tables for message, wrong in rows.items()}
