"""How often a training step would wait for a GPU: once for each forward pass, and for one exchange a step.

Counted on a CPU are the calls that would block with a CUDA device: reads of a number, searches for places, pageable
copies. Waits that a library makes of its own accord, as for memory, are not seen.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_ext import GRPOConfig, GRPOTrainer, PreferenceConfig, PreferenceTrainer, load_benchmark
from trl_ext.models import resolve_model_path

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


COMMON = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "report_to": "none"}
COMMON |= {"disable_tqdm": True, "save_strategy": "no", "logging_steps": 100}


def counts_of_the_last_step(trainer) -> list[Counter]:
    """What each micro-batch of the last step waits for; the first steps check packing, and sample."""
    step, found = trainer.training_step, []

    def counted(*args, **kwargs):
        with counting() as points:
            loss = step(*args, **kwargs)
        found.append(points)
        return loss

    trainer.training_step = counted
    trainer.train()
    assert trainer.packing.packed_tokens
    return found[-2:]


@pytest.mark.parametrize("loss", ["dpo", "aot"])
def test_of_preferences(loss, tmp_path):
    """The policy's and the reference's pass; a batch-coupled loss scores both micro-batches ahead, in four more."""
    args = PreferenceConfig(str(tmp_path), loss=loss, precompute_ref_log_probs=False, **COMMON)
    rows = load_benchmark("toy")["train_prefs"].select(range(24))
    first, last = counts_of_the_last_step(PreferenceTrainer(resolve_model_path("toy"), args=args, train_dataset=rows))
    assert sum(first.values()) <= 2 + 4 * (loss == "aot"), first
    assert sum(last.values()) <= 2 + 1, last


def test_of_a_policy(tmp_path):
    """A micro-batch of a rollout that an earlier step has sampled."""
    args = GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=8, num_iterations=2, beta=0.0, **COMMON)
    rows = load_benchmark("toy")["train_gen"].select(range(24))
    reward = lambda completions, **_: [float(len(str(one))) for one in completions]  # noqa: E731
    trainer = GRPOTrainer(resolve_model_path("toy"), reward_funcs=reward, args=args, train_dataset=rows)
    trainer.args.max_steps = 4
    first, last = counts_of_the_last_step(trainer)
    assert sum(first.values()) <= 1, first
    assert sum(last.values()) <= 1 + 1, last
