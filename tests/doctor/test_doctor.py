"""The doctor: each check names its planted fault, and is silent on the same trainer without it."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import re
from types import SimpleNamespace

import pytest

from benchmarks import _doctor_faults as planted
from benchmarks import _doctor_runs as healthy
from benchmarks.doctor import strengths
from trl_ext.doctor import CHECKS, DoctorCallback, examine, labels
from trl_ext.doctor.examine import report_before_training
from trl_ext.doctor.page import write_page
from trl_ext.doctor.patient import Patient, Sampled
from trl_ext.doctor.report import shown_tokens
from trl_ext.doctor.table import run_checks
from trl_ext.rewards import ShapedReward
from trl_ext.runs.studies.examination import main

LOGS = planted.LOGGED_FAULTS


@pytest.fixture(scope="module")
def trainers():
    """One trainer of each kind and origin, built when it is first needed."""
    built = {}

    def of(kind: str, own: bool):
        if (kind, own) not in built:
            built[kind, own] = healthy.build(kind, own)
        return built[kind, own]

    return of


EVERY = [(kind, own) for kind in healthy.TRAINERS for own in (False, True)]


@pytest.mark.parametrize(("kind", "own"), EVERY)
def test_planted_faults_are_named_and_healthy_trainers_are_not(kind, own, trainers):
    trainer = trainers(kind, own)
    healthy = examine(trainer)
    assert (healthy.names, healthy.skipped) == ([], {})
    faults = [fault for fault in planted.FAULTS if kind in fault.kinds.split()]
    missed = [fault.name for fault in faults if fault.name not in planted.examine_with(trainer, fault).names]
    assert missed == []
    assert examine(trainer).names == [], "faults are taken out again"


@pytest.mark.parametrize("name", LOGS)
def test_faults_in_logs(name):
    kind, changed, moved = LOGS[name]
    settings = {"stop": ["</answer>"]} if name == "stop-texts-never-occur" else {}
    assert planted.logged(kind, changed, moved, **settings).names == [name]
    assert planted.logged(kind).names == []


def test_every_check_has_a_planted_fault():
    faults = {fault.name for fault in [*planted.FAULTS, *planted.RUN_FAULTS]}
    assert faults | LOGS.keys() | {"responses-collapsed"} == CHECKS.keys()


# Those of new checks that take one or two seconds each.
QUICK = ("parser-never-matches", "identical-samples", "preferences-satisfied", "reward-head-frozen")


@pytest.mark.parametrize("name", QUICK)
def test_faults_of_whole_runs(name):
    fault = next(fault for fault in planted.RUN_FAULTS if fault.name == name)
    assert name in fault.report(False, healthy.toy()).names


@pytest.mark.slow
@pytest.mark.parametrize("plant", planted.run_plants(), ids=lambda plant: f"{plant[0].name}-{plant[2]}-{plant[1]}")
def test_every_fault_of_a_whole_run(plant):
    fault, own, model = plant
    assert fault.name in fault.report(own, getattr(healthy, model)()).names


@pytest.mark.slow
def test_swapped_labels_are_found_where_something_shows_them():
    rows = {row["share"]: row for row in strengths(seeds=1)}
    assert [rows[share]["beside scores"] for share in (0.0, 0.05, 0.4)] == [0, 1, 1]
    assert [rows[share]["in one part"] for share in (0.0, 0.2)] == [0, 1]
    assert not any(row["here and there"] for row in rows.values())


def test_a_contrary_part_is_found_in_labels_that_tokens_predict():
    # Every tenth pair is noise; token 1 is chosen elsewhere, and rejected in the last fifth.
    pairs = [([5, 1], [5, 2]) if index % 10 else ([5], [5, 3]) for index in range(400)]
    pairs[320:] = [(rejected, chosen) for chosen, rejected in pairs[320:]]
    start, share, score, others = labels._most_contrary_part(labels._predicted(pairs))
    assert (start, share) == (0.8, 0.2) and score < -3.5 and others > 3


def test_a_part_of_another_source_is_not_taken_for_swapped_labels():
    rows = healthy.two_sources(400)
    names = [run_checks(patient_of(some), ("data",)).names for some in (rows, rows.remove_columns("source"))]
    assert names == [[], ["labels-swapped-in-part"]]


def patient_of(rows) -> Patient:
    return Patient(SimpleNamespace(train_dataset=rows, args=None), kind="preference")


# ---- Rewards of the first steps ----


def test_the_doctor_calls_no_reward_function():
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(len(completions))
        return [float(len(one[0]["content"])) for one in completions]

    shaped = ShapedReward(reward, ["center"])
    trainer = healthy.build("policy", True, reward_funcs=shaped)
    watched = healthy.watch(trainer, steps=1)
    assert "reward-turned-around" in watched.checked
    assert sum(calls) == len(trainer._logs["prompt"]) == shaped.state_dict()["steps"][0]["count"]


def sampled(answers: str, **rewards: str) -> list[str]:
    """Findings of responses that hold the right answer (1) or another (0), with rewards of one digit each."""
    patient = Patient(kind="policy")
    patient.answers = {"2 + 2": "4"}
    for index, answer in enumerate(answers):
        of = {name: float(digits[index]) for name, digits in rewards.items()}
        text = f"It is {4 if answer == '1' else 5}."
        patient.sampled.append(Sampled(1, "2 + 2", text, of, of["accuracy"] + of.get("format", 0)))
    report = run_checks(patient, ("steps",))
    return [name for name in ("parser-never-matches", "reward-turned-around") if name in report.names]


def test_rewards_of_right_responses():
    right = "1" * 6 + "0" * 10
    assert sampled(right, accuracy=right) == []
    # Lower for right responses than for others; not so if the best of them is as high.
    assert sampled(right, accuracy="0" * 6 + "1" * 10) == ["reward-turned-around"]
    assert sampled(right, accuracy="1" + "0" * 5 + "1" * 10) == []
    # A reward of the form is 0 in the first steps, and another one recognises the right responses.
    assert sampled(right, accuracy=right, format="0" * 16) == []
    assert sampled(right, accuracy="0" * 16, format="0" * 16) == ["parser-never-matches"]


# ---- What cannot be read is not counted as checked ----


def test_packed_documents_are_read_one_by_one():
    trainer = healthy.build("sft", False, packing=True, max_length=128)
    patient = Patient(trainer)
    ends = [one.ids[-1] for one in patient.examples]
    assert len(patient.examples) > 20 and ends.count(trainer.processing_class.eos_token_id) > 0.8 * len(ends)
    assert set(examine(trainer).skipped) == {"prompt-tokens-differ", "loss-on-prompt"}
    wrapped = healthy.build("sft", False, packing=True, packing_strategy="wrapped", max_length=64)
    assert "end-token-missing" in examine(wrapped).skipped


def test_a_stream_without_rows_is_not_counted_as_checked():
    report = run_checks(patient_of([]), ("data",))
    assert "template-missing" in report.skipped and "end-token-missing" in report.skipped


def test_a_stream_is_read_once_and_no_further_than_needed():
    drawn = []

    class Stream:
        def __iter__(self):
            for index in itertools.count():
                drawn.append(index)
                yield {"prompt": str(index), "chosen": f"yes {index}", "rejected": "no"}

    run_checks(patient_of(Stream()), ("data",))
    assert drawn == list(range(48))


def test_pairs_that_the_collator_makes_equal(trainers):
    trainer = trainers("preference", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.data_collator, "max_length", 10)
        assert "chosen-equals-rejected" in examine(trainer).names


def test_skipped_float16_steps_are_no_fault():
    rows = [{"step": s, "learning_rate": 1e-4, "grad_norm": math.inf, "rewards/margins": 0.0} for s in (1, 2, 3)]
    patient = Patient(args=SimpleNamespace(fp16=True), kind="preference", logs=rows)
    patient.moved = {"policy": 0.0}
    assert run_checks(patient, ("steps",)).healthy


def test_a_single_spike_of_the_kl_is_no_fault():
    def found(values):
        rows = [{"step": step, "learning_rate": 1e-4, "kl": value} for step, value in enumerate(values)]
        return run_checks(Patient(kind="policy", logs=rows), ("steps",)).names

    assert found([0.1, 40.0, 0.2, 0.1, 40.0]) == [] and found([0.1, 40.0, 50.0]) == ["kl-explodes"]


@pytest.mark.parametrize(("responses", "severity"), [(24, "warning"), (512, "error")])
def test_few_rewards_of_zero_are_a_warning(responses, severity):
    rows = [{"step": s, "learning_rate": 1e-4, "reward": 0.0, "reward_std": 0.0} for s in (1, 2)]
    settings = SimpleNamespace(generation_batch_size=responses // 2)
    (finding,) = run_checks(Patient(args=settings, kind="policy", logs=rows), ("steps",)).findings
    assert (finding.name, finding.severity) == ("rewards-all-zero", severity)
    assert ("24 responses: up to 12% may be right" in finding.evidence) == (severity == "warning")


def test_prompts_that_are_cut_as_generation_cuts_them():
    trainer = healthy.build("preference", True, max_prompt_tokens=12)
    assert {len(ids) for ids in trainer.train_dataset["prompt_ids"]} == {12}
    assert examine(trainer).names == []


# ---- The report ----


def test_a_check_is_short():
    assert max(len(inspect.getsource(row.function).splitlines()) for row in CHECKS.values()) <= 25


def test_the_tokens_of_a_finding():
    assert shown_tokens([("a", False), ("b", True), ("\n", True)], color=False) == "a|[b|\\n]"


def test_the_page(trainers, tmp_path):
    report = examine(trainers("sft", False))
    report.figures |= {"rewards": [0.0, 0.5, 0.5, math.nan], "updates": [{"step": 1, "learning_rate": 1e-4}]}
    write_page(report, tmp_path / "doctor.html", "<run>")
    page = (tmp_path / "doctor.html").read_text()
    assert "Doctor: &lt;run&gt;" in page and "<run>" not in page and "http" not in page.replace("http-equiv", "")
    assert len(report.rows) == 2 and page.count('<div class="tokens">') == 2
    learned = sum(learned for row in report.rows for _, learned in row)
    assert learned and page.count("<span class=learned>") == learned
    # Two bars of rewards: one value in the first, two in the second.
    assert re.findall(r"<title>([\d.]+ to [\d.]+: \d)</title>", page)[:2] == ["0 to 0.25: 1", "0.25 to 0.5: 2"]


def test_before_training_one_line_is_printed_and_nothing_is_changed(trainers, capsys, monkeypatch):
    import torch

    state = torch.get_rng_state()
    trainer = trainers("sft", True)
    report_before_training(trainer)
    assert re.fullmatch(r"doctor: no fault found by \d+ checks\n", capsys.readouterr().out)
    assert torch.get_rng_state().equal(state)
    # The package's name `examine` is the function, and not its module.
    monkeypatch.setitem(report_before_training.__globals__, "examine", lambda trainer: 1 / 0)
    report_before_training(trainer)
    assert "doctor: no check was made (ZeroDivisionError" in capsys.readouterr().out


# ---- The first steps ----


@pytest.mark.parametrize("own", [False, True])
def test_the_callback_reports_and_changes_no_weight(own):
    texts, weights = [], []
    for watched in (True, False):
        trainer = healthy.build("sft", own, max_steps=3, logging_steps=50, seed=1)
        if watched:
            doctor = DoctorCallback(trainer, show=texts.append)
            trainer.add_callback(doctor)
        trainer.train()
        weights.append(next(trainer.model.parameters()).detach().clone())
    assert texts == [f"doctor: no fault found by {len(doctor.report.checked)} checks"]
    assert [row["step"] for row in doctor.patient.logs] == [1, 2, 3]
    assert doctor.patient.moved["policy"] > 0
    assert weights[0].equal(weights[1])


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("reward", "expected"),
    [(0.0, "rewards-all-zero"), (1.0, "rewards-all-one"), (0.3, "rewards-constant"), (None, "")],
)
def test_rewards_of_real_steps(own, reward, expected, monkeypatch):
    if reward is not None:
        monkeypatch.setattr(healthy, "true_reward", lambda completions, **columns: [reward] * len(completions))
    trainer = healthy.build("policy", own)
    doctor = DoctorCallback(trainer, stop=True, show=lambda text: None)
    trainer.add_callback(doctor)
    trainer.train()
    assert trainer.state.global_step == 3
    assert (expected in doctor.report.names) if expected else doctor.report.healthy


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_reference_that_is_the_policy_in_real_steps(own):
    trainer = healthy.build("preference", own)
    for reference in (None, trainer.model):
        trainer.ref_model = reference if reference is not None else trainer.ref_model
        doctor = DoctorCallback(trainer, stop=True, show=lambda text: None)
        trainer.add_callback(doctor)
        trainer.train()
        trainer.remove_callback(doctor)
        found = {"reference-is-policy"} & set(doctor.report.names)
        assert bool(found) == (reference is not None)


# ---- The command ----


def write_run(folder, reward: float, deviation: float) -> str:
    rows = [
        {"step": step, "learning_rate": 1e-5, "reward": reward, "reward_std": deviation, "frac_reward_zero_std": 0.2}
        for step in (5, 10, 15)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("max_steps: 60\nwarmup_steps: 5\nnum_generations: 8\nlearning_rate: 1.0e-5\n")
    return str(folder)


def test_the_folder_of_a_run(tmp_path, capsys):
    assert main([write_run(tmp_path, 0.4, 0.2)]) == 0
    assert capsys.readouterr().out.startswith("doctor: no fault found by ")
    assert main([write_run(tmp_path, 0.0, 0.0), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in told["findings"]] == ["rewards-all-zero"]
    assert told["skipped"] == {"responses-collapsed": "there are no responses in generations.jsonl"}
    (tmp_path / "generations.jsonl").write_text(json.dumps({"response_text": "no " * 40}) + "\n")
    assert main([write_run(tmp_path, 0.4, 0.2)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("doctor: 1 fault found by ") and "responses-collapsed (error)" in out


def test_the_folder_of_a_run_of_trl(tmp_path, capsys):
    rows = [{"step": step, "learning_rate": 1e-5, "grad_norm": 0.0, "rewards/margins": 0.0} for step in (1, 2, 3)]
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert main([str(checkpoint)]) == 1
    assert "policy-equals-reference" in capsys.readouterr().out


def test_wrong_command_lines(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "has no step in metrics.jsonl" in capsys.readouterr().err
    assert main(["--recipe", "dpoo"]) == 2
    assert "no recipe 'dpoo'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path), "--steps", "3"])
    assert end.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dpo", "reward_model", "grpo_math"])
def test_a_recipe(recipe, capsys, monkeypatch):
    assert main(["--recipe", recipe, "--steps", "3"]) == 0
    assert capsys.readouterr().out.startswith("doctor: no fault found by ")
    assert main(["--recipe", recipe, "--warmup_steps", "10000"]) == 1
    assert "warmup-outlasts-run" in capsys.readouterr().out
