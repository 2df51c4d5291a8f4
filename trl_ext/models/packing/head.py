"""The width of the tiles in which TRL's fused LM head scores the vocabulary."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from trl.trainer import utils

from trl_ext.models.batches import temporarily

# TRL's tiles have 32,768 columns, for GPUs. On a CPU, each operation on such a tile waits for memory.
CPU_TILE = 2048
_WIDTH = "_CHUNKED_LOGPROB_CHUNK_SIZE"


def tiles_for(device: torch.device) -> AbstractContextManager[None]:
    """Within the block, heads on a CPU use narrow tiles, in their backward pass too. Results differ by rounding."""
    width = getattr(utils, _WIDTH, None)
    if device.type != "cpu" or width is None:
        return nullcontext()
    return temporarily(utils, **{_WIDTH: min(width, CPU_TILE)})
