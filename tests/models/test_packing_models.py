"""Packed passes give what padded ones give: values and gradients, by architecture, precision and attention."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.utils
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl.trainer.utils import add_fused_lm_head

from tests.support.float64 import float64_throughout
from tests.support.packing import (
    ARCHITECTURES,
    OUTPUTS,
    forward,
    gradient,
    largest,
    padded,
    ragged,
    tiny_classifier,
    tiny_model,
    values_and_gradient,
    varlen_by_contract,
)
from tests.support.train_once import in_processes, relative_difference
from trl_ext.models.packing import attention as packed_attention
from trl_ext.models.packing import packed_inputs, share_prefixes, wrap
from trl_ext.models.packing.plan import plan_batch

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
FILLED = {"round_up": True}


def assert_same_outputs(got, expected) -> None:
    for name in OUTPUTS:
        assert largest(getattr(got, name), getattr(expected, name)) < 1e-4, name


# ---- float32 ----


@architectures
def test_equal_to_the_padded_pass(architecture):
    """Log-probabilities within 1e-4, the gradient within 1e-5 of its norm, on 38% of the tokens: 90 of 6 x 40.

    The rows of `ragged` have 37, 26, 26, 15, 28 and 37 tokens before their last. Their prompts begin with 20, 15 or 9
    tokens of another: 169 - 20 - 20 - 15 - 15 - 9 = 90.
    """
    batch, model = ragged(), tiny_model(architecture)
    expected, expected_gradient = values_and_gradient(model, batch)
    packing = share_prefixes(model)
    got, got_gradient = values_and_gradient(model, batch)
    assert (packing.reason, packing.backend, dict(packing.left_padded)) == (None, "sdpa", {})
    assert (packing.padded_tokens, packing.packed_tokens) == (240, 90)
    assert {getattr(got, name).shape for name in OUTPUTS} == {(6, 39)}
    assert_same_outputs(got, expected)
    assert got.is_top1.equal(expected.is_top1)
    assert got.label_mask.equal(expected.label_mask)
    assert got.aux_loss is None
    assert got.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    assert relative_difference(got_gradient, expected_gradient) < 1e-5
    assert packing.largest_difference < 1e-4
    # The differences would be small too if the values were: tokens are told apart.
    assert expected.log_probs[expected.label_mask].std() > 0.1


def test_places_without_a_label_are_zero():
    """Though they lead to a packed position that has one: a row's padding to the first token, whose label counts, and
    a prefix in which only the other row has labels."""
    row = list(range(10, 26))
    batch = padded([row, [*row[:12], 5], row[:9]], [1, 12, 1])
    model = tiny_model("qwen2")
    expected = forward(model, batch)
    packing = share_prefixes(model)
    got = forward(model, batch)
    assert packing.packed_tokens == 15
    assert_same_outputs(got, expected)
    assert not any(getattr(got, name)[~expected.label_mask].any() for name in OUTPUTS)


def test_head_on_a_cpu(monkeypatch):
    """TRL's head scores the labelled positions, 7 columns at a time here; afterwards, it is as before.

    At the first pass it searches for them; later it is given them.
    """
    utils, seen = trl.trainer.utils, set()
    own = (utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton)
    monkeypatch.setattr(wrap, "_CPU_TILE", 7)
    model, batch = tiny_model("qwen2"), ragged()
    assert model.config.vocab_size % 7
    expected, expected_gradient = values_and_gradient(model, batch)
    share_prefixes(model)
    model.base_model.register_forward_pre_hook(
        lambda *_: seen.add((utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton(model.device)))
    )
    for _ in range(2):
        got, got_gradient = values_and_gradient(model, batch)
        assert_same_outputs(got, expected)
        assert relative_difference(got_gradient, expected_gradient) < 1e-5
    assert seen == {(7, True), (7, False)}
    # Also where the pass fails, after which the next one is of its own batch.
    inputs = {"input_ids": batch["input_ids"][:, -9:], "use_cache": False}
    logits = model(**inputs).logits
    fails = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, batch)
    fails.remove()
    assert own == (utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton)
    assert model(**inputs).logits.equal(logits)


def test_batch_without_any_label_gives_a_differentiable_zero():
    model, batch = tiny_model("qwen2"), ragged()
    batch["labels"][:] = -100
    packing = share_prefixes(model)
    output = forward(model, batch)
    assert packing.packed_tokens > 0
    assert output.loss.item() == 0 and not output.log_probs.any()
    output.loss.backward()
    assert not gradient(model).any()


# ---- float64: nothing but rounding ----


@architectures
def test_equal_in_float64(architecture, monkeypatch):
    """With every cast to float32 bypassed, log-probabilities and gradients agree within 1e-12, also of a filled row.

    TRL's kernel accumulates in float32, so the softmax is taken here, over the hidden states of either pass.
    """
    batch = ragged()
    model = tiny_model(architecture, head=False).double()
    # Experts are otherwise multiplied by a grouped kernel that knows no float64.
    model.set_experts_implementation("eager")
    mask = batch["labels"][:, 1:] != -100
    targets = batch["input_ids"][:, 1:][mask]
    weights = torch.linspace(-1, 1, len(targets), dtype=torch.float64)

    def finished(hidden: Tensor) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        logits = model.get_output_embeddings()(hidden)
        log_probs = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
        (log_probs * weights).sum().backward()
        return log_probs.detach(), gradient(model)

    with float64_throughout():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        expected, expected_gradient = finished(hidden[:, :-1][mask])
        assert hidden.dtype == expected.dtype == torch.float64
        add_fused_lm_head(model)
        packing = share_prefixes(model)
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        got, got_gradient = finished(hidden[:, :-1][mask])
        assert packing.packed_tokens == 96 and packing.backend == "sdpa"
        # As on a GPU: the row is filled up by a segment that nothing reads.
        monkeypatch.setattr(wrap, "plan_batch", lambda *args, **options: plan_batch(*args, **options | FILLED))
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        filled, filled_gradient = finished(hidden[:, :-1][mask])
        assert packing.packed_tokens == 96 + 128
    assert largest(got, expected) < 1e-12 and largest(filled, expected) < 1e-12
    assert relative_difference(got_gradient, expected_gradient) < 1e-12
    assert relative_difference(filled_gradient, expected_gradient) < 1e-12


def test_gradients_of_shared_keys_are_rounded_once():
    """A token on 300 paths: sums of bfloat16 numbers would stop at 256, where 256 + 1 is 256."""
    states = torch.ones(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    packed_attention._OfPaths.apply(states, torch.tensor([0] * 300 + [1])).sum().backward()
    assert states.grad.flatten().tolist() == [300, 1]
    wide = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: packed_attention._OfPaths.apply(x, torch.tensor([2, 0, 2, 1])), wide)


def test_a_window_that_is_off_by_one_is_far_off(monkeypatch):
    """Sliding windows are seen by the comparison: with one token more than the model's nine, it fails."""
    model, batch = tiny_model("mistral"), ragged()
    expected = forward(model, batch).log_probs
    inner = packed_attention._sdpa

    def one_more(plan, query, key, value, scaling, window, dropout):
        return inner(plan, query, key, value, scaling, window + 1, dropout)

    monkeypatch.setattr(packed_attention, "_sdpa", one_more)
    packing = share_prefixes(model)
    assert largest(forward(model, batch).log_probs, expected) == 0
    assert not packing.active and "off the padded forward" in packing.reason
    assert float(packing.reason.split(" is ")[1].split()[0]) > 1e-2


