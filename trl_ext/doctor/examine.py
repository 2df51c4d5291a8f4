"""The table of checks, the report of an examination, and the callback that watches the first steps of a training."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from trl_ext.doctor.patient import Patient, Sampled, as_text, plain_text
from trl_ext.files import brief

# Nothing useful can be learned; something is probably not as intended; no fault, and often taken for one.
SEVERITIES = ("error", "warning", "info")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault: the figures it is based on as one sentence, what to change, and the name of its check.

    `tokens` is a row as the trainer sees it: each token's text, and whether the loss is taken on it.
    """

    evidence: str
    remedy: str = ""
    severity: str = ""
    tokens: list[tuple[str, bool]] | None = None
    name: str = ""


# Name -> severity, the stages in which it runs (`trainer`, `settings`, `steps`), the kinds of trainers that it is for,
# and a function of a patient that gives a finding, its evidence alone, or None; its docstring is the remedy.
CHECKS: dict[str, tuple[str, list[str], list[str], Callable[[Any], Finding | str | None]]] = {}


def check(name: str, severity: str, needs: str, kinds: str = "sft preference reward policy other") -> Callable:
    """Decorator that adds a function to the table."""

    def add(function):
        CHECKS[name] = (severity, needs.split(), kinds.split(), function)
        return function

    return add


@dataclasses.dataclass
class Report:
    """The findings of an examination, errors first, and notes on what is no fault and often taken for one.

    `checked` has the names of the checks that ran, `skipped` of those that could not read what they need, with why.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[Finding] = dataclasses.field(default_factory=list)
    checked: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return not self.findings

    @property
    def names(self) -> list[str]:
        return [finding.name for finding in self.findings]

    def add(self, other: Report) -> None:
        """Add the findings of a later examination of the same run."""
        self.findings += [one for one in other.findings if one.name not in self.names]
        self.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        self.notes += other.notes
        self.checked += [name for name in other.checked if name not in self.checked]
        self.skipped = {n: e for n, e in {**self.skipped, **other.skipped}.items() if n not in self.checked}

    def text(self) -> str:
        """The findings for a terminal; one line if there is none, and one for each note."""
        reasons = {why: [name for name in self.skipped if self.skipped[name] == why] for why in self.skipped.values()}
        skipped = "".join(f"; not checked: {', '.join(names)} ({why})" for why, names in reasons.items())
        count = f"{len(self.findings) or 'no'} fault{'s' if len(self.findings) > 1 else ''}"
        lines = [f"doctor: {count} found by {len(self.checked)} checks{skipped}"]
        for one in self.findings:
            tokens = [f"  tokens: {shown_tokens(one.tokens)}"] if one.tokens else []
            lines += [f"\n{one.name} ({one.severity})", f"  {one.evidence}", *tokens, f"  remedy: {one.remedy}"]
        lines += [f"note: {one.evidence}. {one.remedy}" for one in self.notes]
        return "\n".join(lines)


def run_checks(patient: Any, stages: Collection[str]) -> Report:
    """Run the checks of these stages. A check that fails itself is reported as skipped."""
    report = Report()
    for name, (severity, needs, kinds, function) in CHECKS.items():
        if patient.kind not in kinds or not set(stages) & set(needs):
            continue
        try:
            found = function(patient)
        except Exception as error:  # A custom dataset or collator may hold anything; the other checks still count.
            report.skipped[name] = brief(f"{type(error).__name__}: {error}", 200)
            continue
        report.checked.append(name)
        if found:
            found = Finding(found) if isinstance(found, str) else found
            remedy, severity = found.remedy or " ".join(function.__doc__.split()), found.severity or severity
            found = dataclasses.replace(found, name=name, remedy=remedy, severity=severity)
            (report.notes if severity == "info" else report.findings).append(found)
    report.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return report


def shown_tokens(tokens: list[tuple[str, bool]], *, limit: int = 60) -> str:
    """A row's last tokens, separated by |; learned ones stand in brackets."""
    shown = "... " if len(tokens) > limit else ""
    for learned, part in itertools.groupby(tokens[-limit:], key=lambda token: token[1]):
        text = "|".join(text.replace("\n", "\\n") for text, _ in part)
        shown += f"[{text}] " if learned else f"{text}|"
    return shown.rstrip(" |")


