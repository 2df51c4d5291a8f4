"""What `share_prefixes` does not pack: models, attention functions that fail the canary, and single calls."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.integrations.neftune import activate_neftune
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.support.packing import (
    HOOK,
    REFUSED,
    attention_named,
    close,
    forward,
    padded,
    ragged,
    said,
    tiny_model,
)
from tests.support.trl_private import attention_of
from trl_ext.models.packing import packing_of, share_prefixes


@pytest.fixture(autouse=True)
def first_process(monkeypatch, caplog):
    monkeypatch.delenv("RANK", raising=False)
    caplog.set_level(logging.INFO, logger=HOOK)


# ---- Models that are refused ----

EAGER = "its attention is eager: load it with attn_implementation sdpa or a flash attention"
REASONS = {
    "gpt2": "its positions are not rotary",
    "bloom": EAGER,
    "mamba": "it has layers of the kind linear_attention",
    "gpt_oss": EAGER,
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused_models_run_as_before_and_say_so_once(architecture, caplog):
    model, batch = tiny_model(architecture), ragged()
    expected, before = forward(model, batch).log_probs, model.forward
    attention = attention_of(model)
    packing = share_prefixes(model)
    assert packing.reason == REASONS[architecture] and not packing.active
    assert model.forward == before and attention_of(model) == attention
    for _ in range(2):
        assert forward(model, batch).log_probs.equal(expected)
    assert share_prefixes(model) is packing
    assert said(caplog) == [f"packing: off, rows are padded: {REASONS[architecture]}"]
    assert (packing.backend, packing.packed_tokens) == (None, 0)


def test_eager_attention_is_refused_and_sdpa_then_taken():
    model = tiny_model("qwen2", attn_implementation="eager")
    packing = share_prefixes(model)
    assert packing.reason.startswith("its attention is eager: load it with")
    model.set_attn_implementation("sdpa")
    later = share_prefixes(model)
    assert later is not packing and later.active
    forward(model, ragged())
    assert later.packed_tokens == 95


# ---- The canary ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_does_more_than_it_says_is_noticed(dtype, caplog):
    """An attention that halves its scores gives other values than one that does not know of it."""

    def halving(module, query, key, value, attention_mask, scaling=None, **keywords):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=0.5 * scaling, **keywords)

    model, batch = tiny_model("qwen2", attn_implementation=attention_named(halving)).to(dtype), ragged()
    expected = forward(model, batch).log_probs
    packing = share_prefixes(model)
    assert packing.active
    for _ in range(3):
        assert forward(model, batch).log_probs.equal(expected)
    assert not packing.active
    assert packing.reason.startswith("sdpa attention is ") and packing.reason.endswith(" off the padded forward")
    assert said(caplog) == [f"packing: off, rows are padded: {packing.reason}"]
    assert packing.largest_difference is None and packing.packed_tokens == 0
    assert attention_of(model) == "tests_halving"


def test_soft_cap_of_the_attention_scores_is_noticed():
    model, batch = tiny_model("gemma2"), ragged()
    expected = forward(model, batch).log_probs
    packing = share_prefixes(model)
    assert forward(model, batch).log_probs.equal(expected)
    # From 5.18 on, transformers chooses eager attention for such a model.
    assert re.match("its attention (takes softcap|is eager)", packing.reason)


def test_model_that_ignores_its_positions_is_noticed(monkeypatch):
    """Rows laid after one another start anew by their positions; a model that counts by itself does not."""
    model, batch = tiny_model("llama"), ragged()
    inner = model.model.rotary_emb.forward

    def by_column(states, position_ids):
        return inner(states, torch.arange(position_ids.shape[1])[None])

    expected = forward(model, batch).log_probs
    monkeypatch.setattr(model.model.rotary_emb, "forward", by_column)
    packing = share_prefixes(model)
    assert close(forward(model, batch).log_probs, expected)
    assert "off the padded forward" in packing.reason


def test_canary_leaves_random_state_and_modes_alone():
    model, batch = tiny_model("qwen2", attention_dropout=0.1), ragged()
    model.model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    share_prefixes(model)
    torch.manual_seed(5)
    model(**{name: batch[name][:1] for name in batch})  # Not a fused call: no canary, three draws of dropout.
    expected = torch.rand(3)
    torch.manual_seed(5)
    packing = packing_of(model)
    packing._settle()
    assert packing.backend == "sdpa"
    model(**{name: batch[name][:1] for name in batch})
    assert torch.rand(3).equal(expected)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- Single calls that are left padded ----


def left_padded(model, batch, **options) -> tuple[str, bool]:
    """The reason counted for a call, and whether its values are exactly those without the hook."""
    expected = forward(model, batch, **options).log_probs
    packing = share_prefixes(model)
    same = forward(model, batch, **options).log_probs.equal(expected)
    assert packing.active and packing.packed_tokens == 0 and packing.left_padded.total() == 1
    return next(iter(packing.left_padded)), same


ANOTHER_FORM = "has a mask or labels of another form"


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("attention_mask", 0, 3), 0, ANOTHER_FORM),
        (("labels", 1, -1), 5, ANOTHER_FORM),
        (("attention_mask",), None, "takes no tokens with a mask of rows"),
        (("position_ids",), (ragged()["attention_mask"].cumsum(1) - 1).clamp(min=0), "takes position_ids"),
        (("output_hidden_states",), True, "takes output_hidden_states"),
    ],
    ids=["hole in the mask", "label on padding", "no mask", "positions", "hidden states"],
)
def test_calls_that_are_left_padded(place, value, reason):
    name, *index = place
    batch = ragged()
    if index:
        batch[name][*index] = value
    else:
        batch[name] = value
    assert left_padded(tiny_model("qwen2"), batch) == (reason, True)


def test_spelling_out_what_is_the_case():
    model = tiny_model("qwen2")
    packing = share_prefixes(model)
    forward(model, ragged(), return_dict=True, output_hidden_states=False, output_attentions=False, position_ids=None)
    assert packing.packed_tokens == 95 and not packing.left_padded


def test_balanced_experts():
    model = tiny_model("qwen2_moe", output_router_logits=True)
    expected = forward(model, ragged()).aux_loss
    assert left_padded(model, ragged()) == ("balances the load of experts", True)
    assert forward(model, ragged()).aux_loss.equal(expected)


def test_every_batch_is_packed_however_little_it_saves():
    """Old and new log-probabilities of one response must come from passes of one kind: their ratio is compared with
    bounds of 1e-4, and half precision puts more than that between a packed and a padded pass."""
    batch = padded([list(range(10, 50)), list(range(50, 90))], [1, 1])
    packing = share_prefixes(model := tiny_model("qwen2"))
    forward(model, batch)
    assert (packing.packed_tokens, dict(packing.left_padded)) == (78, {})


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope"}])
def test_rotary_angles_that_depend_on_the_length(rope):
    """Within the original context angles are fixed; beyond it they depend on the longest row, padding included."""
    context = 24
    options = {"rope_parameters": {**rope, "rope_theta": 10000.0}, "max_position_embeddings": 24}
    if rope["rope_type"] == "longrope":
        options["rope_parameters"] |= {
            "original_max_position_embeddings": context,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        }
        options["max_position_embeddings"] = 48
    model = tiny_model("llama", **options)
    prompt = list(range(10, 22))
    short = padded([[*prompt, 5, 6], [*prompt, *range(30, 40)], [*prompt, 7]], [12, 12, 12])
    long = padded([[*prompt, 5, 6], [*prompt, *range(30, 50)], [*prompt, 7]], [12, 12, 12])
    assert short["input_ids"].shape[1] == 22 and long["input_ids"].shape[1] == 32
    expected = [forward(model, batch).log_probs for batch in (short, long, short)]
    packing = share_prefixes(model)
    got = [forward(model, batch).log_probs for batch in (short, long, short)]
    assert close(got[0], expected[0]) and close(got[2], expected[2])
    assert torch.allclose(got[1], expected[1], atol=1e-6)
    assert packing.left_padded == {"rotary angles depend on the length of the batch": 1}
    # 13 + 21 - 11 + 12 - 11 tokens, twice.
    assert packing.packed_tokens == 2 * 24


def test_noise_on_embeddings():
    """NEFTune's noise is as large as the batch is short: on a packed row it would be another."""
    model, batch = tiny_model("qwen2"), ragged()
    packing = share_prefixes(model)
    activate_neftune(model, 5.0)
    forward(model, batch)
    assert packing.left_padded == {"adds noise to its embeddings": 1}
    model.eval()
    forward(model, batch)
    assert packing.packed_tokens == 95


