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

from benchmarks.gpu.devices import Device, timed

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "numpy")
FLOATS_PER_GIB = 2**28


def describe(device: Device) -> dict[str, Any]:
    """The names and versions that a row of the table was measured with."""
    driver = None
    if device.name == "cuda" and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "device": device.title(),
        "driver": driver,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in LIBRARIES},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def measure(device: Device, quick: bool) -> dict[str, Any]:
    """Rates of copies, products, kernel launches, transfers and allocations, and the time of a launch-bound model."""

    def seconds(function, repeats: int = 3) -> float:
        function()
        return median(timed(device, function)["device_seconds"] for _ in range(repeats))

    def wall(function, repeats: int = 3) -> float:
        function()
        return median(timed(device, function)["seconds"] for _ in range(repeats))

    # A CPU may only emulate bfloat16.
    dtype = torch.bfloat16 if device.name == "cuda" else torch.float32
    floats, width, launches = (2**20, 256, 500) if quick else (2 * FLOATS_PER_GIB, 8192, 20000)
    source = torch.rand(floats, device=device.name)
    target = torch.empty_like(source)
    result = {"copy_gb_per_second": 8 * floats / seconds(lambda: target.copy_(source)) / 1e9}
    source = target = None
    left, right = (torch.randn(width, width, device=device.name, dtype=dtype) for _ in range(2))
    result[f"{str(dtype)[6:]}_tflops"] = 2 * width**3 / seconds(lambda: left @ right) / 1e12
    left = right = None
    small = torch.zeros(8, device=device.name)

    def launch() -> None:
        for _ in range(launches):
            small.add_(1)

    result["launch_microseconds"] = wall(launch, repeats=3) / launches * 1e6
    result["item_microseconds"] = wall(lambda: [small[0].item() for _ in range(100)]) / 100 * 1e6
    host = torch.zeros(16384)
    for name, given in (("pageable", host), ("pinned", device.pinned(host))):
        result[f"{name}_64kb_microseconds"] = wall(lambda given=given: given.to(device.name, copy=True)) * 1e6

    def allocate() -> None:
        device.free_cache()
        torch.empty(FLOATS_PER_GIB // 4, device=device.name)

    result["allocation_of_256mb_microseconds"] = wall(allocate) * 1e6
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.device(device.name):
        model = Qwen2ForCausalLM(config).to(dtype)
        ids = torch.zeros(1, 16, dtype=torch.long)
    result["milliseconds_of_28_tiny_layers"] = {
        "forward": wall(lambda: model(input_ids=ids, use_cache=False)) * 1e3,
        "forward and backward": wall(lambda: model(input_ids=ids, use_cache=False).logits.sum().backward()) * 1e3,
    }
    return result
