"""`share_prefixes`: what it refuses and falls back from, what it leaves behind, and what it must not touch."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AttentionInterface
from transformers.integrations.neftune import activate_neftune
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from trl.trainer.utils import add_fused_lm_head

import trl_ext
from tests.packing import REFUSED, forward, padded, ragged, tiny_classifier, tiny_model, values_and_gradient
from trl_ext.models.packing import Packing, packing_of, share_prefixes
from trl_ext.models.packing.canary import canary_batch

HOOK = "trl_ext.models.packing.hook"


def close(got, expected) -> bool:
    return torch.allclose(got, expected, atol=1e-4)


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == HOOK]


@pytest.fixture(autouse=True)
def first_process(monkeypatch, caplog):
    monkeypatch.delenv("RANK", raising=False)
    caplog.set_level(logging.INFO, logger=HOOK)


@pytest.fixture
def mixed_precision():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- Models that are refused ----

REASONS = {
    "gpt2": "its positions are not rotary",
    "bloom": "its attention cannot be exchanged",
    "mamba": "it has layers of the kind linear_attention",
    "gemma2": "its attention scores have a soft cap",
    "gpt_oss": "its attention is eager: load it with attn_implementation sdpa or a flash attention",
    "opt": "its positions are not rotary",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused_models_run_as_before_and_say_so_once(architecture, caplog):
    model, batch = tiny_model(architecture), ragged()
    expected, before = forward(model, batch).log_probs, model.forward
    attention = model.config._attn_implementation
    packing = share_prefixes(model)
    assert packing.reason == REASONS[architecture] and not packing.active
    assert model.forward == before and model.config._attn_implementation == attention
    for _ in range(2):
        assert forward(model, batch).log_probs.equal(expected)
    assert share_prefixes(model) is packing
    assert said(caplog) == [f"packing: off, rows are padded: {REASONS[architecture]}"]
    assert (packing.backend, packing.packed_tokens) == (None, 0)


def test_attention_sinks_are_refused_with_any_attention():
    """As of a flash attention, which takes them as a keyword."""
    model = tiny_model("gpt_oss")
    model.config._attn_implementation = "flash_attention_3"
    assert share_prefixes(model).reason == "its attention has sinks"


def test_eager_attention_is_refused_and_sdpa_then_taken():
    model = tiny_model("qwen2", attn_implementation="eager")
    packing = share_prefixes(model)
    assert packing.reason.startswith("its attention is eager: load it with")
    model.set_attn_implementation("sdpa")
    later = share_prefixes(model)
    assert later is not packing and later.active
    forward(model, ragged())
    assert later.packed_tokens == 95


def test_removing_from_a_refused_model_leaves_later_wrappers():
    model = tiny_model("gpt2")
    packing = share_prefixes(model)
    calls = []
    inner = model.forward

    def wrapper(*arguments, **keywords):
        calls.append(1)
        return inner(*arguments, **keywords)

    model.forward = wrapper
    packing.remove()
    forward(model, ragged())
    assert calls == [1]


# ---- The canary ----


@pytest.fixture
def attention_named(monkeypatch):
    """Register an attention function with transformers, and pack over it."""

    def register(function, mask: str = "sdpa"):
        name = f"tests_{function.__name__}"
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[mask])
        return name

    return register


def test_attention_that_does_more_than_it_says_is_noticed(attention_named, caplog):
    """An attention that halves its scores gives other values than one that does not know of it."""

    def halving(module, query, key, value, attention_mask, scaling=None, **keywords):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=0.5 * scaling, **keywords)

    model, batch = tiny_model("qwen2", attn_implementation=attention_named(halving)), ragged()
    expected = forward(model, batch).log_probs
    packing = share_prefixes(model)
    assert packing.active
    for _ in range(3):
        assert forward(model, batch).log_probs.equal(expected)
    assert not packing.active
    assert packing.reason.startswith("sdpa attention is ") and packing.reason.endswith(" off the padded forward")
    assert said(caplog) == [f"packing: off, rows are padded: {packing.reason}"]
    assert packing.largest_difference is None and packing.packed_tokens == 0
    assert model.config._attn_implementation == "tests_halving"


def test_model_that_passes_its_attention_more_than_is_known_is_noticed(monkeypatch):
    """A soft cap that no configuration tells of: the attention function refuses it, and the padded pass goes on."""
    model, batch = tiny_model("qwen2"), ragged()
    expected = forward(model, batch).log_probs
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        monkeypatch.setattr(
            layer.self_attn,
            "forward",
            lambda *arguments, inner=inner, **keywords: inner(*arguments, **keywords, softcap=None, sink_token=3),
        )
    packing = share_prefixes(model)
    assert close(forward(model, batch).log_probs, expected)
    assert packing.reason == "its attention takes sink_token"


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


def test_canary_runs_once_and_before_the_batch_is_looked_at(monkeypatch):
    """Whether a batch is packed depends on its rows, which differ between processes; the canary must not: where
    parameters are sharded, every process has to make the same passes."""
    tried = []
    inner = Packing._try
    monkeypatch.setattr(Packing, "_try", lambda packing, backend: tried.append(backend) or inner(packing, backend))
    model = tiny_model("qwen2")
    packing = share_prefixes(model)
    odd = ragged()
    odd["labels"][1, -1] = 5
    forward(model, odd)
    assert tried == ["sdpa"]
    assert packing.left_padded == {"has a mask or labels of another form": 1}
    for _ in range(2):
        forward(model, ragged())
    assert tried == ["sdpa"] and packing.packed_tokens == 2 * 95


def test_canary_is_longer_than_the_window():
    """16 tokens longer, at least 32 and at most 640; the first row fills it."""
    for window, width in ((9, 32), (40, 56), (5000, 640)):
        config = tiny_model("mistral", sliding_window=window, max_position_embeddings=8192).config
        batch = canary_batch(config, "cpu")
        assert batch["input_ids"].shape == (3, width) and batch["attention_mask"][0].all()


def test_window_longer_than_the_canary_can_be():
    """Rows of at most 640 tokens are tried; the window of 5000 is not reached, and nothing is packed wrongly."""
    model = tiny_model("mistral", sliding_window=5000, max_position_embeddings=8192)
    packing = share_prefixes(model)
    forward(model, ragged())
    assert packing.active and packing.largest_difference < 1e-4


# ---- Single calls that are left padded ----


def left_padded(model, batch, **options) -> tuple[str, bool]:
    """The reason counted for a call, and whether its values are exactly those without the hook."""
    expected = forward(model, batch, **options).log_probs
    packing = share_prefixes(model)
    same = forward(model, batch, **options).log_probs.equal(expected)
    assert packing.active and packing.packed_tokens == 0 and packing.left_padded.total() == 1
    return next(iter(packing.left_padded)), same


def test_extra_inputs():
    batch = ragged()
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert left_padded(tiny_model("qwen2"), batch, position_ids=positions) == ("takes position_ids", True)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_asking_for_more_than_the_output(name):
    assert left_padded(tiny_model("qwen2"), ragged(), **{name: True}) == (f"takes {name}", True)


def test_spelling_out_what_is_the_case():
    model = tiny_model("qwen2")
    packing = share_prefixes(model)
    forward(model, ragged(), return_dict=True, output_hidden_states=False, output_attentions=False, position_ids=None)
    assert packing.packed_tokens == 95 and not packing.left_padded


def test_scores_with_adapters():
    """PEFT's model for sequence classification spells out what it returns."""
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model, batch = get_peft_model(tiny_classifier(), lora), ragged()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**inputs).logits
    packing = share_prefixes(model)
    assert close(model(**inputs).logits, expected)
    assert packing.packed_tokens == 96 and not packing.left_padded


