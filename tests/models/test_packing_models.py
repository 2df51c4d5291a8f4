"""Packed passes give what padded ones give, by architecture, precision and attention; and plans of packed passes."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.utils
from accelerate import Accelerator
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl.trainer.utils import add_fused_lm_head

from tests.support.float64 import float64_throughout
from tests.support.packing import (
    ARCHITECTURES,
    OUTPUTS,
    flash_by_contract,
    forward,
    gradient,
    largest,
    padded,
    ragged,
    tiny_classifier,
    tiny_model,
    values_and_gradient,
)
from tests.support.train_once import in_processes, relative_difference
from trl_ext.models.packing import attention as packed_attention
from trl_ext.models.packing import packed_inputs, packing_of, share_prefixes, wrap
from trl_ext.models.packing.plan import plan_batch
from trl_ext.trainers.passes import is_empty, no_loss, passes_of_pairs, window_of_passes

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
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_by_contract(calls))
    model = tiny_model(architecture).eval()
    share_prefixes(model)
    expected = hidden_states(model, "sdpa", shares)
    assert not calls
    got = hidden_states(model, "varlen", shares)
    assert len(calls) == 3
    assert {call["window"] for call in calls} == windows
    assert all(call["grouped"] for call in calls)
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


# ---- The plan of a packed pass ----


def planned(batch, drop_last: bool = False, **options):
    labels = [batch["labels"]] if drop_last else []
    return plan_batch(batch["input_ids"], batch["attention_mask"], *labels, **options)


# ---- An example worked by hand ----


def test_hand_worked_example():
    """Two rows of the prompt 5 6 7, one answered 8 1, one answered 9 1, and a third that is 5 6 7 8 1 again.

    Sorted: 0, 2, 1. Row 0 lays 5 6 7 8 1 at places 0 to 4. Row 2 adds nothing. Row 1 has 5 6 7 in common, places 0 to
    2, and adds 9 1 at places 5 and 6.

        place      0 1 2 3 4 5 6
        token      5 6 7 8 1 9 1
        position   0 1 2 3 4 3 4
    """
    batch = padded([[5, 6, 7, 8, 1], [5, 6, 7, 9, 1], [5, 6, 7, 8, 1]], [3, 3, 3], left=[0, 0, 1])
    plan = planned(batch, minimum_shared=1)
    assert plan.input_ids.tolist() == [[5, 6, 7, 8, 1, 9, 1]]
    assert plan.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4]]
    assert plan.query_lengths == (5, 2)
    assert plan.key_lengths == (5, 5)
    assert plan.key_index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert plan.columns.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 5, 6, 0], [0, 0, 1, 2, 3, 4]]
    assert plan.present.int().tolist() == [[1, 1, 1, 1, 1, 0]] * 2 + [[0, 1, 1, 1, 1, 1]]
    assert plan.shares is True
    assert plan.tokens == 7
    states = torch.arange(1.0, 8)[None, :, None].requires_grad_()
    unpacked = plan.unpack(states)
    assert unpacked[..., 0].tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 0], [0, 1, 2, 3, 4, 5]]
    unpacked.sum().backward()
    assert states.grad.flatten().tolist() == [3, 3, 3, 2, 2, 1, 1]


def test_hand_worked_example_without_last_tokens():
    """The last token of a row predicts nothing: 5 6 7 8 and 9 are left, and a row of one token keeps it."""
    batch = padded([[5, 6, 7, 8, 1], [5, 6, 7, 9, 1], [5]], [3, 3, 1])
    plan = planned(batch, minimum_shared=2, drop_last=True)
    assert plan.input_ids.tolist() == [[5, 5, 6, 7, 8, 9]]
    assert plan.columns.tolist() == [[1, 2, 3, 4, 0], [1, 2, 3, 5, 0], [0, 0, 0, 0, 0]]
    assert plan.present.sum(dim=1).tolist() == [4, 4, 1]


# ---- Properties of random batches ----


def random_batch(seed: int) -> tuple[dict, list[list[int]]]:
    """A batch and its rows.

    Rows grow out of each other: duplicates, prefixes of others, forks, one-token rows; padding on either side.
    """
    draw = random.Random(seed)
    # The number of the padding among them: what is padding is for the mask to say.
    tokens = range(draw.choice([2, 3, 60]))
    rows: list[list[int]] = []
    for _ in range(draw.randint(1, 9)):
        stem = draw.choice(rows)[: draw.randint(0, 14)] if rows and draw.random() < 0.8 else []
        rows.append(stem + draw.choices(tokens, k=draw.randint(0 if stem else 1, 12)))
    left = [draw.choice([0, 0, draw.randint(0, 5)]) for _ in rows]
    width = max(len(row) + before for row, before in zip(rows, left, strict=True)) + draw.choice([0, 0, 3])
    return padded(rows, [1] * len(rows), left=left, width=width), rows


def check(plan, batch, rows) -> None:
    """A plan against the rows it is of, by reading it as attention does."""
    first = batch["attention_mask"].argmax(dim=1).tolist()
    starts = [sum(plan.query_lengths[:i]) for i in range(len(plan.query_lengths))]
    paths = [path.tolist() for path in plan.key_index.split(plan.key_lengths)]
    tokens, positions = plan.input_ids[0].tolist(), plan.position_ids[0].tolist()
    columns, present = plan.columns.tolist(), plan.present.tolist()
    assert sum(plan.query_lengths) == plan.tokens and sum(plan.key_lengths) == len(plan.key_index)
    assert plan.columns.shape == plan.present.shape == batch["input_ids"].shape
    for index, row in enumerate(rows):
        held = [column for column, is_held in enumerate(present[index]) if is_held]
        assert held == list(range(first[index], first[index] + len(row)))
        places = [columns[index][column] for column in held]
        assert [tokens[place] for place in places] == row
        assert [positions[place] for place in places] == list(range(len(row)))
        for position, place in enumerate(places):
            segment = max(i for i, start in enumerate(starts) if start <= place)
            # The segment is the end of its path, so the token sees the path up to itself: the row up to itself.
            seen = len(paths[segment]) - plan.query_lengths[segment] + place - starts[segment] + 1
            assert paths[segment][:seen] == places[: position + 1]


@pytest.mark.parametrize("block", range(4))
def test_random_batches(block):
    """1200 batches, each planned with and without last tokens, with and without sharing, filled up, and with another
    threshold.

    With a smallest shared prefix of one token, the tokens encoded are as many as there are distinct prefixes: no plan
    has fewer.
    """
    for seed in range(300 * block, 300 * block + 300):
        batch, rows = random_batch(seed)
        for drop_last in (False, True):
            encoded = [row[:-1] if drop_last and len(row) > 1 else row for row in rows]
            plan = planned(batch, minimum_shared=1, drop_last=drop_last)
            check(plan, batch, encoded)
            assert plan.tokens == len({tuple(row[:end]) for row in encoded for end in range(1, len(row) + 1)})
            assert plan.shares is (plan.tokens < sum(map(len, encoded)))

            plan = planned(batch, share=False, drop_last=drop_last)
            check(plan, batch, encoded)
            assert plan.tokens == sum(map(len, encoded)) and plan.shares is False
            assert plan.query_lengths == plan.key_lengths == tuple(map(len, encoded))

            filled = planned(batch, minimum_shared=1, drop_last=drop_last, round_up=True)
            check(filled, batch, encoded)
            shortest = planned(batch, minimum_shared=1, drop_last=drop_last)
            assert filled.tokens == -(-shortest.tokens // 128) * 128
            assert filled.input_ids[0, : shortest.tokens].tolist() == shortest.input_ids[0].tolist()

            least = seed % 5 + 2
            plan = planned(batch, minimum_shared=least, drop_last=drop_last)
            check(plan, batch, encoded)
            inherited = [keys - added for keys, added in zip(plan.key_lengths, plan.query_lengths, strict=True)]
            assert all(shared == 0 or shared >= least for shared in inherited)


# ---- Single cases ----


def test_short_prefixes_are_shared_from_eight_tokens_on():
    def tokens(common: int) -> int:
        rows = [[*range(10, 10 + common), 3, 4], [*range(10, 10 + common), 5, 6]]
        return planned(padded(rows, [1, 1])).tokens

    assert tokens(7) == 18
    assert tokens(8) == 8 + 2 + 2


@pytest.mark.parametrize("place", [(0, 2), (1,)], ids=["hole", "empty row"])
def test_batches_that_no_plan_fits(place):
    batch = padded([[5, 6, 7, 8, 9], [5, 6, 7]], [2, 2], left=[0, 1], width=5)
    assert planned(batch) is not None
    batch["attention_mask"][*place] = 0
    assert planned(batch) is None


# ---- FSDP2 ----

# Tokens of a pass, and the number of passes that they divide four micro-batches into.
BUDGETS = {120: 4, 260: 2, 10_000: 1}
OF_WINDOWS = ("llama", "qwen2_moe")


def fsdp_model(architecture: str, *, sharded: bool, checkpointing: bool):
    """A model in a process of a group; a sharded one is packed as well."""
    model = tiny_model(architecture)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if sharded:
        share_prefixes(model)
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
    return model


def mean_gradient(model) -> Tensor:
    """The mean gradient over the processes, as FSDP2 computes it of a sharded model."""
    found = gradient(model)
    if packing_of(model) is None:
        distributed.all_reduce(found)
        found /= distributed.get_world_size()
    return found


def fsdp_gradients(architecture: str, **options) -> list[Tensor]:
    """The gradients of three batches, which differ between processes."""
    model, found = fsdp_model(architecture, **options), []
    for step in range(3):
        values_and_gradient(model, ragged(seed=10 * step + distributed.get_rank()))
        found.append(mean_gradient(model))
    packing = packing_of(model)
    if packing is not None:
        assert packing.active and packing.packed_tokens < packing.padded_tokens and not packing.left_padded
    return found


def pairs_of_process() -> list[dict[str, Tensor]]:
    """Four micro-batches of two pairs, whose lengths differ between processes, and a weight for each pair."""
    draw = random.Random(distributed.get_rank())
    found = []
    for _ in range(4):
        prompts = [draw.choices(range(2, 90), k=draw.randint(8, 30)) for _ in range(2)]
        rows = [prompt + draw.choices(range(2, 90), k=draw.randint(1, 30)) for prompt in prompts * 2]
        batch = padded(rows, [len(prompt) for prompt in prompts * 2])
        batch["completion_mask"] = (batch.pop("labels") != -100).long()
        found.append(batch | {"weight": torch.tensor([draw.random() for _ in prompts])})
    return found


def fsdp_window(architecture: str, budget: int | None, **options) -> Tensor:
    """The gradient of a window: of its passes with this budget, or of its micro-batches for None."""
    model, batches = fsdp_model(architecture, **options), pairs_of_process()
    if budget is not None:
        # The first batch checks packing.
        pair_loss(model, batches[0]).backward()
        model.zero_grad()
        packing, accelerator = packing_of(model), Accelerator(cpu=True)
        assert packing.packs_all() and accelerator.num_processes == distributed.get_world_size()
        passes = passes_of_pairs(batches, budget, accelerator, pad_token_id=0, shares=True)
        assert len(passes) == BUDGETS[budget]
        batches = window_of_passes(passes, len(batches))
    for index, batch in enumerate(batches):
        if budget is not None:
            # As accelerate's `no_sync` does, for all but the last micro-batch.
            model.set_requires_gradient_sync(index == len(batches) - 1)
        loss = no_loss(torch.device("cpu")) if is_empty(batch) else pair_loss(model, batch)
        loss.backward()
    return mean_gradient(model)


def pair_loss(model, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    labels = inputs["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    chosen, rejected = forward(model, {**inputs, "labels": labels}).log_probs.sum(dim=1).chunk(2)
    return -(batch["weight"] * torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))).sum()


def write_largest_differences(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    apart = {}
    for architecture, checkpointing in itertools.product(("llama", "gemma3", "qwen2_moe"), (False, True)):
        name, options = f"{architecture}, checkpointing {checkpointing}", {"checkpointing": checkpointing}
        both = [fsdp_gradients(architecture, sharded=sharded, **options) for sharded in (True, False)]
        apart[name] = max(itertools.starmap(relative_difference, zip(*both, strict=True)))
        if architecture not in OF_WINDOWS:
            continue
        expected = fsdp_window(architecture, None, sharded=False, **options)
        for budget in BUDGETS:
            got = fsdp_window(architecture, budget, sharded=True, **options)
            apart[f"{name}, passes of {budget}"] = relative_difference(got, expected)
    if distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(apart))
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_under_fsdp2_gradients_are_those_of_padded_passes(processes, tmp_path):
    """Each process has its own batches, packed rows of its own lengths, and a part of the parameters.

    Also of windows of micro-batches that are divided into passes, of which the last exchanges the gradients.
    """
    in_processes(processes, "-m", __name__, str(tmp_path / "largest.json"))
    largest = json.loads((tmp_path / "largest.json").read_text())
    assert len(largest) == 2 * (3 + 2 * len(BUDGETS)) and all(0 < apart < 1e-5 for apart in largest.values()), largest


if __name__ == "__main__":
    write_largest_differences(sys.argv[1])
