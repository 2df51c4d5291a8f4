"""The names and behaviours of TRL's and transformers' training loop that policy trainers, PPO and KTO depend on."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
import trl
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.trainer import kto_trainer
from trl.trainer.utils import add_fused_lm_head

from tests.rollout_once import build
from tests.test_policy_contract import TRAINER, parameter_names, rows

pytestmark = pytest.mark.usefixtures("in_float64")

GUARD = "trl_ext.resilience.guards.UpdateGuard"
REPLAY = "trl_ext.trainers.online_preference.trainer.OnlinePreferenceTrainer._save_optimizer_and_scheduler"
OPTIMIZER = "trl_ext.trainers.ppo.trainer.PPOTrainer.create_optimizer"
SCORING = "trl_ext.trainers.policy.scoring.ScoringTemperature"


# ---- The training loop ----


def test_the_buffer_and_the_step(policy_path, tmp_path):
    """Two micro-batches to a rollout, twice over, two to an update: a window is two in a row of the buffer."""
    seen = []

    class Recording(trl.GRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            step = self._step
            inputs = super()._prepare_inputs(generation_batch)
            seen.append((step, len(self._buffered_inputs), inputs is self._buffered_inputs[step % 2]))
            return inputs

    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}
    spec = {"model": policy_path, "trainer": "trl.GRPOTrainer", "args": args}
    build(spec, str(tmp_path), trainer_class=Recording).train()
    assert seen == [(step, 2, True) for step in range(8)], (
        f"GRPOTrainer's `_step` and `_buffered_inputs` go otherwise, {seen}: {TRAINER}._mean_tokens_of_window reads "
        "the micro-batches of an update from them"
    )


def test_the_gradient_norm_comes_before_the_optimizer_step(policy_path, tmp_path):
    names = parameter_names(trl.GRPOTrainer._get_grad_norm)
    assert names == ["self", "model", "grad_norm"], f"Trainer._get_grad_norm takes {names}: {TRAINER} overrides it"
    order = []

    class Recording(trl.GRPOTrainer):
        def _get_grad_norm(self, model, grad_norm=None):
            norm = super()._get_grad_norm(model, grad_norm=grad_norm)
            total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
            order.append(("norm", float(norm) == pytest.approx(total, rel=1e-5)))
            return norm

    class Order(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            order.append(("before", all(p.grad is not None for p in model.parameters())))

        def on_optimizer_step(self, args, state, control, **kwargs):
            order.append(("after", True))

    spec = {"model": policy_path, "trainer": "trl.GRPOTrainer", "args": {"max_steps": 1}}
    build(spec, str(tmp_path), trainer_class=Recording, callbacks=[Order()]).train()
    assert order == [("norm", True), ("before", True), ("after", True)], (
        f"Trainer's optimizer step goes {order}: {GUARD} learns the norm of all gradients, clipped or not, and then "
        "drops them before the step"
    )


def test_an_optimizer_without_gradients_does_nothing():
    parameter = torch.nn.Parameter(torch.ones(2))
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        optimizer = kind([parameter], lr=0.1, weight_decay=0.1)
        parameter.grad = torch.ones(2)
        optimizer.step()
        before, state = parameter.detach().clone(), repr(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        assert torch.equal(parameter, before) and repr(optimizer.state_dict()) == state, (
            f"{kind.__name__} changes parameters or its state without gradients: {GUARD} skips an update that way"
        )


# ---- What PPO, online preferences and KTO stand on beside the seams ----


def test_checkpoints_are_given_the_optimizers_folder():
    names = parameter_names(trl.GRPOTrainer._save_optimizer_and_scheduler)
    assert names == ["self", "output_dir"], (
        f"Trainer._save_optimizer_and_scheduler takes {names}: {REPLAY} overrides it"
    )
    source = inspect.getsource(transformers.Trainer._save_checkpoint)
    assert "self._save_optimizer_and_scheduler(output_dir)" in source, (
        f"Trainer._save_checkpoint no longer calls _save_optimizer_and_scheduler(output_dir): {REPLAY} saves the "
        "replay there, beside the optimizer"
    )


def test_the_optimizer_is_made_once_and_its_groups_can_be_divided(policy_path, tmp_path):
    trainer = build({"model": policy_path, "trainer": "trl.GRPOTrainer"}, str(tmp_path))
    assert trainer.optimizer is None, (
        f"Trainer has an optimizer before create_optimizer: {OPTIMIZER} would not divide it"
    )
    optimizer = trainer.create_optimizer()
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert optimizer is trainer.optimizer and held == {id(weight) for weight in trainer.model.parameters()}, (
        f"Trainer.create_optimizer no longer returns the optimizer of all weights of self.model: {OPTIMIZER} moves "
        "those of the value function to a group of their own"
    )
    assert trainer.create_optimizer() is optimizer, f"Trainer.create_optimizer makes another: {OPTIMIZER} divides one"


@pytest.mark.parametrize("has_reference", [False, True])
def test_a_reference_is_the_policy_with_its_adapter_off_or_another_in_its_place(has_reference, policy_path, tmp_path):
    """TRL scores with the reference of a policy with an adapter through the policy itself."""
    states = []

    class Recording(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
            states.append((model is self.model, layer.disable_adapters, list(model.active_adapters)))
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    spec = {
        "model": policy_path,
        "trainer": "trl.GRPOTrainer",
        "lora": True,
        "args": {"beta": 0.1, "num_iterations": 2},
    }
    trainer = build(spec, str(tmp_path), trainer_class=Recording)
    if has_reference:
        trainer.model.add_adapter("ref", trainer.model.peft_config["default"])
    elif "ref" in trainer.model.peft_config:
        trainer.model.delete_adapter("ref")
    trainer.model.train()
    trainer._generate_and_score_completions(rows())
    expected = (True, False, ["ref"]) if has_reference else (True, True, ["default"])
    assert states == [(True, False, ["default"]), expected], (
        f"GRPOTrainer scores with policy and reference in the states {states}, of (the policy, disable_adapters of "
        "PEFT's layers, active_adapters of its model): trl_ext.PPOTrainer._is_reference_pass tells them apart by these"
    )


def test_the_head_can_be_put_on_again_at_another_temperature(policy_path):
    """Logits over T are what a softmax at temperature T takes."""
    names = parameter_names(add_fused_lm_head)
    assert names == ["model", "temperature", "cast_lm_head_to_fp32", "outputs"], (
        f"add_fused_lm_head takes {names}: trl_ext.trainers.policy.scoring calls it"
    )
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
        for temperature in (0.5, 1.0):
            add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
            found = model(ids, labels=ids, fused_lm_head=True).log_probs
            expected = (logits / temperature).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            torch.testing.assert_close(
                found, expected, msg=f"a second fused head is not that in use: {SCORING} puts one over TRL's"
            )


def test_rows_of_kto_are_paired_by_a_column_of_token_ids():
    source = inspect.getsource(kto_trainer)
    assert source.count('"KL_completion_ids"') > 2, (
        "KTOTrainer's datasets have no column KL_completion_ids: trl_ext.KTOTrainer._prepare_dataset truncates it "
        "beside completion_ids"
    )
