"""The examination of a built trainer, and the callback that watches its first steps."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from trl_ext.doctor.patient import Example, Patient, Sampled
from trl_ext.doctor.report import Report
from trl_ext.doctor.sampled import read_sampled
from trl_ext.doctor.table import run_checks
from trl_ext.files import brief
from trl_ext.rollouts.generation import prompt_tokens

BEFORE_TRAINING = ("data", "model", "configuration")


def examine(trainer: Any) -> Report:
    """Check a trainer's data, model and configuration, without a step.

    Args:
        trainer: a built trainer of TRL or of this library, such as a `DPOTrainer` or a `PolicyTrainer`.
    """
    patient = Patient(trainer)
    with _same_random_numbers():
        report = run_checks(patient, BEFORE_TRAINING)
        show_rows(patient, report)
    return report


def report_before_training(trainer: Any) -> None:
    """Print what `examine` finds, or one line, in the main process. It never raises an error."""
    if not trainer.accelerator.is_main_process:
        return
    try:
        text = examine(trainer).text(color=use_color())
    except Exception as error:  # A training that works must not fail by its doctor.
        text = f"doctor: no check was made ({brief(f'{type(error).__name__}: {error}', 200)})"
    print(f"{text}\n" if "\n" in text else text)


def use_color() -> bool:
    """Whether text is printed to a terminal whose user has not set NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """What a collator draws does not change the training's random numbers."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


class DoctorCallback(TrainerCallback):
    """Examines a trainer when training begins, watches its first steps, and prints a report after each of the two.

    It logs the metrics of each of these steps, whatever `logging_steps` is. It reads rewards that training computed,
    and calls no reward function.

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
        with _same_random_numbers():
            self._show(state, run_checks(self.patient, (*BEFORE_TRAINING, "probe")))
        models = {"policy": self.patient.trainable}
        if self.patient.reference is not None:
            models["reference"] = list(self.patient.reference.parameters())
        self._watched = {name: _some(weights) for name, weights in models.items()}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step <= self._last:
            control.should_log = True
            if self.patient.kind == "policy":
                self._read_sampled(state.global_step)
        if self.stop and state.global_step >= self._last:
            control.should_training_stop = True

    def _read_sampled(self, step: int) -> None:
        """Read the step's responses; what cannot be read is named in the report and never ends the training."""
        try:
            read_sampled(self.patient, step)
        except Exception as error:
            self.report.skipped["sampled responses"] = brief(f"{type(error).__name__}: {error}", 200)

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
            with _same_random_numbers():
                report = run_checks(self.patient, ("steps",))
                show_rows(self.patient, report)
            self._show(state, report)

    def _show(self, state, report: Report) -> None:
        first = not self.report.checked
        self.report.add(report)
        # Without a finding, one line is printed in the end, and it counts all checks.
        shown = self.report if self.report.healthy and not first else report
        if state.is_world_process_zero and (report.findings or shown is self.report):
            self.show(shown.text(color=use_color()))


def _some(weights: list) -> list[tuple[Any, torch.Tensor]]:
    """Up to five weights, spread over the model, each with a copy of its first numbers."""
    weights = [weight for weight in weights if weight.numel()]
    chosen = {index * (len(weights) - 1) // 4 for index in range(5)} if weights else set()
    return [(weights[index], _part(weights[index]).clone()) for index in sorted(chosen)]


def _part(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().flatten()[:10_000].float()


def show_rows(patient: Patient, report: Report) -> None:
    """Add two rows, and the figures of what was watched, to a report as far as they can be read."""
    sampled = patient.sampled
    report.figures |= {"rewards": [one.reward for one in sampled], "updates": patient.logs}
    try:
        examples = patient.examples
        if sampled:
            examples = [_example(patient, one) for one in sampled]
        report.figures["lengths"] = [sum(one.learned) or len(one.ids) for one in examples]
        report.rows = [patient.tokens(examples[index]) for index in {0, len(examples) - 1}]
    except Exception:  # The checks have already said why the rows cannot be read.
        return


def _example(patient: Patient, sampled: Sampled) -> Example:
    """A sampled response after its prompt."""
    prompt, response = (
        prompt_tokens(patient.tokenizer, sampled.prompt, None),
        patient.tokenizer(sampled.text, add_special_tokens=False)["input_ids"],
    )
    return Example([*prompt, *response], [False] * len(prompt) + [True] * len(response), False, {})
