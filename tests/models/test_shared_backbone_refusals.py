"""Adapters, policies and bases that a `SharedBackbone` refuses, and that a refusal leaves the policy as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.reward_adapters import SEQUENCES, VARIANTS, load_policy, save_adapter, separate_scores
from tests.support.tiny import save_tiny_model
from trl_ext.models import SharedBackbone


@pytest.fixture(scope="module")
def adapters(tiny_model_path, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(tiny_model_path, folder / name, **VARIANTS[name]) for name in ("plain", "rslora")}


def edited(folder: str, target: Path, *, tensors=None, **settings) -> str:
    """A copy of an adapter with other settings, and tensors changed by a function of the dictionary."""
    shutil.copytree(folder, target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | settings))
    if tensors:
        weights = load_file(target / "adapter_model.safetensors")
        tensors(weights)
        save_file(weights, target / "adapter_model.safetensors")
    return str(target)


def drop_one(weights: dict) -> None:
    del weights["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]


def widen_one(weights: dict) -> None:
    weights["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"] = torch.zeros(9, 4)


def add_embedding(weights: dict) -> None:
    weights["base_model.model.model.embed_tokens.weight"] = torch.zeros(300, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "the adapter cannot share a base with bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens=\[5\]"),
        ({"tensors": add_embedding}, "the adapter's file holds weights of the base, such as .*embed_tokens.weight"),
        ({"tensors": drop_one}, "the adapter lacks 1 tensors, such as .*v_proj.lora_B"),
        ({"tensors": widen_one}, "does not fit the base: .*size mismatch"),
    ],
)
def test_adapters_that_are_refused_leave_the_policy_as_it_was(changes, message, tiny_model_path, adapters, tmp_path):
    folder = edited(adapters["plain"], tmp_path / "edited", **changes)
    policy = load_policy(tiny_model_path)
    ids = torch.tensor(SEQUENCES[:1])
    logits = policy(ids).logits
    for backbone in (SharedBackbone(policy), SharedBackbone.load(tiny_model_path)):
        with pytest.raises(ValueError, match=message) as caught:
            backbone.add_reward_adapter(folder)
        assert "\n" not in str(caught.value)
        assert backbone.reward_adapters == ()
        # The backbone still takes another one.
        name = backbone.add_reward_adapter(adapters["rslora"])
        scores = backbone.score(name, SEQUENCES, batch_size=2, pad_token_id=0)
        assert (scores - separate_scores(tiny_model_path, adapters["rslora"])).abs().max() <= 2e-6
    assert list(policy.peft_config) == ["default", "reward0"]
    assert torch.equal(policy(ids).logits, logits)
    assert all(parameter.requires_grad == (".default." in name) for name, parameter in policy.named_parameters())


def test_adapters_of_another_base_are_refused(tiny_model_path, adapters, tmp_path):
    save_tiny_model(tmp_path / "other", seed=5)
    foreign = save_adapter(str(tmp_path / "other"), tmp_path / "adapter")
    backbone = SharedBackbone(load_policy(tiny_model_path))
    with pytest.raises(ValueError, match="it was trained on .*other, and the backbone is"):
        backbone.add_reward_adapter(foreign)
    # Said to be of this base, by a link to it: the same place, so it is believed.
    (tmp_path / "link").symlink_to(tiny_model_path)
    assert backbone.add_reward_adapter(adapters["plain"], base=str(tmp_path / "link")) == "reward0"


def test_a_base_that_was_changed_in_memory_is_refused(tiny_model_path, adapters):
    """An adapter merged into the base changes it under an unchanged name."""
    from peft import LoraConfig, get_peft_model

    merged = load_policy(tiny_model_path, target_modules=["v_proj"], layers_to_transform=[1]).merge_and_unload()
    policy = get_peft_model(merged, LoraConfig(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="not .* as it is saved: model.layers.1.self_attn.v_proj.weight differs"):
        SharedBackbone(policy).add_reward_adapter(adapters["plain"])


def policies(base: str) -> dict:
    from peft import IA3Config, get_peft_model
    from transformers import AutoModelForCausalLM

    def unfrozen():
        policy = load_policy(base)
        policy.get_base_model().model.norm.weight.requires_grad_(True)
        return policy

    def quantized():
        policy = load_policy(base)
        policy.get_base_model().is_quantized = True
        return policy

    def two_active():
        policy = load_policy(base)
        policy.add_adapter("other", policy.peft_config["default"])
        policy.base_model.set_adapter(["default", "other"])
        return policy

    plain = lambda: AutoModelForCausalLM.from_pretrained(base)  # noqa: E731
    targets = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return {
        "a Qwen2ForCausalLM, not a model with a LoRA adapter": plain,
        "'default' is IA3, not LoRA": lambda: get_peft_model(plain(), IA3Config(task_type="CAUSAL_LM", **targets)),
        "'default' may change its base with init_lora_weights='pissa'": lambda: load_policy(
            base, init_lora_weights="pissa"
        ),
        "trains weights of its base, such as norm.weight": unfrozen,
        "base is quantized": quantized,
        "2 active adapters, and one is expected": two_active,
    }


@pytest.mark.parametrize("message", list(policies("")))
def test_policies_that_are_refused(message, tiny_model_path):
    with pytest.raises(ValueError, match=message):
        SharedBackbone(policies(tiny_model_path)[message]())


def test_a_merged_policy_is_not_unmerged_behind_its_back(tiny_model_path, adapters):
    policy = load_policy(tiny_model_path)
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
    before = backbone.score(name, SEQUENCES, pad_token_id=0)
    policy.merge_adapter()
    with pytest.raises(ValueError, match="an adapter is merged into the base: unmerge it"):
        backbone.score(name, SEQUENCES, pad_token_id=0)
    policy.unmerge_adapter()
    assert (backbone.score(name, SEQUENCES, pad_token_id=0) - before).abs().max() < 1e-5
