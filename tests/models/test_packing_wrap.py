"""`share_prefixes`: how it is called, what it must not touch, and what it leaves padded: models and single calls."""

from __future__ import annotations

import logging
import re
import weakref

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers.integrations.neftune import activate_neftune
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl.trainer.utils import add_fused_lm_head

from tests.support.packing import (
    HOOK,
    attention_named,
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
from trl_ext.models.packing.wrap import Dropout


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


def test_one_line_at_the_first_batch_of_the_policy(caplog):
    model, reference = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    packing = share_prefixes(model, reference)
    for each in (reference, model, model):
        forward(each, ragged())
    assert (packing_of(reference).packed_tokens, packing.packed_tokens) == (90, 180)
    assert said(caplog) == [packing.describe()]


def test_second_trainer_on_the_same_model():
    """The head of a second trainer is called on the same packed passes, whether it comes before them or after."""
    model, batch = tiny_model("qwen2", head=False), ragged()
    packing = share_prefixes(model)
    for head in ({"outputs": ("log_probs",)}, {"temperature": 0.5, "outputs": ("log_probs", "entropy")}):
        add_fused_lm_head(model, **head)
        got = forward(model, batch)
    assert share_prefixes(model) is packing and packing.packed_tokens == 180
    packing.remove()
    expected = forward(model, batch)
    assert close(got.log_probs, expected.log_probs) and close(got.entropy, expected.entropy)


def test_twice_is_once_and_removed_it_is_gone():
    model, batch = tiny_model("qwen2"), ragged()
    expected, before = forward(model, batch).log_probs, model.forward
    packing = share_prefixes(model)
    hooked = model.forward
    assert share_prefixes(model) is packing and packing_of(model) is packing and model.forward == hooked
    forward(model, batch)
    packing.remove()
    assert model.forward == before and attention_of(model) == "sdpa"
    assert forward(model, batch).log_probs.equal(expected)
    assert not packing.active and packing.packed_tokens == 90
    again = share_prefixes(model)
    forward(model, batch)
    assert again is not packing and again.packed_tokens == 90
    # An attention that is exchanged later is not packed.
    model.set_attn_implementation("eager")
    assert close(forward(model, batch).log_probs, expected)
    assert again.packed_tokens == 90 and again.left_padded == {"its attention was exchanged": 1}
    # A model with adapters is one model.
    inner = tiny_model("qwen2")
    packing = share_prefixes(get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"])))
    assert packing.model is inner and packing_of(inner) is packing and share_prefixes(inner) is packing


@pytest.mark.parametrize("hook_first", [False, True])
def test_mixed_precision_of_accelerate(hook_first, mixed_precision):
    """TRL prepares its reference model, mixed precision and all, before a user has a trainer to take it from."""
    model, batch = tiny_model("qwen2"), ragged()
    expected = forward(model, batch).log_probs
    packing = share_prefixes(model) if hook_first else None
    mixed_precision.prepare_model(model, evaluation_mode=True)
    packing = packing or share_prefixes(model)
    assert (forward(model, batch).log_probs - expected).abs().mean() < 0.02
    assert packing.active and packing.packed_tokens == 90
    # In bfloat16: the difference is of that size, and not of float32's.
    assert 1e-4 < packing.largest_difference < 0.5
    assert share_prefixes(model) is packing and packing.active


def test_a_model_that_is_dropped_is_freed():
    """At once, as memory on a GPU has to be. TRL's head would keep a language model until the next collection."""
    model = tiny_classifier()
    packing, reference = share_prefixes(model), weakref.ref(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.ones(2, 2))
    assert packing.packed_tokens == 4
    packing.remove()
    del model, packing
    assert reference() is None


# ---- What it must not touch ----


def test_generation_is_as_before():
    """With sliding and full attention."""
    model = tiny_model("gemma3").eval()
    batch = padded([[5, 6, 7, 8, 9, 10, 11], [12, 13]], [1, 1], left=[0, 5])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def generate():
        torch.manual_seed(0)
        return model.generate(**inputs, max_new_tokens=20, do_sample=True, use_cache=True, pad_token_id=0)

    expected = generate()
    packing = share_prefixes(model)
    assert generate().equal(expected)
    forward(model, ragged())
    assert packing.packed_tokens == 90
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


# ---- Models that are refused ----

EAGER = "its attention is eager: load it with attn_implementation sdpa or a flash attention"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("gpt2", {}, "its positions are not rotary"),
        ("bloom", {}, EAGER),
        ("mamba", {}, "it has layers of the kind linear_attention"),
        ("gpt_oss", {}, EAGER),
        ("qwen2", {"attn_implementation": "eager"}, EAGER),
        ("llama", {"rope_parameters": DYNAMIC}, "its rotary angles depend on the length of the batch"),
    ],
)
def test_refused_models_run_as_before_and_say_so_once(architecture, options, reason, caplog):
    """Until what is refused is changed."""
    model, batch = tiny_model(architecture, **options), ragged()
    expected, before = forward(model, batch).log_probs, model.forward
    attention = attention_of(model)
    packing = share_prefixes(model)
    assert packing.reason == reason and not packing.active
    assert model.forward == before and attention_of(model) == attention
    for _ in range(2):
        assert forward(model, batch).log_probs.equal(expected)
    assert share_prefixes(model) is packing
    assert said(caplog) == [f"packing: off, rows are padded: {reason}"]
    assert (packing.backend, packing.packed_tokens) == (None, 0)
    if options.get("attn_implementation"):
        model.set_attn_implementation("sdpa")
        later = share_prefixes(model)
        forward(model, batch)
        assert later is not packing and later.packed_tokens == 90


