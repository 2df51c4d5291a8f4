"""One base under the policy's adapter and those of reward models: equal scores, an untouched policy, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.reward_adapters import (
    SEQUENCES,
    VARIANTS,
    load_adapter,
    load_policy,
    plain_scores,
    randomize,
    save_adapter,
    separate_scores,
)
from tests.support.tiny import save_tiny_model
from trl_ext.models import SharedBackbone


@pytest.fixture(scope="module")
def adapters(tiny_model_path, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_model_path, folder / str(seed), seed=seed, **settings)
        for seed, (name, settings) in enumerate(VARIANTS.items())
    }


def state(model) -> tuple:
    """What scoring must not change."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return (
        list(model.active_adapters),
        [layer.disable_adapters for layer in layers],
        [list(layer.active_adapters) for layer in layers],
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        {module: module.training for module in model.modules()},
    )


def on_policy(base: str, folder: str, **settings):
    """A policy, its backbone, and the name of a reward adapter on it."""
    policy = load_policy(base, **settings)
    backbone = SharedBackbone(policy)
    return policy, backbone, backbone.add_reward_adapter(folder)


def apart(scores, expected) -> float:
    return (scores - expected).abs().max().item()


@pytest.mark.parametrize("name", list(VARIANTS))
def test_shared_scores_are_those_of_a_separate_copy(name, tiny_model_path, adapters):
    """On the policy's backbone with every other adapter there, on a frozen base, and by hand: one number."""
    separate = separate_scores(tiny_model_path, adapters[name])
    assert apart(plain_scores(load_adapter(tiny_model_path, adapters[name]), SEQUENCES), separate) <= 2e-6
    assert separate.std() > 0.05, "scores that are all alike would prove nothing"
    for backbone in (SharedBackbone(load_policy(tiny_model_path)), SharedBackbone.load(tiny_model_path)):
        names = {variant: backbone.add_reward_adapter(folder) for variant, folder in adapters.items()}
        assert apart(backbone.score(names[name], SEQUENCES, batch_size=2, pad_token_id=0), separate) <= 2e-6


def test_scores_in_bfloat16(tiny_model_path, adapters):
    """bfloat16 keeps 8 bits: relative steps of 0.4%, over two layers. The adapter and the head stay in float32."""
    expected, policy = separate_scores(tiny_model_path, adapters["plain"]), load_policy(tiny_model_path)
    for parameter in policy.get_base_model().parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    for backbone in (SharedBackbone(policy), SharedBackbone.load(tiny_model_path, dtype=torch.bfloat16)):
        name, named = backbone.add_reward_adapter(adapters["plain"]), dict(backbone.model.named_parameters())
        assert {p.dtype for n, p in named.items() if f".{name}." in n} == {torch.float32}
        assert {p.dtype for n, p in named.items() if ".lora_" not in n} == {torch.bfloat16}
        assert apart(backbone.score(name, SEQUENCES, pad_token_id=0), expected) < 0.1


def test_attaching_and_scoring_change_nothing_else(tiny_model_path, adapters):
    """Of its own adapter the first layer only is trained: PEFT's switches would train all of it, or nothing."""
    policy = load_policy(tiny_model_path)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".default." in name and ".layers.0." in name)
    policy.train()
    policy.get_base_model().model.layers[0].eval()
    before = state(policy)
    ids = torch.tensor(SEQUENCES[:1])
    logits = policy(ids).logits
    weights = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    seed = torch.get_rng_state()
    backbone = SharedBackbone(policy)
    for folder in adapters.values():
        backbone.add_reward_adapter(folder)
    backbone.score("reward1", SEQUENCES, pad_token_id=0)
    assert torch.equal(torch.get_rng_state(), seed)
    after = state(policy)
    assert after[0] == before[0] == ["default"]
    assert {module: after[4][module] for module in before[4]} == before[4]
    assert [name for name, needs in after[3].items() if needs] == [name for name, needs in before[3].items() if needs]
    renamed = {name.replace(".base_layer.", "."): parameter for name, parameter in policy.named_parameters()}
    for name, weight in weights.items():
        assert torch.equal(renamed[name.replace(".base_layer.", ".")], weight), name
    assert torch.equal(policy(ids).logits, logits)
    assert backbone.reward_adapters == ("reward0", "reward1", "reward2", "reward3", "reward4")


def test_within_a_disabled_adapter(tiny_model_path, adapters):
    """As a trainer's pass for the reference: scores are the same, and the adapter is off again afterwards."""
    policy, backbone, name = on_policy(tiny_model_path, adapters["plain"])
    outside = backbone.score(name, SEQUENCES, pad_token_id=0)
    ids = torch.tensor(SEQUENCES[:1])
    enabled = state(policy)
    with policy.disable_adapter():
        disabled, reference = state(policy), policy(ids).logits
        assert torch.equal(backbone.score(name, SEQUENCES, pad_token_id=0), outside)
        assert state(policy) == disabled
        assert torch.equal(policy(ids).logits, reference)
    assert state(policy) == enabled
    assert not torch.equal(policy(ids).logits, reference)


