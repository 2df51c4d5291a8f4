"""Counts the points at which a pass would wait for a GPU: reads of a number, searches for places, pageable copies.

On a CPU, these are the calls that would block with a CUDA device. Waits that a library makes of its own accord, as for
memory, are not seen.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
# Their result has a size, or a value, that only the device knows.
READS = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.equal, ATEN.unique_consecutive}
READS |= {ATEN._unique2, ATEN.unique_dim}
INDEXED = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
PACKAGES = ("/trl_ext/", "/trl/", "/transformers/", "/accelerate/", "/torch/optim/")


class _Mode(TorchDispatchMode):
    def __init__(self, found: Counter):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        by_mask = packet in INDEXED and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if packet in READS or by_mask:
            self.found[_where(str(packet))] += 1
        return func(*args, **(kwargs or {}))


def _where(what: str) -> str:
    for frame in reversed(traceback.extract_stack()):
        if any(package in frame.filename for package in PACKAGES) and "/tests/" not in frame.filename:
            return f"{what} at {'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"
    return f"{what} in the backward pass"


@contextmanager
def counting() -> Iterator[Counter]:
    """Count within the block, by operation and place."""
    found: Counter = Counter()

    def noted(name):
        original = getattr(torch.Tensor, name)

        def call(self, *args, **kwargs):
            found[_where(name)] += 1
            # The read inside is the same one.
            with mock.patch.object(mode, "found", Counter()):
                return original(self, *args, **kwargs)

        return call

    mode = _Mode(found)
    copies = {name: noted(name) for name in ("tolist", "cpu")}
    with mock.patch.multiple(torch.Tensor, **copies), mode:
        yield found
