"""The width of the tiles in which TRL's fused LM head scores the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from trl.trainer import utils

# TRL's tiles have 32,768 columns, for GPUs. On a CPU, each operation on such a tile waits for memory.
CPU_TILE = 2048
_WIDTH = "_CHUNKED_LOGPROB_CHUNK_SIZE"


@contextmanager
def tiles_for(device: torch.device) -> Iterator[None]:
    """Within the block, heads on a CPU use narrow tiles, in their backward pass too. Results differ by rounding."""
    width = getattr(utils, _WIDTH, None)
    if device.type != "cpu" or width is None:
        yield
        return
    setattr(utils, _WIDTH, min(width, CPU_TILE))
    try:
        yield
    finally:
        setattr(utils, _WIDTH, width)
