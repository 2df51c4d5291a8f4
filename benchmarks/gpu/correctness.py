"""Part B: whether packed passes are as exact as padded ones in the same precision.

The reference is computed in float64. An error is the norm of the difference to it over its norm. A comparison passes
if the packed error is at most 1.5 times the padded one; NaN does not pass.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.trainer.utils import add_fused_lm_head

from benchmarks._lengths import Group, Writer
from benchmarks._step_arms import make_model, model_inputs, rollout
from benchmarks.gpu.devices import Device, free, poison
from trl_ext import share_prefixes
from trl_ext.models.batches import pad_rows
from trl_ext.models.packing.attention import attend
from trl_ext.models.packing.hook import unwrapped
from trl_ext.models.packing.planner import Plan, plan_batch

FACTOR = 1.5
TOKENS = (60, 127, 128, 129, 1000, 4096, 8192)
# Query heads, key heads and head size of Qwen2.5 0.5B and 1.5B, and of a model without grouped heads.
HEADS = ((14, 2, 64), (12, 2, 128), (8, 8, 64))
ROWS, TRIES, WINDOW = 6, 3, 256


def error(value: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of the exact value."""
    return ((value.double() - exact.double()).norm() / exact.double().norm()).item()


def worst(errors: list[dict[str, Any]], padded: str, packed: str) -> dict[str, Any]:
    """The comparison with the largest ratio of errors, and how many are not passed."""
    failed = [row for row in errors if not row[packed] <= FACTOR * row[padded]]
    row = max(errors, key=lambda row: row[packed] / row[padded] if math.isfinite(row[packed]) else math.inf)
    return {"compared": len(errors), "failed": len(failed), "worst": row, "ratio": row[packed] / row[padded]}


# ---- Attention ----


def attention(device: Device, quick: bool) -> dict[str, Any]:
    """Output and gradients of each attention back-end of packing, against padded attention, by precision."""
    # Compiled FlexAttention is not here: it would take most of the time, and is chosen only where varlen fails.
    backends = [("sdpa", torch.float32), ("sdpa", torch.bfloat16)]
    if device.name == "cuda":
        backends.append(("varlen", torch.bfloat16))
    lengths, tries = ((60, 300), 1) if quick else (TOKENS, TRIES)
    rows: dict[str, list[dict[str, Any]]] = {f"{name}, {str(dtype)[6:]}": [] for name, dtype in backends}
    for tokens in lengths:
        for heads in HEADS[: 1 if quick else None]:
            for window in (None, WINDOW):
                for seed in range(tries):
                    case = {"tokens": tokens, "heads": heads, "window": window, "seed": seed}
                    for (name, dtype), padded, packed in _attention_errors(device, backends, **case):
                        for part in padded:
                            rows[f"{name}, {str(dtype)[6:]}"].append(
                                {**case, "part": part, "padded": padded[part], "packed": packed[part]}
                            )
    return {name: worst(found, "padded", "packed") for name, found in rows.items()}


def _attention_errors(device: Device, backends, tokens: int, heads, window: int | None, seed: int) -> Iterator:
    generator = torch.Generator(device.name).manual_seed(seed)
    plan = _shared_prompt(tokens, seed, device.name)
    query_heads, key_heads, size = heads

    def draw(*shape: int) -> Tensor:
        # Values that bfloat16 holds exactly, so that the error is that of the computation.
        drawn = torch.randn(*shape, generator=generator, device=device.name, dtype=torch.float32)
        return drawn.bfloat16().float()

    states = [draw(1, count, tokens, size).requires_grad_() for count in (query_heads, key_heads, key_heads)]
    weights = draw(1, tokens, query_heads, size)
    exact = _padded_attention(plan, states, weights, torch.float64, window)
    errors = {}
    for backend, dtype in backends:
        if dtype not in errors:
            errors[dtype] = _errors(_padded_attention(plan, states, weights, dtype, window), exact)
        plan.derived["backend"] = backend
        poison(device, tokens * query_heads * size)
        output = attend(plan, SimpleNamespace(), *(part.to(dtype) for part in states), sliding_window=window)
        gradients = torch.autograd.grad((output.float() * weights).sum(), states)
        yield (backend, dtype), errors[dtype], _errors([output.detach(), *gradients], exact)


def _shared_prompt(tokens: int, seed: int, device: str) -> Plan:
    """The plan of uneven responses to one prompt, `tokens` in all."""
    draw, write = random.Random(seed), Writer(50000, seed)
    prompt = max(9, tokens // 4)
    cuts = sorted(draw.sample(range(1, tokens - prompt), ROWS - 1))
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, tokens - prompt], strict=True)]
    start = write(prompt)
    ids, mask = pad_rows([start + write(length) for length in lengths], 0, "right")
    plan = plan_batch(ids.to(device), mask.to(device))
    assert plan.tokens == tokens
    return plan


