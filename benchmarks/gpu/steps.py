"""Parts C and D: optimizer steps of stock TRL and of packing, timed in turns and profiled.

All arms of a workload share their parameters and their optimizer, so that any two steps that are compared start from
equal weights. To add an arm, add a row to `VARIANTS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks._lengths import Group, Pair, Writer, pairs
from benchmarks._step_arms import Arm, Peak, count_tokens, example, rollout
from benchmarks.gpu.devices import free, out_of_memory, summarize, synchronizing_lines, timed, trace

WINDOWS = 2


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Keep attention from cuDNN, which builds a plan for every new width."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class Variant(NamedTuple):
    """A way to run an optimizer step.

    Attributes:
        label: its name in the table.
        share: its predicted time, as a share of stock's.
        packed: whether `share_prefixes` is applied.
        checkpointing: whether activations are recomputed.
        factor: its micro-batches are this many times as large; halved for as long as they do not fit into memory.
        multiple: widths are padded to a multiple of this.
        around: a context in which its passes run.
        new_widths: whether no arm before it meets the same widths; else it has no cold pass.
    """

    label: str
    share: float
    packed: bool = False
    checkpointing: bool = True
    factor: int = 1
    multiple: int = 1
    around: Callable[[], AbstractContextManager] = nullcontext
    new_widths: bool = True


BASELINES = ("stock", "tuned")
VARIANTS = {
    "stock": Variant("stock, TRL's defaults", 1.0),
    "tuned": Variant("stock, tuned", 0.8, checkpointing=False, factor=2, multiple=64, around=without_cudnn),
    "packed": Variant("packed", 0.55, packed=True),
    "packed-no-checkpointing": Variant(
        "packed, no checkpointing", 0.45, packed=True, checkpointing=False, new_widths=False
    ),
}
# Trainer; groups or pairs in an optimizer step and in a micro-batch; the same of a quick run.
WORKLOADS = {"grpo": ("policy", (8, 1), (2, 1)), "dpo": ("preference", (64, 4), (4, 2))}


def grpo_groups(index: int, count: int, size: int, vocabulary: int, shrink: int = 1) -> list[Group]:
    """Groups of a rollout: prompts of 200 to 700 tokens, responses of N(220, 50), from 16 to 256."""
    draw, write = random.Random(index), Writer(vocabulary, index)
    return [
        Group(
            write(draw.randint(200, 700) // shrink),
            [write(max(2, int(min(256, max(16, draw.gauss(220, 50)))) // shrink)) for _ in range(size)],
        )
        for _ in range(count)
    ]


def dpo_pairs(index: int, count: int, vocabulary: int, shrink: int = 1) -> list[Pair]:
    """Pairs of WildChat's lengths; each index has others."""
    drawn = pairs("wildchat", vocabulary=vocabulary)[index * count : (index + 1) * count]
    return [Pair(*(part[: max(2, len(part) // shrink)] for part in pair)) for pair in drawn]


class TimedArm:
    """One variant on the windows of a workload; a window is the list of micro-batches of an optimizer step."""

    def __init__(self, setup: Setup, variant: Variant, factor: int):
        self.setup, self.variant, self.micro_batch = setup, variant, setup.micro_batch * factor
        # On a GPU: weights in float32 and passes in bfloat16, as TRL's defaults.
        arguments = argparse.Namespace(
            trainer=setup.trainer,
            size=setup.size,
            device=setup.device,
            dtype="bfloat16" if setup.device == "cuda" else "float32",
            weights="float32",
            lora_r=0,
            gradient_checkpointing=variant.checkpointing,
            batch_size=self.micro_batch,
            group_size=setup.group_size,
        )
        self.arm = Arm(variant.packed, arguments, setup.folder, setup.first and setup.first.arm)
        self.windows = [self.window(index) for index in range(WINDOWS)]
        # Loads kernels, chooses the back-end and allocates the optimizer's state, on widths that are not timed.
        self.step(self.window(WINDOWS)[:1])
        # What another arm left in the allocator would serve this one.
        free(setup.device)
        self.cold = [self.time(window) for window in self.windows] if variant.new_widths else []
        self.gradient_difference: float | None = None

    def window(self, index: int, extra: int = 0) -> list[dict[str, Tensor]]:
        """The micro-batches of a window, padded as TRL pads them, and by `extra` columns more."""
        setup = self.setup
        multiple = max(1, self.variant.multiple // setup.shrink)
        vocabulary = self.arm.trainer.model.config.vocab_size
        if setup.trainer == "policy":
            groups = grpo_groups(index, setup.units, setup.group_size, vocabulary, setup.shrink)
            widest = max(len(group.prompt) for group in groups) + extra
            longest = max(len(response) for group in groups for response in group.responses)
            whole = rollout(groups, *(-(-width // multiple) * multiple for width in (widest, longest)))
            # The loss of every micro-batch is divided by the tokens of the whole window.
            tokens = whole.pop("num_items_in_batch")
            parts = zip(*(part.split(self.micro_batch * setup.group_size) for part in whole.values()), strict=True)
            batches = [{**dict(zip(whole, part, strict=True)), "num_items_in_batch": tokens} for part in parts]
        else:
            rows = [example(pair, "preference") for pair in dpo_pairs(index, setup.units, vocabulary, setup.shrink)]
            collate = dataclasses.replace(self.arm.trainer.data_collator, pad_to_multiple_of=multiple)
            batches = [collate(rows[at : at + self.micro_batch]) for at in range(0, len(rows), self.micro_batch)]
            batches = [{name: pad(part, (0, extra)) for name, part in batch.items()} for batch in batches]
        return [{name: part.to(setup.device) for name, part in batch.items()} for batch in batches]

    def accumulate(self, window: list[dict[str, Tensor]]) -> None:
        with self.variant.around():
            self.arm.accumulate(window)

    def step(self, window: list[dict[str, Tensor]]) -> None:
        """One optimizer step: the passes of all micro-batches, clipping and AdamW."""
        self.accumulate(window)
        torch.nn.utils.clip_grad_norm_(self.arm.parameters, 1.0)
        self.arm.trainer.optimizer.step()
        self.arm.trainer.optimizer.zero_grad()

    def time(self, window: list[dict[str, Tensor]]) -> dict[str, float]:
        with Peak(self.setup.device) as peak:
            figures = timed(self.setup.device, lambda: self.step(window))
        return {**figures, "peak_mib": peak.bytes / 2**20}

    @contextmanager
    def gradients(self, window: list[dict[str, Tensor]]) -> Iterator[list[Tensor]]:
        """The gradients of a window at the present weights, within the block."""
        self.accumulate(window)
        yield [p.grad for p in self.arm.parameters]
        self.arm.trainer.optimizer.zero_grad()

    def row(self, warm: list[dict[str, float]]) -> dict[str, Any]:
        batches = [batch for window in self.windows for batch in window]
        return {
            "label": self.variant.label,
            "micro_batch": self.micro_batch,
            "micro_batches": len(self.windows[0]),
            "real_tokens": sum(count_tokens(batch, self.setup.trainer)["real_tokens"] for batch in batches),
            "encoded_tokens": sum(self.arm.encoded_tokens(batch) for batch in batches),
            "cold_seconds": median(figures["seconds"] for figures in self.cold) if self.cold else None,
            "cold_allocations": sum(figures["allocations"] for figures in self.cold),
            "seconds": [figures["seconds"] for figures in warm],
            "median_seconds": median(figures["seconds"] for figures in warm),
            "device_seconds": median(figures["device_seconds"] for figures in warm),
            "allocations": sum(figures["allocations"] for figures in warm),
            "peak_mib": max(figures["peak_mib"] for figures in warm),
            "gradient_difference": self.gradient_difference,
            "packing": self.arm.packing and self.arm.packing.describe(),
        }

    def profile(self) -> dict[str, Any]:
        """What the device does in the passes of two micro-batches and an update, after warm-up."""
        device, window = self.setup.device, self.windows[0][:2]
        self.step(window)
        seconds = self.time(window)["seconds"]
        return {
            "label": self.variant.label,
            "micro_batches": len(window),
            "seconds": seconds,
            **summarize(trace(device, lambda: self.step(window)), device, seconds),
            "synchronizing_lines": synchronizing_lines(device, lambda: self.step(window)),
        }


class Setup:
    """The arms of one workload and size, made at their first use."""

    def __init__(self, workload: str, size: str, device: str, quick: bool, folder: Path):
        self.size, self.device, self.folder = size, device, folder
        self.trainer, *counts = WORKLOADS[workload]
        self.units, self.micro_batch = counts[quick]
        self.group_size, self.shrink = (3, 20) if quick else (8, 1)
        self.first: TimedArm | None = None
        self.arms: dict[str, TimedArm | None] = {}

    def arm(self, name: str) -> TimedArm | None:
        """An arm with the largest micro-batch that fits into memory; None if none does."""
        factor = 0 if name in self.arms else VARIANTS[name].factor
        while factor:
            self.arms[name] = None
            try:
                self.arms[name] = TimedArm(self, VARIANTS[name], factor)
                break
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            # Outside the handler, whose traceback holds what did not fit.
            if self.first is not None:
                self.first.arm.trainer.optimizer.zero_grad()
            free(self.device)
            factor //= 2
        self.first = self.first or self.arms[name]
        return self.arms[name]

    def compare(self, name: str, rounds: int) -> dict[str, Any]:
        """Time an arm in turns with both baselines; stock tuned is left out if it does not fit into memory."""
        arms = {other: arm for other in (*BASELINES, name) if (arm := self.arm(other))}
        if not {"stock", name} <= set(arms):
            raise torch.OutOfMemoryError("the smallest micro-batch does not fit")
        self._agree(list(arms.values()))
        times: dict[str, list[dict[str, float]]] = {other: [] for other in arms}
        # The first pass over each window is not counted: the memory of an arm was freed when the next one was made.
        for index in range(-WINDOWS, rounds):
            # The order is reversed in turn, so that no arm always follows the same one.
            for other in list(arms)[:: -1 if index % 2 else 1]:
                times[other].append(arms[other].time(arms[other].windows[index % WINDOWS]))
        rows = {other: arm.row(times[other][WINDOWS:]) for other, arm in arms.items()}
        for baseline in set(BASELINES) & set(arms):
            pairs = zip(rows[baseline]["seconds"], rows[name]["seconds"], strict=True)
            ratios = [one / other for one, other in pairs]
            rows[name][f"ratio_to_{baseline}"] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
        return rows

    def _agree(self, arms: list[TimedArm]) -> None:
        """Set the relative difference of each new arm's gradient to stock's; that of stock, of eight more columns.

        No update lies between the passes: all are at the same weights.
        """
        stock = self.arms["stock"]
        with stock.gradients(stock.windows[0]) as gradients:
            # In host memory, so that the memory of an arm is that of its own passes.
            reference = [part.cpu() for part in gradients]
        norm = torch.stack([part.norm() for part in reference]).norm()
        for arm in arms:
            if arm.gradient_difference is None:
                with arm.gradients(stock.window(0, extra=8) if arm is stock else arm.windows[0]) as gradients:
                    pairs = zip(gradients, reference, strict=True)
                    apart = [(own - part.to(own.device)).norm() for own, part in pairs]
                arm.gradient_difference = (torch.stack(apart).norm().cpu() / norm).item()

    def profile(self) -> dict[str, Any]:
        """The profile of each arm that fits into memory."""
        return {name: arm.profile() for name in VARIANTS if (arm := self.arm(name))}
