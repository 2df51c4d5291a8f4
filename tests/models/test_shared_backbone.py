"""One base under the policy's adapter and those of reward models: equal scores, and an untouched policy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

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
from trl_ext.models import SharedBackbone, score_sequences


@pytest.fixture(scope="module")
def adapters(tiny_model_path, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_model_path, folder / str(seed), seed=seed, **settings)
        for seed, (name, settings) in enumerate(VARIANTS.items())
    }


def state(model) -> tuple:
    """What scoring must not change."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return (
        list(model.active_adapters),
        [layer.disable_adapters for layer in layers],
        [list(layer.active_adapters) for layer in layers],
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        {module: module.training for module in model.modules()},
    )


def unique_bytes(model) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("name", list(VARIANTS))
def test_shared_scores_are_those_of_a_separate_copy(name, tiny_model_path, adapters):
    """On the policy's backbone with every other adapter there, on a frozen base, and by hand: one number."""
    backbone = SharedBackbone(load_policy(tiny_model_path))
    names = {variant: backbone.add_reward_adapter(folder) for variant, folder in adapters.items()}
    shared = backbone.score(names[name], SEQUENCES, batch_size=2, pad_token_id=0)
    separate = separate_scores(tiny_model_path, adapters[name])
    assert (shared - separate).abs().max() <= 2e-6
    by_hand = plain_scores(load_adapter(tiny_model_path, adapters[name]), SEQUENCES)
    assert (shared - by_hand).abs().max() <= 2e-6
    assert separate.std() > 0.05, "scores that are all alike would prove nothing"

    frozen = SharedBackbone.load(tiny_model_path)
    names = {variant: frozen.add_reward_adapter(folder) for variant, folder in adapters.items()}
    assert (frozen.score(names[name], SEQUENCES, pad_token_id=0) - separate).abs().max() <= 2e-6


def test_scores_follow_neither_batch_size_nor_order_nor_padding(tiny_model_path, adapters):
    backbone = SharedBackbone(load_policy(tiny_model_path))
    name = backbone.add_reward_adapter(adapters["plain"])
    together = backbone.score(name, SEQUENCES, batch_size=4, pad_token_id=0)
    for index, sequence in enumerate(SEQUENCES):
        alone = backbone.score(name, [sequence], batch_size=1, pad_token_id=0)
        assert (alone[0] - together[index]).abs() <= 1e-6
    reversed_order = backbone.score(name, SEQUENCES[::-1], batch_size=3, pad_token_id=0)
    assert (reversed_order.flip(0) - together).abs().max() <= 1e-6


def test_the_score_is_read_at_the_last_token_that_is_not_padding(tiny_model_path, adapters):
    """With the end token as padding, a sequence scores as without its end: transformers' rule, in both copies."""
    backbone = SharedBackbone(load_policy(tiny_model_path))
    name = backbone.add_reward_adapter(adapters["plain"])
    ends_with_padding = [[5, 9, 33, 2], [7, 8, 9, 10, 2]]
    shared = backbone.score(name, ends_with_padding, pad_token_id=2)
    separate = load_adapter(tiny_model_path, adapters["plain"])
    assert (shared - plain_scores(separate, [row[:-1] for row in ends_with_padding])).abs().max() <= 2e-6
    separate.config.pad_token_id = 2
    assert (shared - score_sequences(separate, ends_with_padding, pad_token_id=2)).abs().max() <= 1e-6


def test_bfloat16_scores_are_those_of_a_separate_copy(tiny_model_path, adapters):
    policy = load_policy(tiny_model_path)
    for parameter in policy.get_base_model().parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
    added = [p.dtype for n, p in policy.named_parameters() if f".{name}." in n]
    assert set(added) == {torch.float32}, "as the policy's own adapter"
    shared = backbone.score(name, SEQUENCES, pad_token_id=0)
    assert shared.dtype == torch.float32
    # bfloat16 keeps 8 bits: relative steps of 0.4 %, over two layers.
    assert (shared - separate_scores(tiny_model_path, adapters["plain"])).abs().max() < 0.1


