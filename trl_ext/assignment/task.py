"""A function that an assignment can ask for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from trl_ext.assignment.cases import Builder


@dataclass(frozen=True)
class Task:
    """A function to implement.

    Attributes:
        name: in the specification, such as `losses.dpo`.
        reference: where the library has it, `module:function`.
        kind: what it is, such as `preference loss`.
        summary: what to implement, in a line without its formula.
        shapes: of what it takes and returns.
        build: the arguments of a case.
        variants: how many cases in a row go through all its settings.
        paper: where its docstring does not say.
        compared: of a tuple that it returns, the parts that count; None for all.
        differentiated: of a tuple or dict, the parts whose gradient counts; None for those that are compared.
        own_backward: whether it calls `backward` itself.
        special: kinds of cases that it is tried on besides the ordinary ones.
        in_float32: whether it is tried on float32 as well.
        notes: what its docstring does not say, for those who have to write it.
        unordered: whether the losses that it returns may stand in any order.
    """

    name: str
    reference: str
    kind: str
    summary: str
    shapes: str
    build: Builder
    variants: int = 2
    paper: str = ""
    compared: tuple[int, ...] | None = None
    differentiated: tuple[int | str, ...] | None = None
    own_backward: bool = False
    special: tuple[str, ...] = ()
    in_float32: bool = False
    notes: str = ""
    unordered: bool = False

    @property
    def function(self) -> Callable:
        module, _, function = self.reference.partition(":")
        return getattr(importlib.import_module(module), function)

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]
