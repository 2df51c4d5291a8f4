"""Part A: the speed of the machine itself, which the other figures are read against."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks._step_arms import processor
from benchmarks.gpu.devices import free, timed

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "numpy")


def describe(device: str) -> dict[str, Any]:
    """What an arm was measured on: the device, its driver, and the versions of the libraries."""
    driver = None
    if device == "cuda" and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "driver": driver,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in LIBRARIES},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def measure(device: str, quick: bool) -> dict[str, Any]:
    """Rates of copies, products, launches, transfers and allocations, and a launch-bound model."""

    def seconds(function, clock: str = "seconds") -> float:
        function()
        return median(timed(device, function)[clock] for _ in range(3))

    # A CPU may only emulate bfloat16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    floats, width, launches = (2**20, 256, 500) if quick else (2**30, 8192, 20000)
    source, small, host = torch.rand(floats, device=device), torch.zeros(8, device=device), torch.zeros(2**14)
    target = torch.empty_like(source)
    result = {"copy_gb_per_second": 8 * floats / seconds(lambda: target.copy_(source), "device_seconds") / 1e9}
    source = target = None
    factor = torch.randn(width, width, device=device, dtype=dtype)
    result["matmul_tflops"] = 2 * width**3 / seconds(lambda: factor @ factor, "device_seconds") / 1e12
    result["launch_microseconds"] = seconds(lambda: [small.add_(1) for _ in range(launches)]) / launches * 1e6
    result["item_microseconds"] = seconds(lambda: [small[0].item() for _ in range(100)]) / 100 * 1e6
    for name, given in {"pageable": host, "pinned": host.pin_memory() if device == "cuda" else host}.items():
        result[f"{name}_64kb_microseconds"] = seconds(lambda given=given: given.to(device, copy=True)) * 1e6
    allocations = []
    for _ in range(3):
        free(device)
        allocations.append(timed(device, lambda: torch.empty(2**28, dtype=torch.uint8, device=device))["seconds"])
    result["allocation_of_256mib_microseconds"] = median(allocations) * 1e6
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 28}
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)).to(dtype)
        ids = torch.zeros(1, 16, dtype=torch.long)
    result["milliseconds_of_28_tiny_layers"] = {
        "forward": seconds(lambda: model(input_ids=ids, use_cache=False)) * 1e3,
        "forward and backward": seconds(lambda: model(input_ids=ids, use_cache=False).logits.sum().backward()) * 1e3,
    }
    return {name: {"value": value} for name, value in result.items()}