def test_attaching_changes_nothing_else(tiny_model_path, adapters):
    policy = load_policy(tiny_model_path)
    policy.train()
    policy.get_base_model().model.layers[0].eval()
    before = state(policy)
    ids = torch.tensor(SEQUENCES[:1])
    logits = policy(ids).logits
    weights = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    seeds = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    backbone = SharedBackbone(policy)
    for folder in adapters.values():
        backbone.add_reward_adapter(folder)
    backbone.score("reward1", SEQUENCES, pad_token_id=0)
    assert torch.equal(torch.get_rng_state(), seeds[0])
    assert random.getstate() == seeds[1]
    assert np.array_equal(np.random.get_state()[1], seeds[2])
    after = state(policy)
    assert after[0] == before[0] == ["default"]
    assert {module: after[4][module] for module in before[4]} == before[4]
    assert [name for name, needs in after[3].items() if needs] == [name for name, needs in before[3].items() if needs]
    renamed = {name.replace(".base_layer.", "."): parameter for name, parameter in policy.named_parameters()}
    for name, weight in weights.items():
        assert torch.equal(renamed[name.replace(".base_layer.", ".")], weight), name
    assert torch.equal(policy(ids).logits, logits)
    assert backbone.reward_adapters == ("reward0", "reward1", "reward2", "reward3", "reward4")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_policy_trains_as_without_reward_adapters(checkpointing, tiny_model_path, adapters):
    """Scoring between forward and backward: gradients and the step are the same to the last bit."""

    def step(with_rewards: bool) -> dict[str, torch.Tensor]:
        policy = load_policy(tiny_model_path)
        policy.train()
        if checkpointing:
            policy.gradient_checkpointing_enable()
            policy.enable_input_require_grads()
        optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
        backbone = SharedBackbone(policy) if with_rewards else None
        names = [backbone.add_reward_adapter(folder) for folder in adapters.values()] if with_rewards else []
        ids = torch.tensor([[5, 9, 33, 2], [100, 120, 4, 55]])
        loss = policy(ids, labels=ids).loss
        for name in names:
            assert backbone.score(name, SEQUENCES, pad_token_id=0).isfinite().all()
        loss.backward()
        gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        assert all(".default." in name for name in gradients)
        optimizer.step()
        trained = {f"{name} after": p.detach() for name, p in policy.named_parameters() if ".default." in name}
        return gradients | trained

    plain, shared = step(False), step(True)
    assert plain.keys() == shared.keys()
    assert len(plain) == 16, "A and B of two modules in two layers, gradients and values"
    assert max((plain[name] - shared[name]).abs().max().item() for name in plain) == 0.0
    assert max(plain[name].abs().max().item() for name in plain if "after" not in name) > 1e-3


def test_scores_stay_as_the_policy_trains(tiny_model_path, adapters):
    policy = load_policy(tiny_model_path)
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["all linear, rank 6"])
    before = backbone.score(name, SEQUENCES, pad_token_id=0)
    randomize(policy, ".default.", seed=9, scale=1.0)
    assert torch.equal(backbone.score(name, SEQUENCES, pad_token_id=0), before)


def test_within_a_disabled_adapter(tiny_model_path, adapters):
    """As a trainer's pass for the reference: scores are the same, and the adapter is off again afterwards."""
    policy = load_policy(tiny_model_path)
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
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
    with policy.disable_adapter():
        added = backbone.add_reward_adapter(adapters["all linear, rank 6"])
        assert torch.equal(policy(ids).logits, reference), "also where it wraps modules that were bare before"
    assert torch.equal(
        backbone.score(added, SEQUENCES, batch_size=2, pad_token_id=0),
        separate_scores(tiny_model_path, adapters["all linear, rank 6"]),
    )


def test_an_exception_restores_everything(tiny_model_path, adapters):
    policy = load_policy(tiny_model_path)
    policy.train()
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
    before = state(policy)
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        backbone.score(name, [[1], []], pad_token_id=0)
    with pytest.raises(IndexError):
        backbone.score(name, [[10**6]], pad_token_id=0)
    assert state(policy) == before


def test_what_the_policy_froze_stays_frozen(tiny_model_path, adapters):
    """Of its own adapter the first layer only is trained: PEFT's switches would train all of it, or nothing."""
    policy = load_policy(tiny_model_path)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".default." in name and ".layers.0." in name)

    def trained() -> set[str]:
        return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}

    before = trained()
    assert 0 < len(before) < sum(".default." in name for name, _ in policy.named_parameters())
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
    assert trained() == before
    backbone.score(name, SEQUENCES, pad_token_id=0)
    assert trained() == before


