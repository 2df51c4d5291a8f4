"""Parts C and D: optimizer steps of stock TRL and of packing, timed in turns and profiled.

All arms of a workload share their parameters and their optimizer, so that any two steps that are compared start from
equal weights. To add an arm, add a row to `VARIANTS`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks._lengths import Group, Pair, Writer, pairs
from benchmarks._step_arms import Arm, Peak, arm_arguments, example, rollout
from benchmarks.gpu.machine import free, out_of_memory, summarize, timed, trace
from trl_ext.trainers.token_budget import activation_bytes

WINDOWS, SHRINK = 2, 20
BASELINES = ("stock", "tuned")
# Trainer, and groups or pairs in an optimizer step and in a micro-batch.
WORKLOADS = {"grpo": ("policy", 8, 1), "dpo": ("preference", 64, 4)}


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
    """A way to run an optimizer step."""

    # Its predicted time, as a share of stock's.
    share: float
    packed: bool = False
    compiled: bool = False
    checkpointing: bool = True
    # Its micro-batches are this many times as large; halved for as long as they do not fit into memory.
    factor: int = 1
    # Widths are padded to a multiple of this.
    multiple: int = 1
    around: Callable[[], AbstractContextManager] = nullcontext
    # Whether no arm before it meets the same widths; otherwise it has no cold pass.
    new_widths: bool = True


VARIANTS = {
    "stock": Variant(1.0),
    "tuned": Variant(0.8, checkpointing=False, factor=2, multiple=64, around=without_cudnn),
    "packed": Variant(0.55, packed=True),
    "packed-no-checkpointing": Variant(0.45, packed=True, checkpointing=False, new_widths=False),
    # What a token budget makes of a step, at most: one pass.
    "packed-in-one-pass": Variant(0.3, packed=True, checkpointing=False, factor=16),
    "packed-in-one-pass-checkpointing": Variant(0.4, packed=True, factor=16, new_widths=False),
    # Its setup compiles.
    "packed-in-one-pass-compiled": Variant(0.3, packed=True, compiled=True, checkpointing=False, factor=16),
}


def counts(workload: str, quick: bool) -> tuple[int, int, int]:
    """Groups or pairs of an optimizer step and of a micro-batch, and responses of a group."""
    return (2, 1, 3) if quick else (*WORKLOADS[workload][1:], 8)


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


class TimedArm(Arm):
    """One variant on the windows of a workload; a window is the list of micro-batches of an optimizer step."""

    def __init__(self, setup: Setup, variant: Variant, factor: int):
        self.setup, self.variant = setup, variant
        units, micro_batch, group_size = setup.counts
        given = {"batch_size": factor * micro_batch, "group_size": group_size}
        arguments = arm_arguments(
            setup.trainer, setup.size, setup.device, gradient_checkpointing=variant.checkpointing, **given
        )
        arguments.compile_layers = variant.compiled
        super().__init__(variant.packed, arguments, setup.folder, setup.first)
        self.windows = [self.window(index) for index in range(WINDOWS)]
        # Loads kernels, chooses the back-end and allocates the optimizer's state, on widths that are not timed.
        self.update(self.window(WINDOWS)[:1])
        # What another arm left in the allocator would serve this one.
        free(setup.device)
        self.cold = [self.time(window)[0] for window in self.windows] if variant.new_widths else []
        self.gradient_difference: float | None = None

    def window(self, index: int, extra: int = 0) -> list[dict[str, Tensor]]:
        """The micro-batches of a window, padded as TRL pads them, and by `extra` columns more."""
        (units, _, group_size), size = self.setup.counts, self.arguments.batch_size
        shrink = SHRINK if self.setup.quick else 1
        multiple, vocabulary = max(1, self.variant.multiple // shrink), self.trainer.model.config.vocab_size
        if self.setup.trainer == "policy":
            groups = grpo_groups(index, units, group_size, vocabulary, shrink)
            widest = max(len(group.prompt) for group in groups) + extra
            longest = max(len(response) for group in groups for response in group.responses)
            whole = rollout(groups, *(-(-width // multiple) * multiple for width in (widest, longest)))
            # The loss of every micro-batch is divided by the tokens of the whole window.
            tokens = whole.pop("num_items_in_batch")
            parts = zip(*(part.split(size * group_size) for part in whole.values()), strict=True)
            batches = [{**dict(zip(whole, part, strict=True)), "num_items_in_batch": tokens} for part in parts]
        else:
            drawn = pairs("wildchat", vocabulary=vocabulary)[index * units : (index + 1) * units]
            short = [Pair(*(part[: max(2, len(part) // shrink)] for part in pair)) for pair in drawn]
            rows = [example(pair, "preference") for pair in short]
            collate = dataclasses.replace(self.trainer.data_collator, pad_to_multiple_of=multiple)
            batches = [collate(rows[at : at + size]) for at in range(0, units, size)]
            batches = [{name: pad(part, (0, extra)) for name, part in batch.items()} for batch in batches]
        return [{name: part.to(self.setup.device) for name, part in batch.items()} for batch in batches]

    def accumulate(self, batches: list[dict[str, Tensor]]) -> Tensor:
        with self.variant.around():
            return super().accumulate(batches)

    def update(self, window: list[dict[str, Tensor]]) -> None:
        """One optimizer step: the passes of all micro-batches, clipping and AdamW."""
        self.accumulate(window)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()

    def time(self, window: list[dict[str, Tensor]]) -> tuple[float, float]:
        """Seconds and peak MiB of an optimizer step."""
        with Peak(self.setup.device) as peak:
            seconds = timed(self.setup.device, lambda: self.update(window))
        return seconds, peak.bytes / 2**20

    def gradient(self, window: list[dict[str, Tensor]]) -> list[Tensor]:
        """The gradient of a window at the present weights, in host memory, so that peaks are those of passes."""
        self.accumulate(window)
        parts = [p.grad.cpu() for p in self.parameters]
        self.trainer.optimizer.zero_grad()
        return parts

    def row(self, warm: list[tuple[float, float]]) -> dict[str, Any]:
        seconds = [figures[0] for figures in warm]
        return {
            "micro_batch": self.arguments.batch_size,
            "encoded_tokens": sum(self.encoded_tokens(batch) for window in self.windows for batch in window),
            "cold_seconds": median(self.cold) if self.cold else None,
            "seconds": seconds,
            "median_seconds": median(seconds),
            "peak_mib": max(figures[1] for figures in warm),
            "activations_mib": self.packing and self.activations() / 2**20,
            "gradient_difference": self.gradient_difference,
            "packing": self.packing and self.packing.describe(),
        }

    def activations(self) -> float:
        """Bytes that the trainers' token budgets expect of the largest pass, to be compared with its peak."""
        parts = {"model": self.trainer.model, "packing": self.packing, "accelerator": self.trainer.accelerator}
        fixed, kept, recomputed = activation_bytes(SimpleNamespace(**parts))
        tokens = max(self.encoded_tokens(batch) for window in self.windows for batch in window)
        return fixed + tokens * (recomputed if self.variant.checkpointing else kept)

    def profile(self) -> dict[str, Any]:
        """What the device does in the passes of two micro-batches and an update, after warm-up."""
        window = self.windows[0][:2]
        self.update(window)
        seconds, _ = self.time(window)
        return summarize(trace(self.setup.device, lambda: self.update(window)), self.setup.device, seconds)


