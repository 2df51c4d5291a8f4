"""Time, memory and a trace of a device, `cuda` or `cpu`; and part A: the speed that other figures are read against."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

# Categories of a trace that occupy the device. On a CPU, operators stand for kernels, and those they call count too.
BUSY = {"cuda": {"kernel", "gpu_memcpy", "gpu_memset"}, "cpu": {"cpu_op"}}
WAITS = {"cuda": ("cudaStreamSynchronize", "cudaEventSynchronize"), "cpu": ("aten::_local_scalar_dense",)}
ATTENTION = ("attention", "flash", "fmha", "sdpa", "softmax")


def synchronize(device: str) -> None:
    torch.get_device_module(device).synchronize()


def free(device: str) -> None:
    """Return the memory of what is no longer referenced."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def out_of_memory(error: Exception) -> bool:
    """Whether memory ended, in torch's allocator, in CUDA or in cuBLAS."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text


def poison(device: str, elements: int = 2**22) -> None:
    """Fill memory that is about to be reused with NaN, so that an output that is never written shows."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.full((elements,), float("nan"), dtype=dtype, device=device)


def timed(device: str, function: Callable[[], Any]) -> float:
    """Wall seconds of a call, with all that it starts on the device."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def trace(device: str, function: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of a call that have a duration, with `name`, `cat`, and `ts` and `dur` in microseconds.

    They are read from an exported trace, whose categories tell kernels from annotations that span them.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        function()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if "dur" in event]


def summarize(events: list[dict[str, Any]], device: str, seconds: float) -> dict[str, Any]:
    """Figures of a trace; `busy` is the time in which any kernel ran over `seconds`, those of an unprofiled call."""
    kernels = [event for event in events if event.get("cat") in BUSY[device]]
    union, end = 0.0, float("-inf")
    for event in sorted(kernels, key=lambda event: event["ts"]):
        until = event["ts"] + event["dur"]
        union += max(0.0, until - max(event["ts"], end))
        end = max(end, until)
    times: Counter[str] = Counter()
    for event in kernels:
        times[event["name"][:120]] += event["dur"] / 1e6
    names = Counter(event["name"] for event in events)
    return {
        "busy": union / 1e6 / seconds,
        "kernels": len(kernels),
        "waits": sum(names[name] for name in WAITS[device]),
        "copies": {name: count for name, count in names.items() if name.startswith("Memcpy")},
        "longest": dict(times.most_common(12)),
        "attention": {n: s for n, s in times.most_common() if any(word in n.lower() for word in ATTENTION)},
    }


def measure(device: str, quick: bool) -> dict[str, Any]:
    """Part A: rates of copies, products, launches, transfers and allocations, and a launch-bound model."""

    def seconds(function: Callable[[], Any]) -> float:
        function()
        return median(timed(device, function) for _ in range(3))

    # A CPU may only emulate bfloat16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    floats, width, launches = (2**20, 256, 500) if quick else (2**30, 8192, 20000)
    source, small, host = torch.rand(floats, device=device), torch.zeros(8, device=device), torch.zeros(2**14)
    target = torch.empty_like(source)
    result = {"copy_gb_per_second": 8 * floats / seconds(lambda: target.copy_(source)) / 1e9}
    source = target = None
    factor = torch.randn(width, width, device=device, dtype=dtype)
    result["matmul_tflops"] = 2 * width**3 / seconds(lambda: factor @ factor) / 1e12
    result["launch_microseconds"] = seconds(lambda: [small.add_(1) for _ in range(launches)]) / launches * 1e6
    result["item_microseconds"] = seconds(lambda: [small[0].item() for _ in range(100)]) / 100 * 1e6
    for name, given in {"pageable": host, "pinned": host.pin_memory() if device == "cuda" else host}.items():
        result[f"{name}_64kb_microseconds"] = seconds(lambda given=given: given.to(device, copy=True)) * 1e6
    allocations = []
    for _ in range(3):
        free(device)
        allocations.append(timed(device, lambda: torch.empty(2**28, dtype=torch.uint8, device=device)))
    result["allocation_of_256mib_microseconds"] = median(allocations) * 1e6
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 28}
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)).to(dtype)
        ids = torch.zeros(1, 16, dtype=torch.long)
    result["forward_of_28_tiny_layers_milliseconds"] = 1e3 * seconds(lambda: model(ids, use_cache=False))
    both = seconds(lambda: model(ids, use_cache=False).logits.sum().backward())
    result["forward_and_backward_milliseconds"] = 1e3 * both
    return {name: {"value": value} for name, value in result.items()}
