"""The profile of a run: its phases add up, its counts are the tokens of the batches, and training is as without it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from tests.support import rollout_once
from tests.support.train_once import build_plain, entries, parameters, train_in_processes
from tests.trainers.test_expert_iteration import build as expert_iteration
from trl_ext import PolicyTrainer
from trl_ext.runs.folder import config_text
from trl_ext.trainers import read_metrics
from trl_ext.trainers.profile import steps
from trl_ext.trainers.profile.processor import matrix_product_peak, operations_per_token
from trl_ext.trainers.profile.steps import PHASES, measured

OFFLINE = ("PreferenceTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer")
ONLINE = ("PolicyTrainer", "PPOTrainer", "OnlinePreferenceTrainer")
ARGS = {"max_steps": 4, "learning_rate": 1e-3, "optim": "adamw_torch", "max_grad_norm": 1.0}


def seconds(row: dict) -> list[float]:
    return [row[f"profile/{phase}_seconds"] for phase in PHASES]


# ---- Phases ----


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the parts of a trainer advance, and a peak of 1000 operations per second."""
    clock = SimpleNamespace(time=0.0, begun=None, tokens=0, sampled=0)
    monkeypatch.setattr(steps, "now", lambda device: clock.time)
    monkeypatch.setattr(steps, "matrix_product_peak", lambda device, dtype: 1000.0)
    return clock


class Slow(TrainerCallback):
    """An optimizer's step of 32 seconds, and a held-out comparison of 256 after every second step."""

    def __init__(self, clock):
        self.clock, self.trainer = clock, None

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock.begun = self.clock.time if self.clock.begun is None else self.clock.begun

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.clock.time += 32

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 2 == 0:
            with measured(self.trainer, "evaluation"):
                self.clock.time += 256


def slow_policy(clock, path: str, folder, **args):
    """A policy whose sampling takes 8 seconds, rewards 4, a loss 16, and the data of a step 64."""

    class SlowPolicy(PolicyTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            clock.time += 8
            responses, log_probs = super()._generate_single_turn(*args, **kwargs)
            clock.sampled += sum(map(len, responses)) * self.model.training
            return responses, log_probs

        def _compute_loss(self, model, inputs):
            clock.time += 16
            clock.tokens += int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()) * self.model.training
            return super()._compute_loss(model, inputs)

        def get_batch_samples(self, *args):
            clock.time += 64
            return super().get_batch_samples(*args)

    def reward(completion_ids, **_):
        clock.time += 4
        return rollout_once.thirds(completion_ids)

    given = {"profile": True, "beta": 0.1, "packing": "off", **ARGS, "logging_steps": 2, **args}
    callback = Slow(clock)
    callback.trainer = rollout_once.build(
        {"model": path, "args": given},
        str(folder),
        trainer_class=SlowPolicy,
        reward_funcs=[reward],
        callbacks=[callback],
        eval_dataset=Dataset.from_list(rollout_once.prompts(2)),
    )
    return callback.trainer


def test_each_part_of_a_step_is_in_its_phase(policy_path, tmp_path, clock, capsys):
    """Four steps of two micro-batches and one rollout, logged after two and four; the first step has its data."""
    trainer = slow_policy(clock, policy_path, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer.train()
    first, second = entries(trainer)
    assert seconds(first) == [8, 4, 32, 32, 64 / 2]
    assert seconds(second) == [8, 4, 32, 32, 64]
    assert [row["profile/evaluation_seconds"] for row in (first, second)] == [128, 128]
    total = sum(2 * (sum(seconds(row)) + row["profile/evaluation_seconds"]) for row in (first, second))
    assert total == clock.time - clock.begun
    table = capsys.readouterr().out.rpartition("profile of ")[2].splitlines()
    assert table[0].split() == ["4", "steps", "seconds", "share"]
    assert table[1].split() == ["sampling", "8.0000", "6.5%"], "8 of 124 seconds"
    assert table[3].split() == ["forward", "and", "backward", "32.0000", "25.8%"]
    assert table[6].split() == ["step", "124.0000", "100.0%"]
    assert trainer.step_profile is None and "log" not in vars(trainer), "the trainer is as before"


def test_counts_are_of_tokens_without_padding_and_not_of_evaluations(policy_path, tmp_path, clock):
    """The policy passes over each token forward and backward, the reference forward, and each response is sampled."""
    trainer = slow_policy(clock, policy_path, tmp_path, eval_strategy="steps", eval_steps=2, logging_steps=4)
    trainer.train()
    (row,) = entries(trainer)
    assert seconds(row) == [8, 4, 16, 32, 64 * 3 / 4]
    assert row["profile/evaluation_seconds"] == (2 * 256 + 8 + 4 + 16) / 4
    spent = 4 * sum(seconds(row))
    forward, update = operations_per_token(trainer.model)
    assert row["profile/tokens_per_second"] == pytest.approx(clock.tokens / spent)
    assert row["profile/sampled_tokens_per_second"] == pytest.approx(clock.sampled / (4 * 8))
    operations = (update + forward) * clock.tokens + forward * clock.sampled
    assert row["profile/peak_share"] == pytest.approx(operations / spent / 1000)


def test_a_slow_reward_shows_as_scoring(policy_path, tmp_path):
    def reward(completion_ids, **_):
        time.sleep(0.2)
        return rollout_once.thirds(completion_ids)

    spec = {"trainer": "PolicyTrainer", "model": policy_path, "args": {**ARGS, "profile": True, "logging_steps": 4}}
    trainer = build_plain(spec, str(tmp_path), reward=reward)
    begun = time.perf_counter()
    trainer.train()
    (row,) = entries(trainer)
    assert 0.2 <= row["profile/scoring_seconds"] < sum(seconds(row)) < (time.perf_counter() - begun) / 4


def test_reference_passes_are_scoring_and_packed_tokens_are_work(tiny_model_path, tmp_path, clock):
    """Passes without gradients, in a trainer that never samples; a common prefix is encoded once."""
    spec = {"trainer": "PreferenceTrainer", "model": tiny_model_path, "args": {**ARGS, "profile": True}}
    trainer = build_plain(spec, str(tmp_path))

    def forward(*_):
        clock.time += 3

    for model in (trainer.model, trainer.ref_model):
        # Within the pass, after the hooks of the model itself.
        model.model.register_forward_pre_hook(forward)
    trainer.train()
    row = entries(trainer)[-1]
    assert seconds(row)[:3] == [0, 3, 3] and "profile/sampled_tokens_per_second" not in row
    forward, update = operations_per_token(trainer.model)
    full = row["profile/tokens_per_second"] * (forward + update) / 1000
    assert 0.2 * full < row["profile/peak_share"] < full


# ---- Work ----


def test_operations_are_counted_by_hand(tiny_model_path):
    """Width 16: a layer has 256 + 128 + 128 + 256 weights of attention and 3 * 512 of its MLP, the head 259 * 16."""
    layers, head = 2 * (768 + 1536), 259 * 16
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=1)
    assert operations_per_token(classifier) == (2 * (layers + 16), 6 * (layers + 16))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    assert operations_per_token(model) == (2 * (layers + head), 6 * (layers + head))
    model.set_output_embeddings(model.get_input_embeddings())
    assert operations_per_token(model) == (2 * (layers + head), 6 * (layers + head)), "a tied head is a product"
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    adapter = 2 * (128 + 96 + 192)
    every = layers + head + adapter
    assert operations_per_token(get_peft_model(model, config)) == (2 * every, 4 * every + 2 * adapter)


