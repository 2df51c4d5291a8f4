"""The canary: three rows through the packed and the padded forward pass, before a model's own batches are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Largest difference of a log-probability or a score in float32, relative where these exceed 1, and mean difference
# in half precision, where padding alone moves single values by several hundredths.
FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = 0.05
_HALF = {torch.bfloat16, torch.float16}
_LONGEST = 640


def canary_batch(config, device) -> dict[str, Tensor]:
    """Two rows that share a prefix, padded on the right, and a short one padded on the left.

    Longer than the sliding window of the model, where it is at most about 600 tokens. The same on every process.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each [3, L].
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    width = min(max(32, window + 16), _LONGEST, text.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, text.vocab_size - 1, (3, width), generator=generator)
    padding = text.pad_token_id if isinstance(text.pad_token_id, int) else text.vocab_size - 1
    # Every id but that of padding, by which classifiers find the end of a row.
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


BATCH = ("input_ids", "attention_mask", "labels")


def difference(model, packed: Callable[..., Tensor], padded: Callable[..., Tensor]) -> tuple[float, bool]:
    """How far a packed forward pass is from the padded one, and whether that is no more than rounding.

    Args:
        model: put into evaluation mode for the while.
        packed, padded: from the entries of `canary_batch` to log-probabilities or scores.
    """
    batch = canary_batch(model.config, next(model.parameters()).device)
    with torch.no_grad(), _evaluating(model):
        with _noting_precisions(model) as precisions:
            expected = padded(**batch).double()
        got = packed(**batch).double()
    apart = (expected - got).abs()
    if precisions & _HALF or (batch["input_ids"].is_cuda and torch.get_float32_matmul_precision() != "highest"):
        return apart.max().item(), bool(apart.mean() <= HALF_TOLERANCE)
    scale = max(1.0, expected.abs().max().item())
    return apart.max().item(), bool(apart.max() <= FLOAT32_TOLERANCE * scale)


@contextmanager
def _noting_precisions(model) -> Iterator[set[torch.dtype]]:
    """What linear layers compute in: mixed precision may be turned on inside of the model's own forward pass."""
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


@contextmanager
def _evaluating(model) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
