"""What a vLLM on a CPU lacks to receive weights: linear layers that keep theirs, and a transfer to a server."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient


def keep_weights(layer, remove_weight: bool) -> None:
    """Replaces `dispatch_cpu_unquantized_gemm` of vLLM, which packs a layer's weights and loads no others later."""
    layer.cpu_linear = torch.nn.functional.linear


def send_files(folder: Path, monkeypatch) -> None:
    """Make TRL's client send weights to the server as files; TRL itself sends them through NCCL, which needs GPUs."""

    def update_named_params(client, metadata, named_params):
        path = folder / "weights.safetensors"
        # Adapters are unmerged, in place, when the last parameter has been read.
        save_file({name: param.detach().clone() for name, param in named_params}, path)
        client._start_weight_update()
        client._post(f"{client.base_url}/update_weights", json={"update_info": {"path": str(path)}})
        client._finish_weight_update()

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device=0: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update_named_params)
