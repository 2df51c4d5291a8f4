"""Parts C and D: optimizer steps of stock TRL and of packing, timed in turns and profiled.

All arms of a workload share their parameters and their optimizer, so that any two steps that are compared start from
equal weights. To add an arm, add a row to `VARIANTS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import profile

from benchmarks._lengths import Group, Pair, Writer, pairs
from benchmarks._step_arms import Arm, Peak, count_tokens, example, rollout
from benchmarks.gpu.devices import Device, free, noting_synchronization, timed

ROUNDS = 6
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
        factor: its micro-batches are this many times as large, or as much of it as memory allows.
        multiple: widths are padded to a multiple of this.
        around: a context in which its passes run.
        prepare: called with the arm after it is made.
    """

    label: str
    share: float
    packed: bool = False
    checkpointing: bool = True
    factor: int = 1
    multiple: int = 1
    around: Callable[[], AbstractContextManager] = nullcontext
    prepare: Callable[[Arm], Any] = lambda arm: None


BASELINES = ("stock", "tuned")
VARIANTS = {
    "stock": Variant("stock, TRL's defaults", 1.0),
    "tuned": Variant("stock, tuned", 0.8, checkpointing=False, factor=2, multiple=64, around=without_cudnn),
    "packed": Variant("packed", 0.55, packed=True),
    "packed-no-checkpointing": Variant("packed, no checkpointing", 0.45, packed=True, checkpointing=False),
}
# Groups of a policy or pairs, in an optimizer step and in a micro-batch.
WORKLOADS = {"grpo": ("policy", 8, 1), "dpo": ("preference", 64, 4)}
QUICK_WORKLOADS = {"grpo": ("policy", 2, 1), "dpo": ("preference", 4, 2)}
GROUP_SIZE, QUICK_GROUP_SIZE, SHRINK = 8, 3, 20


