"""What the battery asks of a device, `cuda` or `cpu`: time, memory, and a trace of what it does."""

from __future__ import annotations

import gc
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Categories of a trace that occupy the device. On a CPU, operators stand for kernels, and those they call count too.
BUSY = {"cuda": {"kernel", "gpu_memcpy", "gpu_memset"}, "cpu": {"cpu_op"}}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
ALLOCATIONS = ("cudaMalloc", "cuMemCreate")
ATTENTION = ("attention", "flash", "fmha", "sdpa", "softmax")


def synchronize(device: str) -> None:
    torch.get_device_module(device).synchronize()


def works(device: str) -> bool:
    """Whether the device still answers; after an illegal access, every call of the process fails."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def free(device: str) -> None:
    """Return the memory of what is no longer referenced."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ended, in torch's allocator, in CUDA or in cuBLAS."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text


def timed(device: str, function: Callable[[], Any]) -> dict[str, float]:
    """Wall seconds of a call, seconds between two events in the queue, and blocks that the allocator took in it."""
    cuda = device == "cuda"
    synchronize(device)
    before = torch.cuda.memory_stats().get("segment.all.allocated", 0) if cuda else 0
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
    started = time.perf_counter()
    for event in events[:1]:
        event.record()
    function()
    for event in events[1:]:
        event.record()
    synchronize(device)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "device_seconds": events[0].elapsed_time(events[1]) / 1000 if cuda else seconds,
        "allocations": torch.cuda.memory_stats().get("segment.all.allocated", 0) - before if cuda else 0,
    }


def poison(device: str, elements: int = 2**22) -> None:
    """Fill memory that is about to be reused with NaN, so that an output that is never written shows."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.full((elements,), float("nan"), dtype=dtype, device=device)


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
    """Figures of a trace; `busy` is the time in which any kernel ran over `seconds`.

    `seconds` is the wall time of the same call without the profiler, which slows the host down, not the kernels.
    """
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
        "kernels": len(kernels),
        "kernel_seconds": sum(times.values()),
        "busy": union / 1e6 / seconds,
        "waits": sum(names[name] for name in WAITS if device == "cpu" or name.startswith("cuda")),
        "allocations": sum(names[name] for name in ALLOCATIONS),
        "copies": {name: count for name, count in names.items() if name.startswith("Memcpy")},
        "longest": dict(times.most_common(12)),
        "attention": {n: s for n, s in times.most_common() if any(word in n.lower() for word in ATTENTION)},
    }


def synchronizing_lines(device: str, function: Callable[[], Any]) -> dict[str, int]:
    """How often each line of a call waits for the GPU, as far as torch notices; empty on a CPU."""
    if device == "cpu":
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = Counter(
        f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    )
    return dict(found.most_common(20))
