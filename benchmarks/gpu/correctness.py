"""Part B: whether packed passes are as exact as padded ones in the same precision.

The reference is computed in float64. An error is the norm of the difference to it over its norm. A comparison passes
if the packed error is at most 1.5 times the padded one, or 1e-5: a model's normalization computes in float32, so that
its reference is not more exact than that. NaN does not pass.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from contextlib import nullcontext
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.trainer.utils import add_fused_lm_head

from benchmarks._lengths import Group, Writer
from benchmarks._step_arms import arm_arguments, make_model, model_inputs, rollout
from benchmarks.gpu.machine import free, poison
from benchmarks.gpu.steps import grpo_groups
from trl_ext import share_prefixes
from trl_ext.models.batches import pad_rows
from trl_ext.models.packing import Plan, plan_batch, unwrapped
from trl_ext.models.packing.attention import attend

FACTOR, ROUNDING = 1.5, 1e-5
TOKENS, WINDOWS, TRIES, ROWS = (60, 127, 128, 129, 1000, 4096, 8192), (None, 256), 3, 6
# Query heads, key heads and head size of Qwen2.5 0.5B and 1.5B, and of a model without grouped heads.
HEADS = ((14, 2, 64), (12, 2, 128), (8, 8, 64))


def errors(parts: tuple[str, ...], padded: Any, packed: Any, exact: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each part of a comparison: its case and the errors of both passes."""

    def error(value: Tensor, true: Tensor) -> float:
        return ((value.double() - true.double()).norm() / true.double().norm()).item()

    values = zip(parts, padded, packed, exact, strict=True)
    return [{**case, "part": p, "padded": error(a, true), "packed": error(b, true)} for p, a, b, true in values]


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The comparison with the largest ratio of errors, and how many are not passed."""
    failed = sum(not row["packed"] <= max(FACTOR * row["padded"], ROUNDING) for row in rows)
    row = max(rows, key=lambda row: row["packed"] / row["padded"] if math.isfinite(row["packed"]) else math.inf)
    return {"compared": len(rows), "failed": failed, "ratio": row["packed"] / row["padded"], "worst": row}


def attention(device: str, quick: bool) -> dict[str, Any]:
    """Output and gradients of each attention back-end of packing, against padded attention, by precision."""
    backends = [("sdpa", torch.float32), ("sdpa", torch.bfloat16)]
    if device == "cuda":
        backends.append(("varlen", torch.bfloat16))
    lengths, heads, tries = ((60, 300), HEADS[:1], 1) if quick else (TOKENS, HEADS, TRIES)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for tokens, counts, window, seed in product(lengths, heads, WINDOWS, range(tries)):
        plan, states, weights = _shared_prompt(device, tokens, counts, seed)
        exact = _padded_attention(plan, states, weights, torch.float64, window)
        for backend, dtype in backends:
            padded = _padded_attention(plan, states, weights, dtype, window)
            plan.derived["backend"] = backend
            poison(device, weights.numel())
            output = attend(plan, SimpleNamespace(), *(part.to(dtype) for part in states), sliding_window=window)
            packed = [output, *torch.autograd.grad((output.float() * weights).sum(), states)]
            case = {"tokens": tokens, "heads": counts, "window": window, "seed": seed}
            rows[f"{backend}, {str(dtype)[6:]}"] += errors(("output", "dQ", "dK", "dV"), padded, packed, exact, case)
    return {name: worst(found) for name, found in rows.items()}


def _shared_prompt(device: str, tokens: int, heads: tuple[int, int, int], seed: int) -> tuple[Plan, list, Tensor]:
    """The plan of uneven responses to one prompt, `tokens` in all; queries, keys and values; weights of the output."""
    draw, write = random.Random(seed), Writer(50000, seed)
    prompt = max(9, tokens // 4)
    cuts = [0, *sorted(draw.sample(range(1, tokens - prompt), ROWS - 1)), tokens - prompt]
    start = write(prompt)
    ids, mask = pad_rows([start + write(end - begin) for begin, end in pairwise(cuts)], 0, "right")
    plan = plan_batch(ids.to(device), mask.to(device))
    assert plan.tokens == tokens
    generator = torch.Generator(device).manual_seed(seed)
    query_heads, key_heads, size = heads

    def normal(*shape: int) -> Tensor:
        # Values that bfloat16 holds exactly, so that the error is that of the computation.
        return torch.randn(*shape, generator=generator, device=device).bfloat16().float()

    states = [normal(1, count, tokens, size).requires_grad_() for count in (query_heads, key_heads, key_heads)]
    return plan, states, normal(1, tokens, query_heads, size)


def _padded_attention(plan: Plan, states: list[Tensor], weights: Tensor, dtype, window: int | None) -> list[Tensor]:
    """Output [1, T, heads, size] and gradients of attention over padded rows, each with its own copy of the prompt."""
    columns_of, present_of, device = plan.columns.to(weights.device), plan.present.to(weights.device), weights.device
    width = columns_of.shape[1]
    column = torch.arange(width, device=device)
    near = (column <= column[:, None]) & (column > column[:, None] - (window or width))
    # Every token sees itself, so that no row of scores is empty, even in padding.
    mask = (near & present_of[:, None] | torch.eye(width, dtype=torch.bool, device=device))[:, None]
    # The copies of a token have equal outputs and share its weight.
    copies = torch.bincount(plan.sources, minlength=weights.shape[1])
    shared = weights[0] / copies[:, None, None]
    total = [torch.zeros_like(part, dtype=torch.float64) for part in (weights, *states)]
    # Float64 needs a row's whole matrix of scores: one row at a time.
    for rows in torch.arange(len(mask), device=device).split(1 if dtype == torch.float64 else len(mask)):
        columns, present = columns_of[rows], present_of[rows]
        query, key, value = (part[0][:, columns].transpose(0, 1).to(dtype) for part in states)
        key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask[rows]).transpose(1, 2)[present]
        places = columns[present]
        total[0][0, places] = output.detach().double()
        gradients = torch.autograd.grad((output.to(shared.dtype) * shared[places]).sum(), states)
        total[1:] = [sum_ + part for sum_, part in zip(total[1:], gradients, strict=True)]
    return total


def passes(device: str, quick: bool) -> dict[str, Any]:
    """Log-probabilities and all gradients of padded and packed passes, by precision, adapters and checkpointing."""
    size, parts = "24M/100" if quick else "0.5B/6", ("log_probs", "gradient")
    # From one to six responses to a prompt, padded as in a rollout.
    groups = grpo_groups(0, 6, 6, 512, 16 if quick else 2)
    groups = [Group(group.prompt, group.responses[: index + 1]) for index, group in enumerate(groups)]
    widest = max(len(group.prompt) for group in groups)
    longest = max(len(response) for group in groups for response in group.responses)
    inputs = (part.to(device) for part in model_inputs(rollout(groups, widest, longest), "policy"))
    batch, rows = dict(zip(("input_ids", "attention_mask", "labels"), inputs, strict=True)), []
    for lora, precision in product((False, True), ("float32", "autocast", "bfloat16")):
        exact = _pass(_model(device, size, precision, lora).double(), batch, "float64")
        for checkpointing in ("none", "not reentrant", "reentrant"):
            model = _model(device, size, precision, lora)
            if checkpointing != "none":
                model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
                if lora:
                    model.enable_input_require_grads()
            padded = _pass(model, batch, precision)
            packing = share_prefixes(model, quiet=True)
            poison(device)
            packed = _pass(model, batch, precision)
            case = {"precision": precision, "lora": lora, "checkpointing": checkpointing}
            case |= {"backend": packing.backend, "packed_tokens": packing.packed_tokens}
            rows += errors(parts, padded, packed, exact, case)
        free(device)
    return {"rows": rows, **{part: worst([row for row in rows if row["part"] == part]) for part in parts}}


def _model(device: str, size: str, precision: str, lora: bool):
    """A model with the fused head, whose attention looks at few tokens, as that of trained models does."""
    torch.manual_seed(0)
    model = make_model(arm_arguments("policy", size, device)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(4)
    if precision == "bfloat16":
        model = model.bfloat16()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora:
        config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, config).to(device)
    return model


def _pass(model, batch: dict[str, Tensor], precision: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels, [N], and the flat gradient of a sum of them with weights of both signs."""
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    if precision == "float64":
        # Without TRL's head, which need not know this precision. The rows are padded on the left, as in a rollout.
        positions, inner = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0), unwrapped(model)
        states = inner.model(batch["input_ids"], batch["attention_mask"], positions, use_cache=False).last_hidden_state
        scores = inner.lm_head(states[:, :-1][mask]).log_softmax(-1)
        log_probs = scores.gather(1, labels[mask][:, None])[:, 0]
    else:
        with torch.autocast(labels.device.type, torch.bfloat16) if precision == "autocast" else nullcontext():
            log_probs = model(**batch, fused_lm_head=True).log_probs[mask]
    (log_probs * torch.linspace(-1, 1, len(log_probs), device=labels.device)).sum().backward()
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return log_probs.detach(), gradient