class Setup:
    """The arms of one workload and size, made at their first use."""

    def __init__(self, workload: str, size: str, device: str, quick: bool, folder: Path):
        self.size, self.device, self.quick, self.folder = size, device, quick, folder
        self.trainer, self.counts = WORKLOADS[workload][0], counts(workload, quick)
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
                self.first.trainer.optimizer.zero_grad()
            free(self.device)
            factor //= 2
        self.first = self.first or self.arms[name]
        return self.arms[name]

    def compare(self, name: str, rounds: int) -> dict[str, Any]:
        """Time an arm in turns with both baselines; stock tuned is left out if it does not fit into memory."""
        arms = {other: arm for other in (*BASELINES, name) if (arm := self.arm(other))}
        if not {"stock", name} <= set(arms):
            raise torch.OutOfMemoryError("the smallest micro-batch does not fit")
        self._agree(arms)
        times: dict[str, list[tuple[float, float]]] = {other: [] for other in arms}
        # The first pass over each window is not counted: the memory of an arm was freed when the next one was made.
        for index in range(-WINDOWS, rounds):
            # The order is reversed in turn, so that no arm always follows the same one.
            for other in list(arms)[:: -1 if index % 2 else 1]:
                times[other].append(arms[other].time(arms[other].windows[index % WINDOWS]))
        rows = {other: arm.row(times[other][WINDOWS:]) for other, arm in arms.items()}
        for baseline in set(BASELINES) & set(arms):
            turns = zip(rows[baseline]["seconds"], rows[name]["seconds"], strict=True)
            ratios = [one / other for one, other in turns]
            rows[name][f"ratio_to_{baseline}"] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
        return rows

    def _agree(self, arms: dict[str, TimedArm]) -> None:
        """Set the relative difference of each new arm's gradient to stock's; that of stock, of eight more columns.

        No update lies between the passes: all are at the same weights.
        """
        reference = arms["stock"].gradient(arms["stock"].windows[0])
        norm = torch.stack([part.norm() for part in reference]).norm()
        for name, arm in arms.items():
            if arm.gradient_difference is None:
                own = arm.gradient(arm.window(0, extra=8) if name == "stock" else arm.windows[0])
                apart = [(one - other).norm() for one, other in zip(own, reference, strict=True)]
                arm.gradient_difference = (torch.stack(apart).norm() / norm).item()

    def profile(self) -> dict[str, Any]:
        """The profile of each arm that fits into memory."""
        return {name: arm.profile() for name in VARIANTS if (arm := self.arm(name))}
