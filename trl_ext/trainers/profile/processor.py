"""The peak of a processor, measured, and the floating-point operations that a model's passes need."""

from __future__ import annotations

import math
import time

import torch
from torch import nn


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, when the device has done all its work so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def matrix_product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of square matrices, the best of several.

    This is the speed that this process reaches with its threads and beside other programs, not the figure of a data
    sheet. It takes a few tenths of a second at most: fast processors are measured on larger matrices, which they need.
    """
    best = 0.0
    for size in (256, 512, 1024, 2048, 4096):
        # No random numbers, which would change those of the run.
        matrix = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
        times: list[float] = []
        while sum(times) < 0.05:
            start = now(device)
            matrix @ matrix
            times.append(now(device) - start)
        best = max(best, 2 * size**3 / min(times))
        # The next size takes eight times as long.
        if 8 * min(times) > 0.25:
            break
    return best


def operations_per_token(model: nn.Module) -> tuple[int, int]:
    """Floating-point operations of a forward pass, and of a forward and a backward pass, for each token.

    Each weight of a matrix product costs 2 operations forward, 2 for the gradient of its input, and 2 for its own
    gradient if it is trained: 6 per parameter in full fine-tuning, about 4 with an adapter. Embeddings are looked up
    and cost nothing, unless they are the head too. Attention scores, which are small next to the weights at short
    lengths, and the second forward pass of gradient checkpointing are not counted.
    """
    head = model.get_output_embeddings()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(getattr(head, "weight", None))}
    forward = trained = 0
    for parameter in model.parameters():
        # DeepSpeed keeps the shape of a parameter that it has divided.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) > 1 and id(parameter) not in looked_up:
            forward += 2 * math.prod(shape)
            trained += 2 * math.prod(shape) * parameter.requires_grad
    return forward, 2 * forward + trained
