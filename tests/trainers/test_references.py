"""The reference is the model that training begins from, however that model came into memory."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext
from tests.support import rollout_once
from tests.support.tiny import pairs, perturbed
from trl_ext.rollouts.sampler import fast_rollouts
from trl_ext.trainers.policies import base_policy, remember_base

SETTINGS = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.01, "logging_steps": 1}
SETTINGS |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False}
ROLLOUTS = {"num_generations": 4, "max_completion_length": 6, "fast_rollouts": "off"}
TRAINERS = {
    "PreferenceTrainer": {"loss": "dpo"},
    "KTOTrainer": {},
    "GRPOTrainer": {**ROLLOUTS, "beta": 0.04},
    "PPOTrainer": {**ROLLOUTS, "beta": 0.04, "num_iterations": 1},
    "OnlinePreferenceTrainer": {"max_completion_length": 6, "fast_rollouts": "off"},
}
CHANGES = ("edited", "resized", "from a configuration", "folder overwritten", "trained")


def in_memory(path: str, folder, change: str):
    """A model whose weights are not those of the folder that it names."""
    copied = shutil.copytree(path, folder / "model")
    model = AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32)
    if change == "edited":
        return perturbed(model)
    if change == "resized":
        model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
        return perturbed(model)
    if change == "from a configuration":
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(type(model.config)(**json.loads((copied / "config.json").read_text())))
    if change == "folder overwritten":
        perturbed(AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32)).save_pretrained(copied)
        return model
    # An earlier trainer replaces the forward pass, and fast rollouts replace `generate`.
    trainer = build("PreferenceTrainer", model, path, folder / "earlier", {"loss": "simpo"})
    fast_rollouts(model)
    trainer.train()
    return trainer.model


def build(name: str, model, path: str, folder, settings: dict, **given):
    trainer_class = getattr(trl_ext, name)
    policy = "max_completion_length" in settings
    rewards = [[rollout_once.thirds]] if policy else []
    args = trainer_class._config_class(**{**SETTINGS, **settings, "output_dir": str(folder)})
    return trainer_class(
        model,
        *rewards,
        args=args,
        train_dataset=Dataset.from_list(rollout_once.prompts(8) if policy else pairs(8)),
        processing_class=AutoTokenizer.from_pretrained(path),
        **given,
    )


def first_log(trainer) -> dict:
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", TRAINERS)
def test_the_reference_is_a_copy_of_the_model_in_memory(name, change, tiny_model_path, tmp_path):
    model = in_memory(tiny_model_path, tmp_path, change)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = build(name, model, tiny_model_path, tmp_path / "run", TRAINERS[name])
    log = first_log(trainer)
    # Of a policy that is its reference.
    expected = {"rewards/chosen": 0} if name == "KTOTrainer" else {}
    expected |= {"loss": math.log(2), "rewards/margins": 0} if "Preference" in name else {"kl": 0}
    assert {key: log[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    reference = trainer.accelerator.unwrap_model(trainer.ref_model)
    left = reference.state_dict()
    assert all(torch.equal(left[key], value) for key, value in start.items())
    assert not any(torch.equal(left[key], value) for key, value in model.state_dict().items() if "proj.weight" in key)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in reference.parameters())
    # The whole forward pass is the copy's, and calls nothing of the policy's.
    ids = torch.tensor([[5, 9, 33]])
    before = reference(input_ids=ids).logits
    with base_policy(trainer) as base:
        assert torch.equal(base(input_ids=ids).logits, before)
    perturbed(model, seed=7)
    assert torch.equal(reference(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("name", "own"), [("PreferenceTrainer", {}), ("OnlinePreferenceTrainer", {"temperature": 0.7, "packing": "off"})]
)
def test_a_model_that_earlier_trainers_trained_in_bfloat16(name, own, tiny_model_path, tmp_path):
    """accelerate wraps its forward pass for each trainer; policy and reference must compute the same."""
    model, settings = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32), TRAINERS[name]
    for number in range(3):
        trainer = build(name, model, tiny_model_path, tmp_path / str(number), {**settings, **own, "bf16": True})
        log = first_log(trainer)
        assert log["loss"] == pytest.approx(math.log(2), abs=1e-6), number


def test_computing_it_in_advance_draws_no_random_numbers(tiny_model_path, tmp_path):
    """Otherwise dropout would depend on whether the reference is computed ahead, found on disk, or neither."""
    states = []
    for name, ahead in (("later", False), ("computed", True), ("found", True)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
        settings = {"loss": "dpo", "precompute_ref_log_probs": ahead}
        build("PreferenceTrainer", model, tiny_model_path, tmp_path / name, settings).get_train_dataloader()
        states.append(torch.get_rng_state())
    assert states[0].equal(states[1]) and states[0].equal(states[2])


def test_computing_it_in_advance_gives_the_same(tiny_model_path, tmp_path):
    """Asked for, unasked since six steps of two batches need it thrice, and not.

    Unasked, pairs that come after training have the model from before training as their reference, too.
    """
    logs, later = [], Dataset.from_list(pairs(4, seed=9))
    for ahead in (False, True, None):
        model = perturbed(AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64))
        settings = {"loss": "dpo", "max_steps": 6, "precompute_ref_log_probs": ahead}
        held_out = Dataset.from_list(pairs(4, seed=5))
        trainer = build("PreferenceTrainer", model, tiny_model_path, tmp_path, settings, eval_dataset=held_out)
        for dataset in (trainer.train_dataset, trainer.eval_dataset):
            assert ("ref_chosen_logps" in dataset.column_names) == (ahead is not False)
        assert (trainer.ref_model is None) == (ahead is True)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        given = [None] if ahead else [None, later]
        logs.append(losses + [trainer.evaluate(dataset)["eval_loss"] for dataset in given])
    assert logs[0] == pytest.approx(logs[2], abs=1e-6) and logs[0][:-1] == pytest.approx(logs[1], abs=1e-6)
    assert logs[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert min(abs(loss - math.log(2)) for loss in (logs[0][2], logs[0][-1])) > 1e-3


ADAPTERS = {
    "plain": ({}, None),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, None),
    "dora": ({"use_dora": True}, None),
    "a saved module": ({"modules_to_save": ["lm_head"]}, None),
    "new tokens": ({"trainable_token_indices": [3, 4]}, None),
    "pissa_niter_4": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights='olora' changes the weights of the base"),
    "bias lora_only": ({"bias": "lora_only"}, "parameters of the base are trained, such as .*bias"),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", TRAINERS)
def test_an_adapter_switched_off_is_the_start_or_is_refused(name, adapter, tiny_model_path, tmp_path):
    settings, refusal = ADAPTERS[adapter]
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", **settings)
    model = perturbed(AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32))
    make = lambda: build(name, model, tiny_model_path, tmp_path, TRAINERS[name], peft_config=config)  # noqa: E731
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            make()
        return
    ids = torch.tensor([[5, 9, 33]])
    start = model(input_ids=ids).logits.detach().clone()
    trainer = make()
    remember_base(trainer)
    trainer.train()
    with base_policy(trainer) as base:
        torch.testing.assert_close(base(input_ids=ids).logits, start, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(trainer.model(input_ids=ids).logits, start, rtol=1e-4, atol=1e-4)


def test_without_a_reference_such_an_adapter_trains_but_is_not_compared_with_its_base(tiny_model_path, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="pissa")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    trainer = build("PreferenceTrainer", model, tiny_model_path, tmp_path, {"loss": "simpo"}, peft_config=config)
    assert math.isfinite(first_log(trainer)["loss"])
    with pytest.raises(ValueError, match="init_lora_weights='pissa' changes the weights of the base"):
        remember_base(trainer)


@pytest.mark.parametrize("kind", ["of another kind", "trained and given"])
def test_other_adapters_are_their_own_reference(kind, tiny_model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    feedforward = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    given = {"peft_config": IA3Config(task_type="CAUSAL_LM", **feedforward)}
    if kind == "trained and given":
        config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model, given = get_peft_model(model, config), {}
    trainer = build("PreferenceTrainer", model, tiny_model_path, tmp_path, {"loss": "dpo"}, **given)
    assert first_log(trainer)["loss"] == pytest.approx(math.log(2), abs=1e-6)