def examine(trainer: Any) -> Report:
    """Check the data, model and configuration of a built trainer, of TRL or of this library, without a step."""
    return _examined(Patient(trainer), "trainer", "settings")


def _examined(patient: Patient, *stages: str) -> Report:
    """Run the checks of these stages; the training's random numbers stay as they are."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        report = run_checks(patient, stages)
    random.setstate(states[0])
    np.random.set_state(states[1])
    return report


def report_before_training(trainer: Any) -> None:
    """Print what `examine` finds, or one line, in the main process. It never raises an error."""
    if not trainer.accelerator.is_main_process:
        return
    try:
        text = examine(trainer).text()
    except Exception as error:  # A training that works must not fail by its doctor.
        text = f"doctor: no check was made ({brief(f'{type(error).__name__}: {error}', 200)})"
    print(f"{text}\n" if "\n" in text else text)


class DoctorCallback(TrainerCallback):
    """Examines a trainer when training begins, watches its first steps, and shows a report after each of the two.

    It logs the metrics of each of these steps, whatever `logging_steps` is, and calls no reward function. An error of
    the doctor is named in `report`, and does not end the training, which `stop` ends after the watched steps.
    """

    def __init__(self, trainer: Any, *, steps: int = 3, stop: bool = False, show: Callable[[str], None] = print):
        self.patient, self.report, self._watched, self._last = Patient(trainer), Report(), {}, steps
        self.steps, self.stop, self.show = steps, stop, show

    @contextlib.contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.report.skipped[what] = brief(f"{type(error).__name__}: {error}", 200)

    def on_train_begin(self, args, state, control, **kwargs):
        self.report, self._watched, self._last = Report(), {}, state.global_step + self.steps
        with self._harmless("the trainer"):
            # The datasets may have changed since the trainer was built.
            self.patient = Patient(self.patient.trainer, loader=kwargs.get("train_dataloader"))
            self._add(state, "trainer", "settings")
            self._watched["policy"], reference = _some(self.patient.trainable), self.patient.reference
            self._watched["reference"] = _some([] if reference is None else reference.parameters())

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= state.global_step <= self._last
        control.should_training_stop |= self.stop and state.global_step >= self._last
        if state.global_step <= self._last and self.patient.kind == "policy":
            with self._harmless("sampled responses"):
                read_sampled(self.patient, state.global_step)

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not logs or "learning_rate" not in logs or state.global_step > self._last:
            return
        self.patient.logs.append({"step": state.global_step, **logs})
        if state.global_step == self._last:
            with self._harmless("the first steps"):
                for name, weights in self._watched.items():
                    changes = [(one.detach().flatten()[: len(old)] - old).abs().max().item() for one, old in weights]
                    self.patient.moved |= {name: max(changes)} if changes else {}
                self._add(state, "steps")

    def _add(self, state, *stages: str) -> None:
        report = _examined(self.patient, *stages)
        self.report.add(report)
        # Without a finding, one line is printed in the end, and it counts all checks.
        if state.is_world_process_zero and (report.findings or (self.report.healthy and "steps" in stages)):
            self.show((self.report if self.report.healthy else report).text())


def _some(weights) -> list[tuple[Any, torch.Tensor]]:
    """Up to five weights, spread over the model, each with a copy of its first numbers."""
    weights = [weight for weight in weights if weight.numel()]
    return [(weight, weight.detach().flatten()[:10_000].clone()) for weight in weights[:: len(weights) // 5 + 1]]


def read_sampled(patient: Patient, step: int) -> None:
    """Add the responses of the latest rollout, unless they are there already.

    TRL's GRPO and RLOO trainers keep them, with their rewards, of all processes; other trainers have none.
    """
    logs = getattr(patient.trainer, "_logs", None) or {}
    rows = zip(logs.get("prompt", ()), logs.get("completion", ()), strict=False)
    new = []
    for index, (prompt, text) in enumerate(rows):
        rewards = {name: values[index] for name, values in logs.get("rewards", {}).items() if index < len(values)}
        new.append(Sampled(step, as_text(prompt), plain_text(text), rewards))
    last = patient.sampled[-len(new) :] if new else []
    if [(one.prompt, one.text) for one in last] != [(one.prompt, one.text) for one in new]:
        patient.sampled += new