def test_mask_with_a_hole():
    batch = ragged()
    batch["attention_mask"][0, 3] = 0
    assert left_padded(tiny_model("qwen2"), batch) == ("has a mask or labels of another form", True)


def test_label_on_padding():
    batch = ragged()
    batch["labels"][1, -1] = 5
    assert left_padded(tiny_model("qwen2"), batch) == ("has a mask or labels of another form", True)


def test_no_mask():
    batch = {**ragged(), "attention_mask": None}
    assert left_padded(tiny_model("qwen2"), batch) == ("takes no tokens with a mask of rows", True)


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


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "inputs_embeds"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "past_key_values"),
    ],
)
def test_prompt_learning(config, reason):
    torch.manual_seed(0)
    model, batch = get_peft_model(tiny_model("qwen2"), config), ragged()
    model.eval()
    expected = forward(model, batch).log_probs
    packing = share_prefixes(model)
    assert forward(model, batch).log_probs.equal(expected)
    assert packing.packed_tokens == 0 and reason in next(iter(packing.left_padded))


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
        ("phi3", {"resid_pdrop": 0.1}),
        ("gpt_neox", {"hidden_dropout": 0.1}),
        ("starcoder2", {"residual_dropout": 0.1}),
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


# ---- How it is called ----


def test_before_there_is_a_trainer():
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM has no fused LM head yet.*prefixes\(trainer.model\)"):
        share_prefixes(tiny_model("qwen2", head=False))
    with pytest.raises(ValueError, match="no model"):
        share_prefixes(None)


