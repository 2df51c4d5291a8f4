"""Gradients of packed passes under FSDP2, in a process of a group: `torchrun -m tests.support.fsdp_once FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.packing import ragged, tiny_model, values_and_gradient
from trl_ext.models.packing import share_prefixes


def gradients(architecture: str, *, sharded: bool, checkpointing: bool) -> list[Tensor]:
    """The mean gradients over the processes of three batches, which differ between them."""
    model = tiny_model(architecture)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if sharded:
        packing = share_prefixes(model)
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
    found = []
    for step in range(3):
        _, gradient = values_and_gradient(model, ragged(seed=10 * step + distributed.get_rank()))
        if not sharded:
            distributed.all_reduce(gradient)
            gradient /= distributed.get_world_size()
        found.append(gradient)
    assert not sharded or (
        packing.active and packing.packed_tokens < packing.padded_tokens and not packing.left_padded
    )
    return found


def main(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    largest = {}
    for architecture in ("llama", "gemma3", "qwen2_moe"):
        for checkpointing in (False, True):
            given = {"checkpointing": checkpointing}
            pairs = zip(
                gradients(architecture, sharded=True, **given),
                gradients(architecture, sharded=False, **given),
                strict=True,
            )
            apart = [((one - other).norm() / other.norm()).item() for one, other in pairs]
            largest[f"{architecture}, checkpointing {checkpointing}"] = max(apart)
    if distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(largest))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
