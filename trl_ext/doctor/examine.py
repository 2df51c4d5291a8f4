"""The examination of a built trainer, and the callback that watches its first steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from trl_ext.doctor.patient import Patient
from trl_ext.doctor.report import Report
from trl_ext.doctor.table import run_checks

BEFORE_TRAINING = ("data", "model", "configuration")


def examine(trainer: Any) -> Report:
    """Check a trainer's data, model and configuration, without a step.

    Args:
        trainer: a built trainer of TRL or of this library, such as a `DPOTrainer` or a `PolicyTrainer`.
    """
    # A collator may draw random numbers; those of the training must not change.
    with torch.random.fork_rng():
        return run_checks(Patient(trainer), BEFORE_TRAINING)


class DoctorCallback(TrainerCallback):
    """Examines a trainer when training begins, watches its first steps, and prints a report after each of the two.

    It logs the metrics of each of these steps, whatever `logging_steps` is. It changes nothing else.

    Args:
        trainer: the trainer that it is added to.
        steps: how many steps to watch.
        stop: end the training after them.
        show: what receives the text of a report.

    Attributes:
        report: all findings so far.
    """

    def __init__(self, trainer: Any, *, steps: int = 3, stop: bool = False, show: Callable[[str], None] = print):
        self.patient = Patient(trainer)
        self.steps = steps
        self.stop = stop
        self.show = show
        self.report = Report()
        self._watched: dict[str, list] = {}
        self._last = steps

    def on_train_begin(self, args, state, control, **kwargs):
        # The datasets and the length of the run may have changed since the trainer was built.
        self.patient = Patient(self.patient.trainer)
        self.patient.max_steps = state.max_steps
        self.report = Report()
        self._last = state.global_step + self.steps
        with torch.random.fork_rng():
            self._show(state, run_checks(self.patient, BEFORE_TRAINING))
        models = {"policy": self.patient.trainable}
        if self.patient.reference is not None:
            models["reference"] = list(self.patient.reference.parameters())
        self._watched = {name: _some(weights) for name, weights in models.items()}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step <= self._last:
            control.should_log = True
        if self.stop and state.global_step >= self._last:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not logs or "learning_rate" not in logs or state.global_step > self._last or not self._watched:
            return
        self.patient.logs.append({"step": state.global_step, **logs})
        if state.global_step == self._last:
            # ZeRO-3 leaves nothing to watch on a process.
            for name, weights in ((name, weights) for name, weights in self._watched.items() if weights):
                changes = [(_part(weight) - before).abs().max().item() for weight, before in weights]
                self.patient.moved[name] = max(changes, default=0.0)
            self._watched = {}
            self._show(state, run_checks(self.patient, ("steps",)))

    def _show(self, state, report: Report) -> None:
        first = not self.report.checked
        self.report.add(report)
        # Without a finding, one line is printed in the end, and it counts all checks.
        shown = self.report if self.report.healthy and not first else report
        if state.is_world_process_zero and (report.findings or shown is self.report):
            self.show(shown.text(color=sys.stdout.isatty()))


def _some(weights: list) -> list[tuple[Any, torch.Tensor]]:
    """Up to five weights, spread over the model, each with a copy of its first numbers."""
    weights = [weight for weight in weights if weight.numel()]
    chosen = {index * (len(weights) - 1) // 4 for index in range(5)} if weights else set()
    return [(weights[index], _part(weights[index]).clone()) for index in sorted(chosen)]


def _part(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().flatten()[:10_000].float()