def test_only_the_policy_is_saved(tiny_model_path, adapters, tmp_path):
    policy = load_policy(tiny_model_path)
    policy.save_pretrained(tmp_path / "without")
    backbone = SharedBackbone(policy)
    backbone.add_reward_adapter(adapters["plain"])
    SharedBackbone(policy).add_reward_adapter(adapters["rslora"])
    policy.save_pretrained(tmp_path / "with")
    files = [{path.relative_to(tmp_path / f) for path in (tmp_path / f).rglob("*.*")} for f in ("with", "without")]
    assert files[0] == files[1]
    saved, expected = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("with", "without"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in saved)
    assert not any("score" in key for key in policy.state_dict()), "the heads are outside of the model"


COPYING = [{"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}]
COPYING += [{"target_modules": ["embed_tokens", "q_proj"]}, {"use_dora": True}]


@pytest.mark.parametrize("settings", COPYING, ids=str)
def test_other_kinds_of_policies(settings, tiny_model_path, adapters):
    """Copies that the policy trains beside the base are off while a reward is scored, and on again afterwards."""
    policy = load_policy(tiny_model_path, **settings)
    randomize(policy, "modules_to_save", seed=8)
    ids = torch.tensor(SEQUENCES[:1])
    logits, before = policy(ids).logits, state(policy)
    backbone = SharedBackbone(policy)
    scores = backbone.score(backbone.add_reward_adapter(adapters["plain"]), SEQUENCES, pad_token_id=0)
    assert apart(scores, separate_scores(tiny_model_path, adapters["plain"])) <= 1e-6
    trained = [[name for name, needs in flags[3].items() if needs] for flags in (before, state(policy))]
    assert trained[0] == trained[1]
    assert torch.equal(policy(ids).logits, logits)


def test_a_reference_adapter_beside_the_policy(tiny_model_path, adapters):
    """TRL adds one called `ref` to a policy that comes with an adapter; it stays frozen."""
    policy, backbone, name = on_policy(tiny_model_path, adapters["plain"])
    policy.add_adapter("ref", policy.peft_config["default"])
    for name_of, parameter in policy.named_parameters():
        if ".ref." in name_of:
            parameter.requires_grad_(False)
    before = state(policy)
    backbone.score(name, SEQUENCES, pad_token_id=0)
    assert state(policy) == before


# ---- Refusals ----


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


ONE = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
EMBEDDING = {"base_model.model.model.embed_tokens.weight": torch.zeros(300, 16)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "bias='all'"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication="),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"tensors": lambda weights: weights.update(EMBEDDING)}, "weights of the base.*embed_tokens.weight"),
        ({"tensors": lambda weights: weights.pop(ONE)}, "lacks 1 tensors.*v_proj.lora_B"),
        ({"tensors": lambda weights: weights.update({ONE: torch.zeros(9, 4)})}, "does not fit .*size mismatch"),
    ],
)
def test_adapters_that_are_refused_leave_the_policy_as_it_was(changes, message, tiny_model_path, adapters, tmp_path):
    folder = edited(adapters["plain"], tmp_path / "edited", **changes)
    policy = load_policy(tiny_model_path)
    ids = torch.tensor(SEQUENCES[:1])
    logits = policy(ids).logits
    for backbone in (SharedBackbone(policy), SharedBackbone.load(tiny_model_path)):
        with pytest.raises(ValueError, match=message):
            backbone.add_reward_adapter(folder)
        assert backbone.reward_adapters == ()
        # The backbone still takes another one.
        name = backbone.add_reward_adapter(adapters["rslora"])
        scores = backbone.score(name, SEQUENCES, batch_size=2, pad_token_id=0)
        assert apart(scores, separate_scores(tiny_model_path, adapters["rslora"])) <= 2e-6
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


def unfrozen(base: str):
    policy = load_policy(base)
    policy.get_base_model().model.norm.weight.requires_grad_(True)
    return policy


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (AutoModelForCausalLM.from_pretrained, "not a model with a LoRA adapter"),
        (lambda base: load_policy(base, init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (unfrozen, "trains weights of its base, such as norm.weight"),
    ],
)
def test_policies_that_are_refused(policy, message, tiny_model_path):
    with pytest.raises(ValueError, match=message):
        SharedBackbone(policy(tiny_model_path))


def test_a_merged_policy(tiny_model_path, adapters):
    policy, backbone, name = on_policy(tiny_model_path, adapters["plain"])
    before = backbone.score(name, SEQUENCES, pad_token_id=0)
    policy.merge_adapter()
    with pytest.raises(ValueError, match="merged into the base: unmerge it"):
        backbone.score(name, SEQUENCES, pad_token_id=0)
    policy.unmerge_adapter()
    assert apart(backbone.score(name, SEQUENCES, pad_token_id=0), before) < 1e-5