def _padded_attention(plan: Plan, states: list[Tensor], weights: Tensor, dtype, window: int | None) -> list[Tensor]:
    """Output [1, T, heads, size] and gradients of attention over padded rows, each with its own copy of the prompt.

    A token that several rows share is read in the last of them.
    """
    width = plan.columns.shape[1]
    column = torch.arange(width, device=weights.device)
    near = column[None] <= column[:, None]
    if window is not None:
        near &= column[None] > column[:, None] - window
    total = [torch.zeros_like(part, dtype=torch.float64) for part in (weights, *states)]
    # The token of each place that is read, or -1; a later row overwrites what it shares.
    owner = torch.full((weights.shape[1],), -1, device=weights.device)
    for row in range(len(plan.columns)):
        owner[plan.columns[row][plan.present[row]]] = row
    # Float64 needs a row's whole matrix of scores: one row at a time.
    size = 1 if dtype == torch.float64 else len(plan.columns)
    for start in range(0, len(plan.columns), size):
        columns, present = plan.columns[start : start + size], plan.present[start : start + size]
        # Every token sees itself, so that no row of scores is empty, even in padding.
        mask = (near & present[:, None, :] | torch.eye(width, dtype=torch.bool, device=near.device))[:, None]
        query, key, value = (part[0][:, columns].transpose(0, 1).to(dtype) for part in states)
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        rows = torch.arange(start, start + len(columns), device=columns.device)[:, None]
        read = present & (owner[columns] == rows)
        places = columns[read]
        gradients = torch.autograd.grad((output[read].to(weights.dtype) * weights[0, places]).sum(), states)
        total[0][0, places] = output[read].detach().double()
        for sum_, part in zip(total[1:], gradients, strict=True):
            sum_ += part
    return total


def _errors(values: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    return {
        name: error(value, expected)
        for name, value, expected in zip(("output", "dQ", "dK", "dV"), values, exact, strict=True)
    }


# ---- Passes of a model ----


def passes(device: Device, quick: bool) -> dict[str, Any]:
    """Log-probabilities and all gradients of padded and packed passes, by precision, adapters and checkpointing."""
    size = "24M/100" if quick else "0.5B/6"
    batch, rows = _groups(quick, device.name, vocabulary=512), []
    spread = None
    for lora in (False, True):
        for precision in ("float32", "autocast", "bfloat16"):
            exact = _pass(_model(device, size, precision, lora).double(), batch, "float64")
            for checkpointing in (None, False, True):
                model = _model(device, size, precision, lora)
                if checkpointing is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
                    if lora:
                        model.enable_input_require_grads()
                padded = _pass(model, batch, precision)
                packing = share_prefixes(model, quiet=True)
                poison(device)
                packed, tokens = _pass(model, batch, precision), packing.packed_tokens
                if precision == "autocast" and not lora and checkpointing is None:
                    repeated = [_pass(model, batch, precision)[1] for _ in range(2)]
                    spread = max(error(_flat(again), _flat(packed[1])) for again in repeated)
                reentrant = {None: "none", False: "not reentrant", True: "reentrant"}[checkpointing]
                rows.append(
                    {
                        "precision": precision,
                        "lora": lora,
                        "checkpointing": reentrant,
                        "backend": packing.backend,
                        "packed_tokens": tokens,
                        "log_probs_padded": error(padded[0], exact[0]),
                        "log_probs_packed": error(packed[0], exact[0]),
                        "gradient_padded": error(_flat(padded[1]), _flat(exact[1])),
                        "gradient_packed": error(_flat(packed[1]), _flat(exact[1])),
                    }
                )
            free(device)
    return {
        "rows": rows,
        "log_probs": worst(rows, "log_probs_padded", "log_probs_packed"),
        "gradient": worst(rows, "gradient_padded", "gradient_packed"),
        "spread_of_repeated_gradients": spread,
    }


def _groups(quick: bool, device: str, vocabulary: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels` of six groups of uneven prompts and responses."""
    draw, write = random.Random(0), Writer(vocabulary)
    shrink = 8 if quick else 1
    groups = [
        Group(
            write(draw.randint(80, 400) // shrink), [write(draw.randint(16, 200) // shrink) for _ in range(1 + index)]
        )
        for index in range(6)
    ]
    widest = max(len(group.prompt) for group in groups)
    longest = max(len(response) for group in groups for response in group.responses)
    inputs = model_inputs(rollout(groups, widest, longest), "policy")
    return {
        name: part.to(device) for name, part in zip(("input_ids", "attention_mask", "labels"), inputs, strict=True)
    }


def _model(device: Device, size: str, precision: str, lora: bool):
    """A model with the fused head, whose attention looks at few tokens, as that of trained models does."""
    torch.manual_seed(0)
    arguments = argparse.Namespace(trainer="policy", size=size, device=device.name, weights="float32")
    model = make_model(arguments).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(4)
    if precision == "bfloat16":
        model = model.bfloat16()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora:
        config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, config).to(device.name)
    return model


def _pass(model, batch: dict[str, Tensor], precision: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of the labels, [N], and the gradients of a sum of them with weights of both signs."""
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    weights = torch.linspace(-1, 1, int(mask.sum()), device=labels.device)
    if precision == "float64":
        # Without TRL's head, which need not know this precision. The rows are padded on the left, as in a rollout.
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        inner = unwrapped(model)
        states = inner.model(batch["input_ids"], batch["attention_mask"], positions, use_cache=False).last_hidden_state
        scores = inner.lm_head(states[:, :-1][mask]).log_softmax(-1)
        log_probs = scores.gather(1, labels[mask][:, None])[:, 0]
    else:
        autocast = torch.autocast(labels.device.type, torch.bfloat16) if precision == "autocast" else nullcontext()
        with autocast:
            log_probs = model(**batch, fused_lm_head=True).log_probs[mask]
    (log_probs * weights).sum().backward()
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return log_probs.detach(), gradients


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten().float() for name in sorted(gradients)])