def grpo_groups(index: int, count: int, size: int, vocabulary: int, shrink: int = 1) -> list[Group]:
    """Groups of a rollout: prompts of 200 to 700 tokens, responses of N(220, 50), from 16 to 256."""
    draw, write = random.Random(index), Writer(vocabulary, index)
    return [
        Group(
            write(draw.randint(200, 700) // shrink),
            [write(int(min(256, max(16, draw.gauss(220, 50)))) // shrink) for _ in range(size)],
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
        self.arm = Arm(
            variant.packed, setup.arguments(variant, self.micro_batch), setup.folder, setup.first and setup.first.arm
        )
        variant.prepare(self.arm)
        self.windows = [self.window(index) for index in range(WINDOWS + 1)]
        # Loads kernels, chooses the back-end, and allocates the optimizer's state.
        self.step(self.windows[WINDOWS][:1])
        self.cold = [self.time(window) for window in self.windows[:WINDOWS]]
        with Peak(setup.device.name) as peak:
            self.second = [self.time(window) for window in self.windows[:WINDOWS]]
        self.peak_bytes = peak.bytes

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
            tokens = whole.pop("num_items_in_batch")
            parts = zip(*(part.split(self.micro_batch * setup.group_size) for part in whole.values()), strict=True)
            batches = [{**dict(zip(whole, part, strict=True)), "num_items_in_batch": tokens} for part in parts]
        else:
            rows = [example(pair, "preference") for pair in dpo_pairs(index, setup.units, vocabulary, setup.shrink)]
            collate = dataclasses.replace(self.arm.trainer.data_collator, pad_to_multiple_of=multiple)
            batches = [collate(rows[at : at + self.micro_batch]) for at in range(0, len(rows), self.micro_batch)]
            if extra:
                batches = [
                    {name: torch.nn.functional.pad(part, (0, extra)) for name, part in batch.items()}
                    for batch in batches
                ]
        return [{name: part.to(setup.device.name) for name, part in batch.items()} for batch in batches]

    def step(self, window: list[dict[str, Tensor]]) -> None:
        """One optimizer step: the passes of all micro-batches, clipping and AdamW."""
        with self.variant.around():
            self.arm.accumulate(window)
        torch.nn.utils.clip_grad_norm_(self.arm.parameters, 1.0)
        self.arm.trainer.optimizer.step()
        self.arm.trainer.optimizer.zero_grad()

    def time(self, window: list[dict[str, Tensor]]) -> dict[str, float]:
        return timed(self.setup.device, lambda: self.step(window))

    @contextmanager
    def gradients(self, window: list[dict[str, Tensor]]) -> Iterator[list[Tensor]]:
        """The gradients of a window at the present weights, within the block."""
        with self.variant.around():
            self.arm.accumulate(window)
        yield [p.grad for p in self.arm.parameters]
        self.arm.trainer.optimizer.zero_grad()

    def row(self, warm: list[dict[str, float]]) -> dict[str, Any]:
        seconds = [figures["seconds"] for figures in warm]
        counts = [count_tokens(batch, self.setup.trainer) for window in self.windows[:WINDOWS] for batch in window]
        encoded = [self.arm.encoded_tokens(batch) for window in self.windows[:WINDOWS] for batch in window]
        return {
            "label": self.variant.label,
            "micro_batch": self.micro_batch,
            "micro_batches": len(self.windows[0]),
            "real_tokens": sum(count["real_tokens"] for count in counts),
            "encoded_tokens": sum(encoded),
            "cold_seconds": median(figures["seconds"] for figures in self.cold),
            "cold_allocations": sum(figures["allocations"] for figures in self.cold),
            "seconds": seconds,
            "median_seconds": median(seconds),
            "device_seconds": median(figures["device_seconds"] for figures in warm),
            "allocations": sum(figures["allocations"] for figures in warm),
            "peak_mib": self.peak_bytes / 2**20,
            "packing": self.arm.packing and self.arm.packing.describe(),
        }


class Setup:
    """The arms of one workload and size, made at their first use."""

    def __init__(self, workload: str, size: str, device: Device, quick: bool, folder: Path):
        self.size, self.device, self.quick, self.folder = size, device, quick, folder
        self.trainer, self.units, self.micro_batch = (QUICK_WORKLOADS if quick else WORKLOADS)[workload]
        self.group_size, self.shrink = (QUICK_GROUP_SIZE, SHRINK) if quick else (GROUP_SIZE, 1)
        self.first: TimedArm | None = None
        self.arms: dict[str, TimedArm | None] = {}

    def arguments(self, variant: Variant, micro_batch: int) -> argparse.Namespace:
        """The flags of `benchmarks.step`. On a GPU: weights in float32 and passes in bfloat16, as TRL's defaults."""
        return argparse.Namespace(
            trainer=self.trainer,
            size=self.size,
            device=self.device.name,
            dtype="bfloat16" if self.device.name == "cuda" else "float32",
            weights="float32",
            lora_r=0,
            gradient_checkpointing=variant.checkpointing,
            batch_size=micro_batch,
            group_size=self.group_size,
        )

    def arm(self, name: str) -> TimedArm:
        """An arm after its warm-up. Its micro-batches are halved for as long as they do not fit into memory."""
        factor = VARIANTS[name].factor
        while self.arms.get(name) is None:
            self.arms[name] = self._try(name, factor)
            factor //= 2
        return self.arms[name]

    def _try(self, name: str, factor: int) -> TimedArm | None:
        try:
            made = TimedArm(self, VARIANTS[name], factor)
        except torch.OutOfMemoryError:
            made = None
        # Outside the handler, whose traceback holds what did not fit.
        if made is None:
            if self.first is not None:
                self.first.arm.trainer.optimizer.zero_grad()
            free(self.device)
            if factor == 1:
                raise torch.OutOfMemoryError(f"{VARIANTS[name].label}: its smallest micro-batch does not fit")
        self.first = self.first or made
        return made

    # ---- Part C ----

    def compare(self, name: str, rounds: int) -> dict[str, Any]:
        """Time an arm in turns with both baselines; a baseline that does not fit into memory is left out."""
        arms = {}
        for other in (*BASELINES, name):
            try:
                arms[other] = self.arm(other)
            except torch.OutOfMemoryError:
                if other != "tuned":
                    raise
                continue
        relative, noise = self._agreement(arms[name])
        times: dict[str, list[dict[str, float]]] = {other: [] for other in arms}
        for index in range(rounds):
            # The order is reversed in turn, so that no arm always follows the same one.
            for other in list(arms)[:: -1 if index % 2 else 1]:
                times[other].append(arms[other].time(arms[other].windows[index % WINDOWS]))
        result: dict[str, Any] = {other: arm.row(times[other]) for other, arm in arms.items()}
        for baseline in set(BASELINES) & set(arms):
            ratios = [
                one["seconds"] / other["seconds"] for one, other in zip(times[baseline], times[name], strict=True)
            ]
            result[f"ratio_to_{baseline}"] = {"median": median(ratios), "range": [min(ratios), max(ratios)]}
        return {
            "arms": result,
            "arm": name,
            "rounds": rounds,
            "gradient_difference": relative,
            "gradient_difference_of_more_padding": noise,
        }

    def _agreement(self, arm: TimedArm) -> tuple[float, float]:
        """The relative difference of a window's gradient to stock's, and of stock's with eight more columns.

        No update lies between the passes: all are at the same weights.
        """
        stock = self.arms["stock"]
        with stock.gradients(stock.windows[0]) as gradients:
            # In host memory, so that the memory of an arm is that of its own passes.
            reference = [part.cpu() for part in gradients]
            norm = torch.stack([part.double().norm() for part in gradients]).norm()
        apart = []
        for other, window in ((arm, arm.windows[0]), (stock, stock.window(0, extra=8))):
            with other.gradients(window) as gradients:
                differences = [
                    (own - part.to(own.device)).double().norm() for own, part in zip(gradients, reference, strict=True)
                ]
            apart.append((torch.stack(differences).norm() / norm).item())
        return apart[0], apart[1]

    # ---- Part D ----

    def profile(self) -> dict[str, Any]:
        """What the device does in the passes of two micro-batches and an update of each arm, after warm-up."""
        found = {}
        for name, variant in VARIANTS.items():
            try:
                arm = self.arm(name)
            except torch.OutOfMemoryError:
                continue
            window = arm.windows[0][:2]
            arm.step(window)
            plain = arm.time(window)["seconds"]
            with profile(activities=list(self.device.activities)) as profiler:
                arm.step(window)
                self.device.synchronize()
            with noting_synchronization(self.device) as places:
                arm.step(window)
            found[name] = {
                "label": variant.label,
                "micro_batches": len(window),
                "seconds": plain,
                **summarize_events(profiler.events(), self.device, plain),
                "synchronizing_lines": dict(places.most_common(20)),
            }
        return found


def summarize_events(events, device: Device, seconds: float) -> dict[str, Any]:
    """Figures of a profile.

    Args:
        events: of the profiler; on a CPU, operations that no other one calls stand for kernels.
        device: the profiled one.
        seconds: wall seconds of the same step without the profiler, which slows the CPU down.

    Returns:
        The number of kernels; the time of all and the time in which any ran; the latter over `seconds` as `busy`;
        calls at which the CPU waited; allocations; copies; the kernels that took the longest, and those of attention.
    """
    kernels = [
        event
        for event in events
        if event.device_type == device.kind and not event.is_user_annotation and event.cpu_parent is None
    ]
    union, end = 0.0, float("-inf")
    for span in sorted((event.time_range for event in kernels), key=lambda span: span.start):
        union += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    times: Counter[str] = Counter()
    for event in kernels:
        times[event.name[:120]] += event.time_range.end - event.time_range.start
    names = Counter(event.name for event in events)
    attention = ("attention", "flash", "fmha", "sdpa", "softmax")
    return {
        "kernels": len(kernels),
        "kernel_seconds": sum(times.values()) / 1e6,
        "busy_seconds": union / 1e6,
        "busy": union / 1e6 / seconds,
        "waits": sum(names[name] for name in device.waits),
        "allocations": sum(names[name] for name in device.allocations_seen),
        "copies": {name: count for name, count in names.items() if name.startswith("Memcpy")},
        "longest": {name: time / 1e6 for name, time in times.most_common(12)},
        "attention": {
            name: time / 1e6 for name, time in times.most_common() if any(word in name.lower() for word in attention)
        },
    }