# ---- As trainers run models ----


# ---- Scores ----

CLASSIFIERS = ["llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "phi3", "mixtral"]


def score_gradient(model, inputs):
    model.zero_grad()
    scores = model(**inputs).logits
    (scores[:, 0] * torch.linspace(-1, 1, len(scores))).sum().backward()
    return scores.detach(), gradient(model)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_scores(architecture):
    model, batch = tiny_classifier(architecture), ragged()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected, expected_gradient = score_gradient(model, inputs)
    packing = share_prefixes(model)
    got, got_gradient = score_gradient(model, inputs)
    assert packing.backend == "sdpa" and packing.packed_tokens == 175 - 20 - 20 - 15 - 15 - 9
    assert largest(got, expected) < 1e-5 and expected.std() > 0.01
    assert relative_difference(got_gradient, expected_gradient) < 1e-5


@pytest.mark.parametrize("left", [False, True])
def test_scores_where_padding_is_the_end_token(left):
    """The score is read at the last token that is not padding, though an end token that is padding follows it."""
    model = tiny_classifier(pad_token_id=1)
    rows = [[*range(10, 22), 5, 1], [*range(10, 22), 7, 8, 1, 1], [9, 9, 1]]
    batch = padded(rows, [1, 1, 1], left=[6, 4, 17] if left else None, width=20, padding=1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected, expected_gradient = score_gradient(model, inputs)
    # By hand: each row alone, up to its last token that is no end token.
    for row, end in enumerate((13, 14, 2)):
        alone = model(input_ids=torch.tensor([rows[row][:end]])).logits.item()
        assert alone == pytest.approx(expected[row].item(), abs=1e-5)
    packing = share_prefixes(model)
    got, got_gradient = score_gradient(model, inputs)
    assert packing.packed_tokens > 0 and not packing.left_padded
    assert largest(got, expected) < 1e-5 and relative_difference(got_gradient, expected_gradient) < 1e-5


# ---- Attention functions ----


def hidden_states(model, backend: str, shares: bool) -> Tensor:
    plan = ragged_plan(share=shares)
    plan.derived["backend"] = backend
    return model.base_model(**packed_inputs(plan)).last_hidden_state


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    ("architecture", "windows"), [("llama", {(-1, 0)}), ("mistral", {(8, 0)}), ("gemma3", {(6, 0), (-1, 0)})]
)
def test_varlen_by_its_contract(architecture, windows, shares, monkeypatch):
    """A window of nine tokens counts the token itself, so that the kernel is given the eight before it."""
    calls: list[dict] = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_contract(calls))
    model = tiny_model(architecture).eval()
    share_prefixes(model)
    expected = hidden_states(model, "sdpa", shares)
    assert not calls
    got = hidden_states(model, "varlen", shares)
    assert len(calls) == 3
    assert {call["window_size"] for call in calls} == windows
    assert all(call["enable_gqa"] for call in calls)
    assert largest(got, expected) < 1e-5


