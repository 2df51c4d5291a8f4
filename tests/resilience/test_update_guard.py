"""Updates that are not finite are skipped, counted, and stop the run when they do not end."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.support.rollout_once import build, thirds, train
from tests.support.train_once import entries, largest_difference, parameters
from tests.support.trl_private import AfterRollout, rollout_batches
from trl_ext import PolicyTrainer


class Weights(TrainerCallback):
    """Keeps parameters and optimizer state before and after each update."""

    def __init__(self):
        self.before, self.after = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.before.append(self._copy(model, optimizer))

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.after.append(self._copy(model, optimizer))

    @staticmethod
    def _copy(model, optimizer) -> list[torch.Tensor]:
        state = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
        moments = [value for values in state for value in values.values() if isinstance(value, torch.Tensor)]
        return copy.deepcopy([p.detach() for p in model.parameters()] + moments)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_skips_its_own_update(value, policy_path, tmp_path, caplog):
    """One bad response in a rollout of 16 that serves 4 updates of 4: one update is skipped, whichever holds it."""
    caplog.set_level(logging.WARNING)

    def reward(completion_ids, **_):
        return [value if index == 5 else r for index, r in enumerate(thirds(completion_ids))]

    weights = Weights()
    args = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 4, "learning_rate": 0.01}
    trainer = train({"model": policy_path, "args": args}, str(tmp_path), reward_funcs=[reward], callbacks=[weights])
    assert trainer.update_guard.skipped == {"reward": 1, "loss": 0, "gradient": 0}
    bad = [bool(batch["bad_reward"].any()) for batch in rollout_batches(trainer)]
    assert sum(bad) == 1
    assert [same(weights.after[i], weights.before[i]) for i in range(4)] == bad
    assert f"the reward function 'reward' gave {value} for row_id 'row1'" in caplog.text
    assert entries(trainer)[0]["unscorable"] == 1 / 16


ADAM = {"optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1, "max_steps": 5}


def with_faulty_loss(policy_path, folder, steps, **args):
    """A trainer whose loss is NaN at these steps, counted from 0."""
    spec = {"model": policy_path, "fault": "NotANumber", "steps": steps, "args": {**ADAM, **args}}
    weights = Weights()
    return build(spec, str(folder), callbacks=[weights]), weights


def test_a_loss_that_is_not_finite_changes_nothing(policy_path, tmp_path, caplog):
    """Steps 1 and 3 of five: parameters, Adam's moments and weight decay wait, the others move; both are counted."""
    caplog.set_level(logging.WARNING)
    trainer, weights = with_faulty_loss(policy_path, tmp_path, {1, 3})
    trainer.train()
    unchanged = [same(*pair) for pair in zip(weights.before, weights.after, strict=True)]
    assert unchanged == [False, True, False, True, False]
    assert len(weights.before[1]) == 4 * len(weights.before[0]), "Adam has two moments and a count per parameter"
    assert trainer.update_guard.skipped == {"reward": 0, "loss": 2, "gradient": 0}
    assert trainer.state.global_step == 5
    assert "step 2: the loss was not finite, the update is skipped" in caplog.text
    assert [entry["skipped_updates"] for entry in entries(trainer)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(max_grad_norm, policy_path, tmp_path):
    """The loss is finite, and one entry of one gradient infinite, at step 2 of four."""
    weights = Weights()
    spec = {"model": policy_path, "args": {**ADAM, "max_steps": 4, "max_grad_norm": max_grad_norm}}
    trainer = build(spec, str(tmp_path), callbacks=[weights])

    def spoil(gradient):
        spoiled = gradient.clone()
        spoiled.view(-1)[3] = float("inf") if trainer.state.global_step == 2 else spoiled.view(-1)[3]
        return spoiled

    trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(spoil)
    trainer.train()
    assert [same(*pair) for pair in zip(weights.before, weights.after, strict=True)] == [False, False, True, False]
    assert trainer.update_guard.skipped == {"reward": 0, "loss": 0, "gradient": 1}


def test_too_many_in_a_row_stop_the_run_with_a_checkpoint(policy_path, tmp_path):
    """Faults at 1 and at 3 to 5 with a limit of three: stopped after the third in a row, the sixth step."""
    limits = {"max_steps": 9, "max_skipped_updates": 3, "save_total_limit": 1}
    trainer, weights = with_faulty_loss(policy_path, tmp_path, {1, 3, 4, 5}, **limits)
    # It would otherwise be the only one that transformers keeps.
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    message = str(caught.value)
    assert message.startswith("stopped at step 6: 3 updates in a row were not finite (in all: 4 x loss)")
    assert str(tmp_path) in message and "learning rate" in message
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6", dtype=torch.float64)
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-6")
    # Of step 2, the last that moved anything.
    assert same(list(saved.parameters()), weights.after[2][: len(list(saved.parameters()))])


def test_resumed_in_smaller_micro_batches(policy_path, tmp_path):
    """8 responses to a rollout and an update, as 1 x 8 or 2 x 4: sampled anew at every step, and the same in the end.

    After 3 updates, 3 micro-batches of 8 are 6 of 4. A count of 3 would fall between two halves of one update.
    """
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "generation_batch_size": 8, "beta": 0.0}
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}

    sampled = []

    class Recording(AfterRollout, PolicyTrainer):
        def after_rollout(self, output):
            sampled.append(self.state.global_step)

    spec = {"model": policy_path, "fixed": True, "args": {**settings, "learning_rate": 0.05}}
    straight = train(spec, str(tmp_path))
    resumed = {"resume_from_checkpoint": str(tmp_path / "checkpoint-3"), "args": {**spec["args"], **halves}}
    broken = train({**spec, **resumed}, str(tmp_path), trainer_class=Recording)
    assert sampled == [3, 4]
    # A sum of halves rounds otherwise than the whole.
    assert largest_difference(parameters(broken), parameters(straight)) < 1e-6
