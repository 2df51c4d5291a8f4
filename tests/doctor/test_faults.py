"""Planted faults are named, and runs without a fault have no alarm."""

from __future__ import annotations

import pytest

from tests.doctor.faults import FAULTS, plants
from tests.doctor.runs import build, healthy_runs
from trl_ext.doctor import CHECKS, examine
from trl_ext.doctor.patient import Patient

RUNS = healthy_runs()
# One trainer of each fault, of TRL and of this library in turn; the others are slow.
PLANTS = {name: plant for name, *plant in plants()}
QUICK = {name.split("-")[0]: name for name, (fault, *_) in PLANTS.items() if not fault.steps}.values()


def names_of(report) -> set[str]:
    return {finding.name for finding in (*report.findings, *report.notes)}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PLANTS])
def test_a_planted_fault_is_named(name):
    fault, kind, own, model = PLANTS[name]
    assert fault.name in names_of(fault.report(kind, own, model()))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_without_a_fault_has_no_alarm(name):
    assert RUNS[name]().names == []


@pytest.mark.parametrize("kind", ["sft", "preference", "reward", "policy"])
def test_a_trainer_without_a_fault_has_no_alarm(kind):
    report = examine(build(kind, kind in ("sft", "policy")))
    assert (report.names, report.skipped) == ([], {})


def test_every_check_has_a_planted_fault():
    assert {fault.name for fault in FAULTS} == CHECKS.keys()


def test_packed_documents_are_read_one_by_one():
    trainer = build("sft", False, packing=True, max_length=128)
    patient = Patient(trainer)
    ends = [one.ids[-1] for one in patient.examples]
    assert len(patient.examples) > 20 and ends.count(trainer.processing_class.eos_token_id) > 0.8 * len(ends)
    assert examine(trainer).skipped == {}
