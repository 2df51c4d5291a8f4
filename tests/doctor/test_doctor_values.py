"""The doctor's checks of single values: logged figures, token ids, lengths and rewards."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.doctor.test_doctor import patient_of
from trl_ext.doctor import CHECKS, DoctorCallback
from trl_ext.doctor.patient import Example, Patient
from trl_ext.doctor.table import run_checks

CLIPPED, DIFFERS = "completions/clipped_ratio", "sampling/sampling_logp_difference/mean"


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        (CLIPPED, (0.97, 0.95, 0.97), ["responses-all-cut"]),
        (CLIPPED, (0.97, 0.85, 0.97), []),
        (DIFFERS, (0.01, 0.6, 1.5), ["ratio-not-one"]),
        (DIFFERS, (0.01, 0.1, 0.19), []),
    ],
)
def test_values_that_change_from_step_to_step(name, values, found):
    rows = [{"step": step, "learning_rate": 1e-4, name: value} for step, value in enumerate(values, start=1)]
    report = run_checks(Patient(kind="policy", logs=rows), ("steps",))
    assert report.names == found
    shown = {CLIPPED: "at each step 95% of the responses or more", DIFFERS: "differ by 1.50 at step 3"}[name]
    assert not found or shown in report.findings[0].evidence


def test_a_second_beginning_token_before_the_response():
    patient, begin = Patient(kind="sft"), 7
    patient.tokenizer = SimpleNamespace(bos_token_id=begin, bos_token="<s>", decode=str, eos_token_id=2)
    patient.stop_ids = {2}
    for ids, found in (([7, 4, 7, 5, 2], True), ([7, 7, 4, 5, 2], True), ([7, 4, 5, 7, 2], False), ([4, 7, 5], False)):
        patient.examples = [Example(ids, [index > 1 for index in range(len(ids))], False, {})]
        assert (CHECKS["begin-token-doubled"].function(patient) is not None) is found


def test_lengths_of_messages_and_empty_responses():
    def side(text):
        return [{"role": "assistant", "content": text}]

    pairs = [{"prompt": f"{i}", "chosen": side("a" * 200 + str(i)), "rejected": side(f"{i}")} for i in range(240)]
    assert run_checks(patient_of(pairs), ("data",)).names == ["length-predicts-label"]
    for empty in ([], "", side("")):
        report = run_checks(patient_of([{**pairs[0], "rejected": empty}, *pairs[1:]]), ("data",))
        assert not {"length-predicts-label", "labels-swapped-in-part"} & report.skipped.keys()


def test_rewards_that_a_function_does_not_give():
    trainer = SimpleNamespace(reward_funcs=[1, 2], reward_weights=None, args=None)
    rewards = {"one": [1.0, math.nan, math.nan], "two": [math.nan, 0.5, None]}
    trainer._logs = {"prompt": ["p"] * 3, "completion": ["a", "b", "c"], "rewards": rewards}
    doctor = DoctorCallback(trainer)
    doctor._read_sampled(1)
    assert [one.reward for one in doctor.patient.sampled] == [1.0, 0.5, pytest.approx(math.nan, nan_ok=True)]
    trainer._logs = {"prompt": ["p"], "completion": ["d"], "rewards": {"one": ["bad"]}}
    doctor._read_sampled(2)
    assert "TypeError" in doctor.report.skipped["sampled responses"]
