"""`share_prefixes`: how it is called, what it leaves behind when it is removed, and what it must not touch."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from tests.support.packing import (
    HOOK,
    close,
    forward,
    padded,
    ragged,
    said,
    tiny_classifier,
    tiny_model,
)
from tests.support.trl_private import attention_of, forget_accelerator
from trl_ext.models.packing import packing_of, share_prefixes


@pytest.fixture(autouse=True)
def first_process(monkeypatch, caplog):
    monkeypatch.delenv("RANK", raising=False)
    caplog.set_level(logging.INFO, logger=HOOK)


@pytest.fixture
def mixed_precision():
    forget_accelerator()
    yield Accelerator(mixed_precision="bf16", cpu=True)
    forget_accelerator()


# ---- How it is called ----


def test_before_there_is_a_trainer():
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM has no fused LM head yet.*prefixes\(trainer.model\)"):
        share_prefixes(tiny_model("qwen2", head=False))
    with pytest.raises(ValueError, match="no model"):
        share_prefixes(None)


def test_says_one_line_at_the_first_batch(caplog):
    model = tiny_model("qwen2")
    packing = share_prefixes(model)
    assert "undecided until the first batch" in packing.describe() and not said(caplog)
    forward(model, ragged())
    forward(model, ragged())
    assert said(caplog) == [packing.describe()]
    assert "sdpa attention; differs from the padded forward by at most" in packing.describe()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_other_processes_and_reference_models_are_silent(rank, caplog, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    model, reference = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    share_prefixes(model, reference)
    forward(reference, ragged())
    forward(model, ragged())
    assert packing_of(reference).packed_tokens == packing_of(model).packed_tokens == 95
    assert len(said(caplog)) == (1 if rank == "0" else 0)


def test_twice_is_once():
    model = tiny_model("qwen2")
    packing = share_prefixes(model)
    hooked = model.forward
    assert share_prefixes(model) is packing and packing_of(model) is packing
    assert model.forward == hooked
    forward(model, ragged())
    assert packing.packed_tokens == 95


def test_second_trainer_on_the_same_model():
    """The second head goes past the first hook; a second call packs again, with the second head's outputs."""
    model, batch = tiny_model("qwen2", outputs=("log_probs",)), ragged()
    first = share_prefixes(model)
    forward(model, batch)
    add_fused_lm_head(model, temperature=0.5, outputs=("log_probs", "entropy"))
    expected = forward(model, batch)
    assert first.packed_tokens == 95
    second = share_prefixes(model)
    got = forward(model, batch)
    assert second is not first and packing_of(model) is second
    assert first.reason == "it was taken over by another trainer"
    assert (first.packed_tokens, second.packed_tokens) == (95, 95)
    assert close(got.log_probs, expected.log_probs) and close(got.entropy, expected.entropy)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    plain = tiny_model("qwen2", head=False)
    assert close(model(**inputs).logits, plain(**inputs).logits)


def test_remove():
    model, batch = tiny_model("qwen2"), ragged()
    expected, before = forward(model, batch).log_probs, model.forward
    packing = share_prefixes(model)
    forward(model, batch)
    packing.remove()
    assert model.forward == before
    assert attention_of(model) == "sdpa"
    assert forward(model, batch).log_probs.equal(expected)
    assert not packing.active and packing.packed_tokens == 95
    again = share_prefixes(model)
    forward(model, batch)
    assert again is not packing and again.packed_tokens == 95


@pytest.mark.parametrize("hook_first", [False, True])
def test_mixed_precision_of_accelerate(hook_first, mixed_precision):
    """TRL prepares its reference model, mixed precision and all, before a user has a trainer to take it from."""
    model, batch = tiny_model("qwen2"), ragged()
    packing = share_prefixes(model) if hook_first else None
    mixed_precision.prepare_model(model, evaluation_mode=True)
    if not hook_first:
        expected = forward(model, batch).log_probs
        packing = share_prefixes(model)
        assert (forward(model, batch).log_probs - expected).abs().mean() < 0.02
    else:
        forward(model, batch)
    assert packing.active and packing.packed_tokens == 95
    # In bfloat16: the difference is of that size, and not of float32's.
    assert 1e-4 < packing.largest_difference < 0.5
    assert share_prefixes(model) is packing and packing.active


def test_copy_packs_by_itself():
    model, batch = tiny_model("qwen2"), ragged()
    packing = share_prefixes(model)
    forward(model, batch)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    log_probs = forward(twin, batch).log_probs
    assert (packing.packed_tokens, packing_of(twin).packed_tokens) == (95, 190)
    assert packing_of(twin).model is twin
    fresh = tiny_model("qwen2")
    fresh.load_state_dict(twin.state_dict())
    assert close(log_probs, forward(fresh, batch).log_probs)
    assert (log_probs - forward(model, batch).log_probs).abs().max() > 0.1
    packing_of(twin).remove()
    assert packing.active and not packing_of(twin).active


def test_model_with_adapters_is_one_model():
    inner = tiny_model("qwen2")
    model = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    packing = share_prefixes(model)
    assert packing.model is inner and packing_of(inner) is packing
    assert share_prefixes(inner) is packing


# ---- What it must not touch ----


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3"])
def test_generation_is_as_before(architecture):
    model = tiny_model(architecture).eval()
    batch = padded([[5, 6, 7, 8, 9, 10, 11], [12, 13]], [1, 1], left=[0, 5])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def generate():
        torch.manual_seed(0)
        return model.generate(**inputs, max_new_tokens=20, do_sample=True, use_cache=True, pad_token_id=0)

    expected = generate()
    packing = share_prefixes(model)
    assert generate().equal(expected)
    forward(model, ragged())
    assert packing.packed_tokens == 95
    assert generate().equal(expected)
    packing.remove()
    assert generate().equal(expected)


def test_other_calls_of_the_model_are_its_own():
    """Logits, hidden states, a loss, attention to a cache, and arguments by position."""
    model, plain, batch = tiny_model("qwen2").eval(), tiny_model("qwen2", head=False).eval(), ragged()
    packing = share_prefixes(model)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert model(**inputs).logits.equal(plain(**inputs).logits)
    assert model(batch["input_ids"], batch["attention_mask"]).logits.equal(plain(**inputs).logits)
    assert model(**batch).loss.equal(plain(**batch).loss)
    states = [it(**inputs, output_hidden_states=True).hidden_states for it in (model, plain)]
    assert all(got.equal(expected) for got, expected in zip(*states, strict=True))
    assert packing.left_padded.total() == packing.packed_tokens == 0 and packing.backend is None


def test_attention_that_was_exchanged_later_is_not_packed():
    model, batch = tiny_model("qwen2"), ragged()
    expected = forward(model, batch).log_probs
    packing = share_prefixes(model)
    forward(model, batch)
    model.set_attn_implementation("eager")
    assert close(forward(model, batch).log_probs, expected)
    assert packing.packed_tokens == 95 and packing.left_padded == {"its attention was exchanged": 1}


def test_scores_with_a_margin_column():
    """TRL's reward trainer passes the column on; models do not read it."""
    model, batch = tiny_classifier(), ragged()
    packing = share_prefixes(model)
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], margin=torch.ones(6))
    assert packing.packed_tokens == 96 and not packing.left_padded