# ---- The canary ----


def halving(module, query, key, value, attention_mask, scaling=None, **keywords):
    """An attention that halves its scores gives other values than one that does not know of it."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=0.5 * scaling, **keywords)


def by_column(inner):
    """Rows laid after one another start anew by their positions; a model that counts by itself does not."""
    return lambda states, position_ids: inner(states, torch.arange(position_ids.shape[1])[None])


@pytest.mark.parametrize(
    ("architecture", "dtype", "reason"),
    [
        ("qwen2", torch.float32, "^sdpa attention is .* off the padded forward$"),
        ("qwen2", torch.bfloat16, "^sdpa attention is .* off the padded forward$"),
        ("llama", torch.float32, "off the padded forward$"),
        # A soft cap of the scores; from 5.18 on, transformers chooses eager attention for such a model.
        ("gemma2", torch.float32, "^its attention (takes softcap|is eager)"),
    ],
)
def test_a_pass_that_differs_from_the_padded_one_is_noticed(architecture, dtype, reason, caplog, monkeypatch):
    model, batch = tiny_model(architecture).to(dtype), ragged()
    if architecture == "qwen2":
        model.set_attn_implementation(attention_named(halving))
    elif architecture == "llama":
        monkeypatch.setattr(model.model.rotary_emb, "forward", by_column(model.model.rotary_emb.forward))
    expected, attention = forward(model, batch).log_probs, attention_of(model)
    packing = share_prefixes(model)
    for _ in range(3):
        assert forward(model, batch).log_probs.equal(expected)
    assert not packing.active and re.search(reason, packing.reason)
    assert said(caplog) == [f"packing: off, rows are padded: {packing.reason}"]
    assert packing.largest_difference is None and packing.packed_tokens == 0
    assert attention_of(model) == attention


def test_canary_leaves_random_state_and_modes_alone():
    model, batch = tiny_model("qwen2", attention_dropout=0.1), {name: rows[:1] for name, rows in ragged().items()}
    model.model.layers[1].eval()
    modes, drawn = {name: module.training for name, module in model.named_modules()}, []
    packing = share_prefixes(model)
    for settles in (False, True):
        torch.manual_seed(5)
        if settles:
            packing._settle()
        model(**batch)  # Not a fused call: no canary, three draws of dropout.
        drawn.append(torch.rand(3))
    assert packing.backend == "sdpa" and drawn[0].equal(drawn[1])
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- Single calls that are left padded ----


ANOTHER_FORM = "has a mask or labels of another form"


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("attention_mask", 0, 3), 0, ANOTHER_FORM),
        (("labels", 1, -1), 5, ANOTHER_FORM),
        (("attention_mask",), None, None),
        (("position_ids",), (ragged()["attention_mask"].cumsum(1) - 1).clamp(min=0), "takes position_ids"),
        # The loss that balances the load of experts counts padding.
        (("output_router_logits",), True, "takes output_router_logits"),
    ],
    ids=["hole in the mask", "label on padding", "no mask", "positions", "balanced experts"],
)
def test_calls_that_are_left_padded(place, value, reason):
    """Their values are exactly those without the hook."""
    name, *index = place
    batch = ragged()
    model = tiny_model("qwen2_moe", output_router_logits=name == "output_router_logits")
    if index:
        batch[name][*index] = value
    elif name != "output_router_logits":
        batch[name] = value
    expected = forward(model, batch)
    packing = share_prefixes(model)
    got = forward(model, batch)
    assert got.log_probs.equal(expected.log_probs) and got.get("aux_loss") == expected.get("aux_loss")
    assert packing.active and packing.packed_tokens == 0 and packing.left_padded == ({reason: 1} if reason else {})


def test_what_is_packed_all_the_same():
    """Every batch, however little it saves, and what spells out what is the case.

    Old and new log-probabilities of one response must come from passes of one kind: their ratio is compared with
    bounds of 1e-4, and half precision puts more than that between a packed and a padded pass.
    """
    model = tiny_model("qwen2")
    packing = share_prefixes(model)
    forward(model, padded([list(range(10, 50)), list(range(50, 90))], [1, 1]))
    assert (packing.packed_tokens, dict(packing.left_padded)) == (78, {})
    forward(model, ragged(), return_dict=True, output_hidden_states=False, output_attentions=False, position_ids=None)
    assert packing.packed_tokens == 78 + 90 and not packing.left_padded
    # NEFTune's noise is as large as the batch is short: on a packed row it would be another.
    activate_neftune(model, 5.0)
    forward(model, ragged())
    assert packing.left_padded == {"adds noise to its embeddings": 1}
    model.eval()
    forward(model, ragged())
    assert packing.packed_tokens == 78 + 2 * 90


# ---- Dropout ----


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen2", {"attention_dropout": 0.1}),
        ("gpt_neox", {"hidden_dropout": 0.1}),
        ("starcoder2", {"embedding_dropout": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("qwen2", {"lora_dropout": 0.1}),
    ],
)
def test_with_dropout_each_row_draws_its_own(architecture, options):
    """Padding is left out, prefixes are not shared: 169 tokens in training mode, 90 in evaluation."""
    adapter = LoraConfig(r=2, target_modules=["q_proj"], **options) if "lora_dropout" in options else None
    model = tiny_model(architecture, **({} if adapter else options))
    model = get_peft_model(model, adapter) if adapter else model
    packing = share_prefixes(model)
    forward(model, ragged())
    assert packing.packed_tokens == 169
    model.eval()
    forward(model, ragged())
    assert packing.packed_tokens == 169 + 90


def test_a_window_that_the_first_check_does_not_reach():
    """The check has rows of 640 tokens; with a window of 700, wider batches than that stay padded."""
    model = tiny_model("mistral", sliding_window=700, max_position_embeddings=1024)
    packing = share_prefixes(model)
    for width, left in ((690, 0), (710, 1)):
        forward(model, padded([list(range(2, 12))], [3], left=[width - 10]))
        assert sum(packing.left_padded.values()) == left
    assert list(packing.left_padded) == ["is longer than a sliding window that the first batch's check does not reach"]


def test_dropout_of_an_adapter_that_is_added_later_is_seen():
    model = tiny_model("qwen2")
    dropout = Dropout(model)
    assert not dropout.is_active()
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    assert dropout.is_active()
