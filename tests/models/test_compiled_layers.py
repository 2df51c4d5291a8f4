"""`compile_layers`: compiled layers give the gradients of padded passes, with few graphs for all lengths."""

from __future__ import annotations

import re
from functools import partialmethod

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, library, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from tests.support.packing import VOCABULARY, close, flash_by_contract, tiny_model, values_and_gradient
from trl_ext import PreferenceConfig, PreferenceTrainer, load_benchmark
from trl_ext.models import resolve_model_path
from trl_ext.models.packing import share_prefixes, wrap

# Torch has this operator for GPUs alone.
KERNELS = library.Library("aten", "IMPL", "CPU")
KERNELS.impl("_flash_attention_forward", flash_by_contract([]))


def differentiate_on_a_cpu(output_gradient, query, key, value, output, sums, *given, **options):
    """The gradients of softmax(scale Q K^T) V in each segment; an operator's kernel has no autograd within it."""
    query_bounds, key_bounds, *_ = given
    scale, window = options["scale"], options["window_size_left"]
    query_gradient, key_gradient, value_gradient = map(torch.zeros_like, (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for row in range(len(query_bounds) - 1):
        own, other = slice(*query_bounds[row : row + 2]), slice(*key_bounds[row : row + 2])
        added, length = own.stop - own.start, other.stop - other.start
        distance = torch.arange(length - added, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | ((distance > window) if window >= 0 else False)
        queries, upstream = query[own].transpose(0, 1), output_gradient[own].transpose(0, 1)
        keys, values = (one[other].transpose(0, 1).repeat_interleave(groups, dim=0) for one in (key, value))
        weights = (queries @ keys.mT * scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)
        upstream_weights = upstream @ values.mT
        scores = weights * (upstream_weights - (upstream_weights * weights).sum(dim=-1, keepdim=True)) * scale
        query_gradient[own] = (scores @ keys).transpose(0, 1)
        for total, part in ((key_gradient, scores.mT @ queries), (value_gradient, weights.mT @ upstream)):
            total[other] = part.unflatten(0, (-1, groups)).sum(dim=1).transpose(0, 1)
    return query_gradient, key_gradient, value_gradient


KERNELS.impl("_flash_attention_backward", differentiate_on_a_cpu)


@pytest.fixture
def graphs(monkeypatch) -> CompileCounterWithBackend:
    """Compiles without the generation of code, and counts graphs; packed passes use varlen attention."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=counter))
    monkeypatch.setattr(wrap, "_backends", lambda device: ("varlen",))
    return counter


def batch_of(prompt: int, responses: list[int]) -> dict[str, Tensor]:
    """Responses of these lengths to one prompt, padded on the right."""
    draw = torch.Generator().manual_seed(prompt)
    width = prompt + max(responses)
    ids = torch.randint(2, VOCABULARY, (len(responses), width), generator=draw)
    ids[:, :prompt] = ids[0, :prompt]
    mask = (torch.arange(width) < torch.tensor(responses)[:, None] + prompt).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


BATCHES = [batch_of(9 + 7 * step, [3 + step, 20 - step, 5, 1 + 2 * step][: 2 + step % 3]) for step in range(20)]


@pytest.mark.parametrize(
    ("architecture", "checkpointing", "kinds"),
    [("llama", False, 1), ("llama", True, 1), ("gemma3", False, 2)],
)
def test_gradients_are_those_of_padded_passes(architecture, checkpointing, kinds, graphs):
    """Of batches of 20 lengths: no graph breaks, and two graphs for each kind of layer after the check's."""
    model, expected = tiny_model(architecture), tiny_model(architecture)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    packing = share_prefixes(model, compile_layers=True)
    for number, batch in enumerate(BATCHES):
        (got, its_gradient), (padded, gradient) = (
            values_and_gradient(model, batch),
            values_and_gradient(expected, batch),
        )
        assert close(got.log_probs, padded.log_probs) and (its_gradient - gradient).norm() < 1e-5 * gradient.norm()
        if number == 0:
            checked = graphs.frame_count
    assert packing.backend == "varlen" and packing.compiles
    assert "varlen attention, compiled layers; differs" in packing.describe()
    assert not counters["graph_break"] and 0 < checked <= graphs.frame_count <= checked + kinds


def test_a_trainer_with_adapters_and_a_reference(graphs, tmp_path):
    """The adapters are switched off for the reference: DPO logs what it logs without compiled layers."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    logs = []
    for compiles in (True, False):
        args = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
        args |= {"precompute_ref_log_probs": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        config = PreferenceConfig(str(tmp_path), compile_layers=compiles, per_device_train_batch_size=4, **args)
        rows = load_benchmark("toy")["train_prefs"].select(range(16))
        torch.manual_seed(0)
        datasets = {"train_dataset": rows, "eval_dataset": rows.select(range(8))}
        trainer = PreferenceTrainer(resolve_model_path("toy"), args=config, peft_config=adapter, **datasets)
        trainer.train()
        assert trainer.packing.compiles == compiles
        logs.append([row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row])
    # Of the check, and of the policy and its reference in training and in evaluation.
    assert not counters["graph_break"] and graphs.frame_count <= 8
    for one, other in zip(*logs, strict=True):
        names = {"loss", "eval_loss", "rewards/margins", "eval_rewards/margins", "grad_norm"} & one.keys()
        assert len(names) >= 2 and names <= other.keys()
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_without_varlen_attention_layers_stay_as_they_are():
    model = tiny_model("llama")
    packing = share_prefixes(model, compile_layers=True)
    values_and_gradient(model, BATCHES[0])
    assert not packing.compiles and all(layer._compiled_call_impl is None for layer in model.model.layers)
    assert "sdpa attention; not compiled layers: they need varlen attention" in packing.describe()


def kernels(code: str) -> int:
    """How many kernels generated code calls: fused ones, matrix products and attention."""
    call = r"^ +(cpp_fused\w+\(|triton_\w+\.run\(|extern_kernels\.|buf\d+ = torch\.ops\.aten._flash_attention_\w+\.)"
    return len(re.findall(call, code, flags=re.MULTILINE))


@pytest.mark.slow
def test_generated_code_gives_the_gradients_of_padded_passes(monkeypatch):
    """A layer is 13 kernels forward, of which 7 are matrix products and 5 fused, and 24 backward: 14 and 9."""
    torch._dynamo.reset()
    monkeypatch.setattr(wrap, "_backends", lambda device: ("varlen",))
    model, expected = tiny_model("qwen2"), tiny_model("qwen2")
    packing = share_prefixes(model, compile_layers=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(values_and_gradient, model, BATCHES[0])
    # Of the first batch's check, and of any number of tokens.
    assert [kernels(code) for code in codes] == [13, 24, 13, 24]
    for batch in BATCHES[:6]:
        (got, its_gradient), (padded, gradient) = (values_and_gradient(one, batch) for one in (model, expected))
        assert close(got.log_probs, padded.log_probs) and (its_gradient - gradient).norm() < 1e-5 * gradient.norm()
    assert packing.compiles
    # What is undone is as if it had never been.
    packing.remove()
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
