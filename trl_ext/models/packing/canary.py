"""The canary: three rows through the packed and the padded forward pass, before a model's own batches are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trl_ext.models.batches import evaluating
from trl_ext.models.packing.attention import attend
from trl_ext.models.packing.planner import plan_batch

# Largest difference in float32, relative where values exceed 1.
FLOAT32_TOLERANCE = 1e-4
# In half precision, padding alone changes single values by hundredths. The largest and the mean difference may be this
# multiple of those between two padded passes, plus one rounding of the largest value.
HALF_FACTOR = 4
_WIDENED = 8
# Largest difference of a gradient, relative to the largest gradient.
_GRADIENT_TOLERANCE = {torch.float32: 1e-3}
_HALF_GRADIENT_TOLERANCE = 0.05
BATCH = ("input_ids", "attention_mask", "labels")
_HALF = {torch.bfloat16, torch.float16}
_LONGEST = 640
# Of a longer sliding window, the canary's rows do not reach the end.
LONGEST_WINDOW = _LONGEST - 16


def canary_batch(config, device) -> dict[str, Tensor]:
    """Two rows that share a prefix, padded on the right, and a short one padded on the left.

    They exceed the model's sliding window if it is at most about 600 tokens, and are the same on every process.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each [3, L].
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    width = min(max(32, window + 16), _LONGEST, text.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, text.vocab_size - 1, (3, width), generator=generator)
    padding = text.pad_token_id if isinstance(text.pad_token_id, int) else text.vocab_size - 1
    # Every id except the padding id, which classifiers use to find the end of a row.
    tokens = tokens + (tokens >= padding).long() if 0 <= padding < text.vocab_size else tokens
    tokens[1, : width // 2] = tokens[0, : width // 2]
    attended = torch.ones_like(tokens)
    attended[1, width - width // 4 :] = 0
    attended[2, : width - width // 3] = 0
    tokens = tokens.masked_fill(attended == 0, max(padding, 0))
    labels = tokens.masked_fill(attended == 0, -100)
    labels[:2, : width // 3] = -100
    labels[2, : width - width // 3 + 1] = -100
    return {name: value.to(device) for name, value in zip(BATCH, (tokens, attended, labels), strict=True)}


def difference(model, packed: Callable[..., Tensor], padded: Callable[..., Tensor]) -> tuple[float, bool]:
    """The difference between a packed and the padded forward pass, and whether it is no more than rounding.

    Args:
        model: temporarily put into evaluation mode.
        packed, padded: map the entries of `canary_batch` to values at the labelled places, such as log-probabilities.
    """
    batch = canary_batch(model.config, next(model.parameters()).device)
    with torch.no_grad(), evaluating(model):
        with _noting_precisions(model) as precisions:
            expected = padded(**batch).double()
        apart = (expected - packed(**batch).double()).abs()
        largest, scale = apart.max().item(), expected.abs().max().item()
        on_gpu = batch["input_ids"].is_cuda
        if not precisions & _HALF and not (on_gpu and torch.get_float32_matmul_precision() != "highest"):
            return largest, largest <= FLOAT32_TOLERANCE * max(1.0, scale)
        noise = (expected - padded(**_widened(batch)).double()).abs()
    small = largest <= HALF_FACTOR * noise.max().item() + scale / 2**8
    return largest, small and apart.mean().item() <= HALF_FACTOR * noise.mean().item() + scale / 2**10


def _widened(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows with additional columns of padding in front."""
    fill = {"attention_mask": 0, "labels": -100, "input_ids": int(batch["input_ids"][2, 0])}
    return {name: pad(values, (_WIDENED, 0), value=fill[name]) for name, values in batch.items()}


def check_gradients(backend: str, config, device, precision: torch.dtype) -> None:
    """Compare an attention back-end's gradients with those of `sdpa`, on random states of the model's shapes.

    Raises:
        ValueError: they differ. A back-end without gradients raises its own error.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    batch = canary_batch(config, device)
    gradients = []
    for name in (backend, "sdpa"):
        plan = plan_batch(batch["input_ids"], batch["attention_mask"])
        plan.derived["backend"] = name
        generator = torch.Generator().manual_seed(0)
        states = [
            torch.randn(1, count, plan.tokens, size, generator=generator).to(device, precision).requires_grad_()
            for count in (heads, key_heads, key_heads)
        ]
        with torch.enable_grad():
            output = attend(plan, SimpleNamespace(), *states)
            weights = torch.randn(output.shape, generator=generator).to(device, precision)
            gradients.append([part.float() for part in torch.autograd.grad((output * weights).sum(), states)])
    for own, expected in zip(*gradients, strict=True):
        apart = ((own - expected).abs().max() / expected.abs().max()).item()
        if not apart <= _GRADIENT_TOLERANCE.get(precision, _HALF_GRADIENT_TOLERANCE):
            raise ValueError(f"gradients {apart:.1e} off")


@contextmanager
def _noting_precisions(model) -> Iterator[set[torch.dtype]]:
    """Collect the dtypes in which linear layers compute: the model's own forward may enable mixed precision."""
    precisions: set[torch.dtype] = set()
    handles = [
        module.register_forward_hook(lambda module, given, output: precisions.add(output.dtype))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield precisions
    finally:
        for handle in handles:
            handle.remove()
