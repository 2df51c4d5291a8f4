"""What the battery asks of a GPU or a CPU: all calls that exist for one of them only."""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks._step_arms import processor


class Gpu:
    """The current CUDA device."""

    name, kind = "cuda", DeviceType.CUDA
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    # Names of profiled calls at which the CPU waits for the GPU.
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    allocations_seen = ("cudaMalloc", "cuMemCreate")

    def title(self) -> str:
        return torch.cuda.get_device_name()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def works(self) -> bool:
        """Whether the device still answers."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def mark(self) -> torch.cuda.Event:
        """A moment in the queue of the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two marks that have been reached."""
        return start.elapsed_time(end) / 1000

    def allocations(self) -> int:
        """Number of blocks that the allocator has taken from the device so far."""
        return torch.cuda.memory_stats().get("segment.all.allocated", 0)

    def free_cache(self) -> None:
        torch.cuda.empty_cache()

    def debug_synchronization(self, mode: str) -> None:
        torch.cuda.set_sync_debug_mode(mode)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()


class Cpu:
    """The same on a CPU, which has no queue and no allocator of its own; for trying the battery without a GPU."""

    name, kind = "cpu", DeviceType.CPU
    activities = (ProfilerActivity.CPU,)
    waits = ("aten::_local_scalar_dense", "aten::nonzero")
    allocations_seen = ("aten::empty",)

    def title(self) -> str:
        return processor()

    def synchronize(self) -> None:
        pass

    def works(self) -> bool:
        return True

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def allocations(self) -> int:
        return 0

    def free_cache(self) -> None:
        pass

    def debug_synchronization(self, mode: str) -> None:
        pass

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


Device = Gpu | Cpu


def timed(device: Device, function: Callable[[], Any]) -> dict[str, float]:
    """Wall seconds of a call, seconds by the device's own clock, and the blocks that the allocator took in it."""
    device.synchronize()
    before, wall, start = device.allocations(), time.perf_counter(), device.mark()
    function()
    end = device.mark()
    device.synchronize()
    seconds = time.perf_counter() - wall
    return {
        "seconds": seconds,
        "device_seconds": device.seconds(start, end),
        "allocations": device.allocations() - before,
    }


def free(device: Device) -> None:
    """Return the memory of what is no longer referenced."""
    gc.collect()
    device.free_cache()


def poison(device: Device, elements: int = 2**22) -> None:
    """Fill memory that is about to be reused with NaN, so that an output that is never written shows."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.full((elements,), float("nan"), dtype=dtype, device=device.name)


@contextmanager
def noting_synchronization(device: Device) -> Iterator[Counter[str]]:
    """Count by file and line the operations of the block that wait for the device, as far as torch notices them.

    The counter is filled when the block ends, and stays empty on a CPU.
    """
    found: Counter[str] = Counter()
    device.debug_synchronization("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        device.debug_synchronization("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            found[f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}"] += 1
