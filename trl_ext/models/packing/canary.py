"""The canary: three rows through the packed and the padded forward pass, before a model's own batches are packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trl_ext.models.batches import evaluating

# In float32, the largest difference, relative where values exceed 1. In half precision, where padding alone changes
# single values by hundredths, the mean difference relative to the standard deviation of the values.
FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
_HALF = (torch.bfloat16, torch.float16)
BATCH = ("input_ids", "attention_mask", "labels")
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
    # The model's own forward may enable mixed precision, which shows in what a layer computes.
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    precisions: list[torch.dtype] = []
    note = layer.register_forward_hook(lambda layer, given, output: precisions.append(output.dtype))
    try:
        with torch.no_grad(), evaluating(model):
            expected = padded(**batch).double()
            apart = (expected - packed(**batch).double()).abs()
    finally:
        note.remove()
    largest = apart.max().item()
    if precisions[0] in _HALF or (expected.is_cuda and torch.get_float32_matmul_precision() != "highest"):
        return largest, apart.mean().item() <= HALF_TOLERANCE * expected.std().item()
    return largest, largest <= FLOAT32_TOLERANCE * max(1.0, expected.abs().max().item())
