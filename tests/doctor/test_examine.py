"""A planted fault is named, a run without one has no alarm, and what a run's folder shows."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

from tests.doctor.faults import FAULTS, plants
from tests.doctor.runs import build, healthy_runs
from trl_ext.doctor import CHECKS, DoctorCallback, cli, examine
from trl_ext.doctor.examine import read_sampled, report_before_training, run_checks
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


def test_before_training_one_line_is_printed_and_nothing_is_changed(capsys, monkeypatch):
    trainer, state = build("sft", True), torch.get_rng_state()
    report_before_training(trainer)
    assert re.fullmatch(r"doctor: no fault found by \d+ checks\n", capsys.readouterr().out)
    assert torch.get_rng_state().equal(state)
    # The package's name `examine` is the function, and not its module.
    monkeypatch.setitem(report_before_training.__globals__, "examine", lambda trainer: 1 / 0)
    report_before_training(trainer)
    assert "doctor: no check was made (ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "own"), [("sft", True), ("preference", False), ("policy", False)])
def test_the_callback_changes_neither_weights_nor_the_order_of_rows(kind, own):
    texts, weights = [], []
    for watched in (True, False):
        trainer = build(kind, own, max_steps=3, logging_steps=50, seed=1)
        if watched:
            doctor = DoctorCallback(trainer, show=texts.append)
            trainer.add_callback(doctor)
        trainer.train()
        weights.append(next(trainer.model.parameters()).detach().clone())
    assert texts == [f"doctor: no fault found by {len(doctor.report.checked)} checks"]
    assert "rows-in-order" in doctor.report.checked and not doctor.report.skipped
    assert [row["step"] for row in doctor.patient.logs] == [1, 2, 3] and doctor.patient.moved["policy"] > 0
    assert weights[0].equal(weights[1])


def test_an_error_of_the_doctor_does_not_end_the_training():
    trainer = build("sft", False, max_steps=4)
    doctor = DoctorCallback(trainer, steps=2, show=lambda text: 1 / 0)
    trainer.add_callback(doctor)
    trainer.train()
    assert trainer.state.global_step == 4 and "ZeroDivisionError" in doctor.report.skipped["the first steps"]
    doctor.patient.kind, trainer._logs = "policy", {"prompt": [1], "completion": [2], "rewards": 3}
    control = SimpleNamespace(should_log=False, should_training_stop=False)
    doctor.on_step_end(None, SimpleNamespace(global_step=1), control)
    assert control.should_log and "AttributeError" in doctor.report.skipped["sampled responses"]


def test_rewards_are_read_and_no_reward_function_is_called():
    trainer = SimpleNamespace(args=None)
    trainer._logs = {"prompt": ["p"] * 2, "completion": ["a", "b"], "rewards": {"one": [1.0, None]}}
    patient = Patient(trainer)
    for _ in range(2):
        read_sampled(patient, 1)
    assert [(one.text, one.rewards) for one in patient.sampled] == [("a", {"one": 1.0}), ("b", {"one": None})]


def test_a_stream_is_read_once_and_no_further_than_needed():
    drawn = []

    class Stream:
        def __iter__(self):
            for index in itertools.count():
                drawn.append(index)
                yield {"prompt": str(index), "chosen": f"yes {index}", "rejected": "no"}

    run_checks(Patient(SimpleNamespace(train_dataset=Stream(), args=None), kind="preference"), ("trainer",))
    assert drawn == list(range(48))


def write_run(folder, reward: float, deviation: float) -> str:
    row = {"learning_rate": 1e-5, "reward": reward, "reward_std": deviation, "frac_reward_zero_std": 0.2}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in (5, 10, 15)))
    (folder / "config.yaml").write_text("max_steps: 60\nnum_generations: 8\nlearning_rate: 1.0e-5\n")
    return str(folder)


def test_the_folder_of_a_run(tmp_path, capsys):
    assert cli.main([write_run(tmp_path, 0.4, 0.2)]) == 0
    assert capsys.readouterr().out.startswith("doctor: no fault found by ")
    assert cli.main([write_run(tmp_path, 0.0, 0.0), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in told["findings"]] == ["rewards-equal"] and not told["healthy"]
    assert told["skipped"] == {}


def test_the_folder_of_a_run_of_trl(tmp_path, capsys):
    rows = [{"step": step, "learning_rate": 1e-5, "grad_norm": 0.0, "rewards/margins": 0.0} for step in (1, 2, 3)]
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert cli.main([str(tmp_path)]) == cli.main([str(tmp_path / "checkpoint-3")]) == 1
    assert capsys.readouterr().out.count("weights-do-not-move") == 2


def test_wrong_command_lines(tmp_path, capsys):
    for wrong, said in (([str(tmp_path)], "has no step in metrics.jsonl"), (["--recipe", "dpoo"], "no recipe 'dpoo'")):
        assert cli.main(wrong) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([str(tmp_path), "--beta", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dpo", "reward_model", "grpo_math"])
def test_a_recipe(recipe, capsys):
    assert cli.main(["--recipe", recipe, "--steps", "3"]) == 0
    assert capsys.readouterr().out.startswith("doctor: no fault found by ")
    assert cli.main(["--recipe", recipe, "--learning_rate", "1e-12"]) == 1
    assert "learning-rate-off" in capsys.readouterr().out
