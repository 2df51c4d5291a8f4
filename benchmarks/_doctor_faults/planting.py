"""How faults are planted: into a built trainer, or into a run of three steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks._doctor_runs import build, data_of, watch
from trl_ext.doctor import Report, examine

# ---- Faults in what a built trainer holds: functions of the trainer and of `patch(owner, attribute, value)` ----


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault by the name of its check, and the kinds of trainers that it is planted in."""

    name: str
    kinds: str
    plant: Callable


def examine_with(trainer, fault: Fault) -> Report:
    """Examine a trainer with a fault in it, which is taken out again."""
    with contextlib.ExitStack() as stack:

        def patch(owner, name, value):
            # Not unittest.mock, which deletes what is not in an object's own dictionary, as in tensors.
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        fault.plant(trainer, patch)
        return examine(trainer)


def change_columns(**edits):
    """Replace columns of the tokenized data: name -> function of the row."""

    def plant(trainer, patch):
        rows = [row | {name: edit(row) for name, edit in edits.items()} for row in trainer.train_dataset]
        patch(trainer, "train_dataset", type(trainer.train_dataset).from_list(rows))

    return plant


def change_setting(*path: str, value):
    def plant(trainer, patch):
        for name in path[:-1]:
            trainer = getattr(trainer, name)
        patch(trainer, path[-1], value)

    return plant


# ---- Faults in whole runs: settings, rows, or changes of the trainer before three steps ----


@dataclasses.dataclass(frozen=True)
class RunFault:
    """A fault that a run of three steps has from its beginning.

    Attributes:
        name: the name of its check.
        kind: the kind of trainer.
        options: settings and arguments of the trainer; functions of no argument make those that are not shared.
        rows: changes the training rows.
        held_out: changes the held-out rows.
        plant: changes the trainer.
        only: `trl` or `trl_ext` for a fault that the other trainer does not allow.
    """

    name: str
    kind: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: Callable | None = None
    held_out: Callable | None = None
    plant: Callable | None = None
    only: str | None = None

    def report(self, own: bool, model: str) -> Report:
        train, held_out = data_of(self.kind)
        options = {name: value() if name in _MADE else value for name, value in self.options.items()}
        train = self.rows(train) if self.rows else train
        held_out = self.held_out(held_out) if self.held_out else held_out
        trainer = build(self.kind, own, model=model, train=train, held_out=held_out, **options)
        if self.plant:
            self.plant(trainer)
        return watch(trainer)


_MADE = ("peft_config", "reward_funcs", "reward_processing_classes")