def test_only_the_policy_is_saved(tiny_model_path, adapters, tmp_path):
    from copy import deepcopy

    from peft import PeftModel

    policy = load_policy(tiny_model_path)
    policy.save_pretrained(tmp_path / "without")
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
    SharedBackbone(policy).add_reward_adapter(adapters["rslora"])
    policy.save_pretrained(tmp_path / "with")
    files = sorted(str(path.relative_to(tmp_path / "with")) for path in (tmp_path / "with").rglob("*.*"))
    assert files == sorted(str(path.relative_to(tmp_path / "without")) for path in (tmp_path / "without").rglob("*.*"))
    saved, expected = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("with", "without"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in saved)
    assert not any("score" in key for key in policy.state_dict()), "the heads are outside of the model"

    copy = deepcopy(policy)
    randomize(copy, ".default.", seed=1)
    copy.save_pretrained(tmp_path / "copy")
    assert not torch.equal(
        load_file(tmp_path / "copy" / "adapter_model.safetensors")[next(iter(saved))], saved[next(iter(saved))]
    )
    policy.save_pretrained(tmp_path / "selected", selected_adapters=[name])
    assert (tmp_path / "selected" / name / "adapter_model.safetensors").is_file()
    restored = PeftModel.from_pretrained(load_policy(tiny_model_path).unload(), tmp_path / "with")
    ids = torch.tensor(SEQUENCES[:1])
    assert torch.equal(restored(ids).logits, policy.eval()(ids).logits)


def test_an_adapter_costs_its_own_weights_only(tiny_model_path, adapters):
    """With r=4 on q (16 to 16) and v (16 to 8) of two layers: 2 * 4 * ((16 + 16) + (16 + 8)) = 448 weights."""
    policy = load_policy(tiny_model_path)
    bare = unique_bytes(policy)
    backbone = SharedBackbone(policy)
    for count in (1, 2, 3, 4):
        backbone.add_reward_adapter(adapters["plain"])
        assert unique_bytes(policy) - bare == count * 448 * 4
    assert bare > 20 * 448 * 4, "another copy of the base would show"


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"use_dora": True},
    ],
    ids=["trained embedding", "trained output layer", "LoRA on the embedding", "DoRA"],
)
def test_other_kinds_of_policies(settings, tiny_model_path, adapters):
    """Copies that the policy trains beside the base are off while a reward is scored, and on again afterwards."""
    policy = load_policy(tiny_model_path, **settings)
    randomize(policy, "modules_to_save", seed=8)
    ids = torch.tensor(SEQUENCES[:1])
    logits, before = policy(ids).logits, state(policy)
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
    assert (
        backbone.score(name, SEQUENCES, pad_token_id=0) - separate_scores(tiny_model_path, adapters["plain"])
    ).abs().max() <= 1e-6
    trained = [[name for name, needs in flags[3].items() if needs] for flags in (before, state(policy))]
    assert trained[0] == trained[1]
    assert torch.equal(policy(ids).logits, logits)


def test_a_reference_adapter_beside_the_policy(tiny_model_path, adapters, tmp_path):
    """TRL adds one called `ref` to a policy that comes with an adapter; it is saved as before, and stays frozen."""
    policy = load_policy(tiny_model_path)
    backbone = SharedBackbone(policy)
    name = backbone.add_reward_adapter(adapters["plain"])
    policy.add_adapter("ref", policy.peft_config["default"])
    for name_of, parameter in policy.named_parameters():
        if ".ref." in name_of:
            parameter.requires_grad_(False)
    before = state(policy)
    backbone.score(name, SEQUENCES, pad_token_id=0)
    assert state(policy) == before
    policy.save_pretrained(tmp_path)
    assert sorted(path.parent.name for path in tmp_path.rglob("adapter_model.safetensors")) == sorted(
        [tmp_path.name, "ref"]
    )


def test_a_name_that_is_no_reward_adapters(tiny_model_path, adapters):
    backbone = SharedBackbone(load_policy(tiny_model_path))
    backbone.add_reward_adapter(adapters["plain"])
    with pytest.raises(ValueError, match="no reward adapter 'default' on this backbone; there are: reward0"):
        backbone.score("default", SEQUENCES)


def test_loading_a_frozen_base_draws_no_random_numbers(tiny_model_path, adapters):
    before = torch.get_rng_state()
    backbone = SharedBackbone.load(tiny_model_path, dtype=torch.bfloat16)
    name = backbone.add_reward_adapter(adapters["plain"])
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    base_types = {p.dtype for n, p in backbone.model.named_parameters() if ".lora_" not in n}
    assert base_types == {torch.bfloat16}
    assert (
        backbone.score(name, SEQUENCES, pad_token_id=0) - separate_scores(tiny_model_path, adapters["plain"])
    ).abs().max() < 0.1


def test_the_head_stays_in_float32_under_autocast(tiny_model_path, adapters):
    """A trainer may score inside its autocast: the product with the head is not rounded to bfloat16."""
    backbone = SharedBackbone(load_policy(tiny_model_path))
    name = backbone.add_reward_adapter(adapters["plain"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = backbone.score(name, SEQUENCES, pad_token_id=0)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())