def test_the_peak_is_that_of_this_machine_and_draws_no_random_numbers():
    state = torch.get_rng_state()
    peak = matrix_product_peak(torch.device("cpu"), torch.float32)
    assert 1e9 < peak < 1e15
    assert torch.equal(torch.get_rng_state(), state)


# ---- Training is the same ----


@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_weights_and_metrics_are_those_without_it(name, policy_path, tmp_path):
    runs = []
    for profile in (False, True):
        spec = {"trainer": name, "model": policy_path, "args": {**ARGS, "profile": profile}}
        trainer = (rollout_once.build if name in ONLINE else build_plain)(spec, str(tmp_path))
        trainer.train()
        runs.append((parameters(trainer), entries(trainer)))
    (plain, without), (profiled, rows) = runs
    assert all(torch.equal(profiled[key], value) for key, value in plain.items())
    own = {f"profile/{phase}_seconds" for phase in PHASES} | {"profile/tokens_per_second", "profile/peak_share"}
    for row, other in zip(rows, without, strict=True):
        # Only rows with a rollout have a rate of sampling.
        assert row.keys() - other.keys() - {"profile/sampled_tokens_per_second"} == own
        other.pop("step_time", None)
        assert {key: row[key] for key in other} == pytest.approx(other, rel=0, abs=0, nan_ok=True)


def test_a_run_can_be_resumed_with_it(policy_path, tmp_path, capsys):
    """It is an argument of one call, and the table is of that call's steps."""
    args = {**ARGS, "save_strategy": "steps", "save_steps": 2}
    spec = {"trainer": "PolicyTrainer", "model": policy_path, "args": args}
    unbroken = build_plain(spec, str(tmp_path))
    unbroken.train()
    resumed = build_plain({**spec, "args": {**args, "profile": True}}, str(tmp_path))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected, found = parameters(unbroken), parameters(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "profile of 2 steps" in capsys.readouterr().out
    assert config_text(resumed.args) == config_text(unbroken.args)


def test_rounds_of_expert_iteration_are_one_profile(tmp_path, capsys):
    """Sampling is outside of the trainer's steps, and counts; each round's fine-tuning is a step of 32 responses."""
    settings = {"n_steps": 2, "questions_per_step": 16, "rollouts_per_question": 2, "profile": True}
    trainer = expert_iteration(tmp_path, **settings)
    trainer.train()
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "profile/sampling_seconds" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["profile/sampled_tokens_per_second"] > 0 for row in rows)
    assert capsys.readouterr().out.count("profile of 2 steps") == 1


@pytest.mark.slow
def test_two_processes_train_as_without_it(tiny_model_path, tmp_path):
    args = {"max_steps": 2, "logging_steps": 2}
    specs = [{"model": tiny_model_path, "args": {**args, "profile": profile}} for profile in (False, True)]
    plain, profiled = train_in_processes(specs, 2, tmp_path)
    assert all(torch.equal(profiled.parameters[name], value) for name, value in plain.parameters.items())
    (row,) = profiled.logs
    assert row["profile/peak_share"] > 0 and sum(seconds(row)) > 0
