"""A function that an assignment can ask for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trl_ext.assignment.catalog.cases import Arguments, Builder
from trl_ext.assignment.catalog.drawing import Draw


@dataclass(frozen=True)
class Task:
    """A function to implement.

    Attributes:
        name: the library package and the name of the function in it, such as `losses.dpo`.
        kind: the kind of function, such as `preference loss`.
        summary: the task in one line, without a formula.
        shapes: the shapes of the arguments and of the result.
        build: builds the arguments of a case.
        options: further arguments, each with the values that cases take in turn; None leaves it out.
        variants: the number of consecutive cases that use all its settings.
        paper: the paper, if the library's docstring names none.
        notes: conventions that the library's docstring does not state.
        compared: the parts of a returned tuple that are compared; None for all.
        own_backward: whether the function calls `backward` itself.
        special: the kinds of special cases that the function is tested on.
        in_float32: whether the function is also tested on float32.
        unordered: whether the returned losses may be in any order.
    """

    name: str
    kind: str
    summary: str
    shapes: str
    build: Builder
    options: dict[str, tuple] = field(default_factory=dict)
    variants: int = 2
    paper: str = ""
    notes: str = ""
    compared: list[int] | None = None
    own_backward: bool = False
    special: tuple[str, ...] = ()
    in_float32: bool = False
    unordered: bool = False

    @property
    def function(self) -> Callable:
        package, _, function = self.name.rpartition(".")
        # The library composes policy losses from parts, so no package contains whole ones.
        module = "assignment.catalog.whole_losses" if package == "assignment" else package
        return getattr(importlib.import_module(f"trl_ext.{module}"), function)

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    def arguments(self, draw: Draw) -> Arguments:
        """The arguments of a case."""
        chosen = {name: draw.turn(*values) for name, values in self.options.items()}
        return self.build(draw) | {name: value for name, value in chosen.items() if value is not None}


def group(tasks: dict[str, Task], kind: str, shapes: str = "", **common: Any) -> Callable[..., None]:
    """A function that adds tasks with a kind, shapes and settings in common; other settings are options."""

    def add(name: str, summary: str, build: Builder, options: dict[str, tuple] | None = None, **settings: Any) -> None:
        settings = {"kind": kind, "shapes": shapes, **common, **settings}
        tasks[name] = Task(name=name, summary=summary, build=build, options=options or {}, **settings)

    return add