# ---- Dropout ----


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen2", {"attention_dropout": 0.1}),
        ("gpt_neox", {"hidden_dropout": 0.1}),
        ("starcoder2", {"embedding_dropout": 0.1}),
        ("mixtral", {"router_jitter_noise": 0.1}),
    ],
)
def test_with_dropout_each_row_draws_its_own(architecture, options):
    """Padding is left out, prefixes are not shared: 169 tokens in training mode, 95 in evaluation."""
    model = tiny_model(architecture, **options)
    packing = share_prefixes(model)
    forward(model, ragged())
    assert packing.packed_tokens == 169
    model.eval()
    forward(model, ragged())
    assert packing.packed_tokens == 169 + 95


def test_dropout_of_an_adapter():
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    model = get_peft_model(tiny_model("qwen2"), lora)
    packing = share_prefixes(model)
    forward(model, ragged())
    assert packing.packed_tokens == 169


def test_equal_rows_differ_under_dropout():
    """Each of two equal rows has draws of its own."""
    row = list(range(10, 30))
    model, batch = tiny_model("qwen2", attention_dropout=0.5), padded([row, row, row[:4]], [4, 4, 2])
    share_prefixes(model)
    log_probs = forward(model, batch).log_probs
    assert (log_probs[0] - log_probs[1]).abs().max() > 0.1


def test_a_window_that_the_first_check_does_not_reach():
    """The check has rows of 640 tokens; with a window of 700, wider batches than that stay padded."""
    model = tiny_model("mistral", sliding_window=700, max_position_embeddings=1024)
    packing = share_prefixes(model)
    for width, left in ((690, 0), (710, 1)):
        forward(model, padded([list(range(2, 12))], [3], left=[width - 10]))
        assert sum(packing.left_padded.values()) == left
    assert list(packing.left_padded) == ["is longer than a sliding window that the first batch's check does not reach"]
