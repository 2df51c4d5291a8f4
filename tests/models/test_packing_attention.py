"""Attention functions of packed passes: varlen and sdpa give equal values, and what none can do raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.support.packing import largest, ragged, tiny_model
from trl_ext.models.packing import attention as packed_attention
from trl_ext.models.packing import packing_of, share_prefixes
from trl_ext.models.packing.planner import plan_batch

# ---- Back-ends ----


def varlen_by_contract(calls: list, grouped: bool = True):
    """`torch.nn.attention.varlen.varlen_attn` as it is documented, in plain operations, and what it was called with.

    Queries and keys of a segment end together. (-1, 0) is causal attention, (W, 0) that to W tokens before a token
    and the token itself. Without `grouped` it is that of torch 2.11, which has no grouped heads.
    """

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        calls.append({"window_size": window_size, "enable_gqa": enable_gqa})
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key)
        assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
        assert all(states.is_contiguous() for states in (query, key, value))
        assert enable_gqa or query.shape[1] == key.shape[1]
        outputs = []
        for row in range(len(cu_seq_q) - 1):
            own, other = slice(*cu_seq_q[row : row + 2]), slice(*cu_seq_k[row : row + 2])
            added, length = own.stop - own.start, other.stop - other.start
            distance = torch.arange(length - added, length)[:, None] - torch.arange(length)
            mask = distance >= 0
            assert window_size[1] == 0
            if window_size[0] >= 0:
                mask &= distance <= window_size[0]
            states = (states.transpose(0, 1)[None] for states in (query[own], key[other], value[other]))
            output = scaled_dot_product_attention(*states, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)

    def varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    return varlen_attn if grouped else varlen_attn_2_11


def hidden_states(model, plan, backend: str) -> Tensor:
    plan.derived["backend"] = backend
    return packing_of(model).hidden_states(plan)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    ("architecture", "windows"), [("llama", {(-1, 0)}), ("mistral", {(8, 0)}), ("gemma3", {(6, 0), (-1, 0)})]
)
def test_varlen_by_its_contract(architecture, windows, shares, grouped, monkeypatch):
    """A window of nine tokens counts the token itself, so that the kernel is given the eight before it."""
    calls: list[dict] = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_contract(calls, grouped))
    model, batch = tiny_model(architecture).eval(), ragged()
    share_prefixes(model)
    expected = hidden_states(model, plan_batch(**batch, share=shares), "sdpa")
    assert not calls
    got = hidden_states(model, plan_batch(**batch, share=shares), "varlen")
    assert len(calls) == 3
    assert {call["window_size"] for call in calls} == windows
    assert all(call["enable_gqa"] == grouped for call in calls)
    assert largest(got, expected) < 1e-5


def layer(**options):
    module = torch.nn.Module()
    for name, value in options.items():
        setattr(module, name, value)
    return module


def states(plan, heads: int = 2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, plan.tokens, 4, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("keyword", ["softcap", "s_aux"])
def test_unknown_keyword_of_an_attention_raises(keyword):
    plan = plan_batch(**ragged())
    with pytest.raises(NotImplementedError, match=keyword):
        packed_attention.attend(plan, layer(), *states(plan), **{keyword: 0.0})
    packed_attention.attend(plan, layer(), *states(plan), **{keyword: None})


def test_attention_that_is_not_causal_raises():
    plan = plan_batch(**ragged())
    for module, options in ((layer(is_causal=False), {}), (layer(), {"is_causal": False})):
        with pytest.raises(NotImplementedError, match="not causal"):
            packed_attention.attend(plan, module, *states(plan), **options)


def test_dropout_of_attention_weights_goes_to_sdpa(monkeypatch):
    """varlen has no dropout: it would be called and do without."""

    def never(*arguments):
        raise AssertionError("varlen")

    monkeypatch.setattr(packed_attention, "_varlen", never)
    plan = plan_batch(**ragged(), share=False)
    plan.derived["backend"] = "varlen"
    given = states(plan)
    kept = packed_attention.attend(plan, layer(), *given, dropout=1e-9)
    plan.derived["backend"] = "sdpa"
    assert largest(kept, packed_attention.attend(plan, layer(), *given)) < 1e-5
    torch.manual_seed(0)
    assert largest(packed_attention.attend(plan, layer(), *given, dropout=0.5), kept) > 0.1