def test_public_name():
    assert trl_ext.share_prefixes is share_prefixes


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
    assert model.config._attn_implementation == "sdpa"
    assert forward(model, batch).log_probs.equal(expected)
    assert not packing.active and packing.packed_tokens == 95
    again = share_prefixes(model)
    forward(model, batch)
    assert again is not packing and again.packed_tokens == 95


def test_remove_under_the_wrapper_of_mixed_precision(mixed_precision):
    """Accelerate wraps the forward pass when training starts: the hook stays beneath, and does nothing any more."""
    model, batch = tiny_model("qwen2"), ragged()
    packing = share_prefixes(model)
    mixed_precision.prepare_model(model)
    forward(model, batch)
    packing.remove()
    forward(model, batch)
    assert packing.packed_tokens == 95
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


def test_wrapped_model():
    """As of DDP and DeepSpeed: the model is in `module`."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *arguments, **keywords):
            return self.module(*arguments, **keywords)

    model = tiny_model("qwen2")
    wrapped = Wrapper(Wrapper(model))
    packing = share_prefixes(wrapped)
    forward(wrapped, ragged())
    assert packing.model is model and packing.packed_tokens == 95
    assert packing_of(wrapped) is packing_of(model) is packing


def test_model_with_adapters_is_one_model():
    inner = tiny_model("qwen2")
    model = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    packing = share_prefixes(model)
    assert packing.model is inner and packing_of(inner) is packing
    assert share_prefixes(inner) is packing


def test_none_is_passed_over():
    model = tiny_model("qwen2")
    assert share_prefixes(None, model).model is model
    assert packing_of(tiny_model("llama")) is None
    assert packing_of(None) is None


# ---- What it must not touch ----


def test_saved_model_has_no_trace(tmp_path):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "before")
    share_prefixes(model)
    forward(model, ragged())
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert before == after and "trl_ext" not in after
    assert json.loads(after)["model_type"] == "qwen2"
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("before", "after")]
    assert names[0] == names[1]


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


def test_attention_that_was_exchanged_later_is_not_packed(attention_named):
    """Another one, or another function registered under the name of the one that was packed."""

    def plain(module, query, key, value, attention_mask, **keywords):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)

    name = attention_named(plain)
    model, batch = tiny_model("qwen2", attn_implementation=name), ragged()
    expected = forward(model, batch).log_probs
    packing = share_prefixes(model)
    forward(model, batch)
    assert packing.packed_tokens == 95
    attention_named(plain)
    assert forward(model, batch).log_probs.equal(expected)
    model.set_attn_implementation("eager")
    assert close(forward(model, batch).log_probs, expected)
    assert packing.packed_tokens == 95 and packing.left_padded == {"its attention was exchanged": 2}


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_flash_attention_of_transformers(name, monkeypatch):
    """What transformers loads and how it masks hangs on the name, which must therefore stay as it is.

    A stand-in with the arguments of the real one, which runs on GPUs only; it is called by that name for padded rows.
    """
    named = []

    def flash(module, query, key, value, attention_mask, **keywords):
        named.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)

    for interface, function in (
        (AttentionInterface, flash),
        (AttentionMaskInterface, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]),
    ):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
        interface.register(name, function)
    model, batch = tiny_model("qwen2"), ragged()
    expected = forward(model, batch).log_probs
    model.config._attn_implementation_internal = name
    packing = share_prefixes(model)
    assert close(forward(model, batch).log_probs, expected)
    assert packing.packed_tokens == 95 and model.config._attn_implementation == name
    assert set(named) == {name}, "the canary's padded pass"


def test_other_models_keep_their_attention():
    """The function is registered for all models; one without the hook computes what it did, to the bit."""
    other, batch = tiny_model("llama"), ragged()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = other(**inputs).logits
    model = tiny_model("qwen2")
    share_prefixes(model)
    forward(model, batch)
    assert other(**inputs).logits.equal(expected)


def test_embeddings_and_heads_that_are_trained_take_their_gradient():
    """Every parameter has a gradient with the hook where it had one without."""
    model = tiny_model("qwen2", tie_word_embeddings=True)
    values_and_gradient(model, ragged())
    expected = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    share_prefixes(model)
    values_and_gradient(model, ragged())
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == expected
    assert len(expected) == len(list(model.parameters()))


def test_classifier_needs_no_head():
    model = tiny_classifier()
    assert share_prefixes(model).active


def test_scores_with_a_margin_column():
    """TRL's reward trainer passes the column on; models do not read it."""
    model, batch = tiny_classifier(), ragged()
    packing = share_prefixes(model)
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], margin=torch.ones(6))
    assert packing.packed_tokens == 96 and not packing.left_padded
