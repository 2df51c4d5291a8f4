"""The doctor: each check names its planted fault, and is silent on the same trainer without it."""

from __future__ import annotations

import inspect
import json

import pytest

from benchmarks import doctor as planted
from trl_ext.doctor import CHECKS, DoctorCallback, examine
from trl_ext.runs.studies.examination import main
from trl_ext.doctor.report import shown_tokens

LOGS = planted.LOGGED_FAULTS


@pytest.fixture(scope="module")
def trainers():
    """One trainer of each kind and origin, built when it is first needed."""
    built = {}

    def of(kind: str, own: bool):
        if (kind, own) not in built:
            built[kind, own] = planted.build(kind, own)
        return built[kind, own]

    return of


EVERY = [(kind, own) for kind in planted.TRAINERS for own in (False, True)]


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


@pytest.mark.parametrize("name", [name for name in LOGS if name.startswith(("rewards-", "dead-"))])
def test_a_distillation_needs_no_rewards(name):
    kind, changed, moved = LOGS[name]
    assert planted.logged(kind, changed, moved, divergence="full").names == []


def test_an_adapter_without_effect():
    from peft import LoraConfig

    for alpha, expected in ((0, ["adapter-without-effect"]), (16, [])):
        adapter = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj"])
        assert examine(planted.build("preference", False, peft_config=adapter)).names == expected


def test_every_check_has_a_planted_fault():
    elsewhere = {"adapter-without-effect", "responses-collapsed"}
    assert {fault.name for fault in planted.FAULTS} | LOGS.keys() | elsewhere == CHECKS.keys()


def test_a_check_is_short():
    assert max(len(inspect.getsource(row.function).splitlines()) for row in CHECKS.values()) <= 25


def test_the_tokens_of_a_finding():
    assert shown_tokens([("a", False), ("b", True), ("\n", True)], color=False) == "a|[b|\\n]"


# ---- The first steps ----


@pytest.mark.parametrize("own", [False, True])
def test_the_callback_reports_and_changes_no_weight(own):
    texts, weights = [], []
    for watched in (True, False):
        trainer = planted.build("sft", own, max_steps=3, logging_steps=50, seed=1)
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
        monkeypatch.setattr(planted, "length_reward", lambda completions, **columns: [reward] * len(completions))
    trainer = planted.build("policy", own)
    doctor = DoctorCallback(trainer, stop=True, show=lambda text: None)
    trainer.add_callback(doctor)
    trainer.train()
    assert trainer.state.global_step == 3
    assert (expected in doctor.report.names) if expected else doctor.report.healthy


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_reference_that_is_the_policy_in_real_steps(own):
    trainer = planted.build("preference", own)
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
    assert [finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]] == ["rewards-all-zero"]
    (tmp_path / "generations.jsonl").write_text(json.dumps({"response_text": "no " * 40}) + "\n")
    assert main([write_run(tmp_path, 0.4, 0.2)]) == 1
    assert "error: responses-collapsed" in capsys.readouterr().out


def test_the_folder_of_a_run_of_trl(tmp_path, capsys):
    rows = [{"step": step, "learning_rate": 1e-5, "grad_norm": 0.0, "rewards/margins": 0.0} for step in (1, 2, 3)]
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert main([str(checkpoint)]) == 1
    assert "policy-equals-reference" in capsys.readouterr().out


def test_wrong_command_lines(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
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