def ragged_plan(**options):
    batch = ragged()
    return plan_batch(batch["input_ids"], batch["attention_mask"], **options)


def states(plan, heads: int = 2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, plan.tokens, 4, generator=generator) for _ in range(3)]


def test_dropout_of_attention_weights_goes_to_sdpa(monkeypatch):
    """varlen has no dropout: it would be called and do without."""
    monkeypatch.setattr(packed_attention, "_varlen", lambda *_: pytest.fail("varlen"))
    plan = ragged_plan(share=False)
    plan.derived["backend"] = "varlen"
    given = states(plan)
    kept = packed_attention.attend(plan, SimpleNamespace(), *given, dropout=1e-9)
    plan.derived["backend"] = "sdpa"
    assert largest(kept, packed_attention.attend(plan, SimpleNamespace(), *given)) < 1e-5
    torch.manual_seed(0)
    assert largest(packed_attention.attend(plan, SimpleNamespace(), *given, dropout=0.5), kept) > 0.1


# ---- FSDP2 ----


def fsdp_gradients(architecture: str, *, sharded: bool, checkpointing: bool) -> list[Tensor]:
    """In a process of a group: the mean gradients over the processes of three batches, which differ between them."""
    model = tiny_model(architecture)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if sharded:
        packing, mesh = share_prefixes(model), init_device_mesh("cpu", (distributed.get_world_size(),))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
    found = []
    for step in range(3):
        _, gradient = values_and_gradient(model, ragged(seed=10 * step + distributed.get_rank()))
        if not sharded:
            distributed.all_reduce(gradient)
            gradient /= distributed.get_world_size()
        found.append(gradient)
    if sharded:
        assert packing.active and packing.packed_tokens < packing.padded_tokens and not packing.left_padded
    return found


def write_largest_differences(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    apart = {}
    for architecture, checkpointing in itertools.product(("llama", "gemma3", "qwen2_moe"), (False, True)):
        both = [fsdp_gradients(architecture, sharded=s, checkpointing=checkpointing) for s in (True, False)]
        apart[f"{architecture}, checkpointing {checkpointing}"] = max(
            itertools.starmap(relative_difference, zip(*both, strict=True))
        )
    if distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(apart))
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_under_fsdp2_gradients_are_those_of_padded_passes(processes, tmp_path):
    """Each process has its own batches, packed rows of its own lengths, and a part of the parameters."""
    in_processes(processes, "-m", __name__, str(tmp_path / "largest.json"))
    largest = json.loads((tmp_path / "largest.json").read_text())
    assert len(largest) == 6 and all(0 < apart < 1e-5 for apart in largest.values()), largest


if __name__ == "__main__":
    write_largest_differences(sys.argv[1])
