"""Which engine a run is trained by, as it will be in force and not as it was asked for, before any model is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments

# What stands beside each other on a machine with GPUs of any make; accelerate puts FSDP in force for these alone.
_SHARDABLE = ("MULTI_GPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU")


@dataclass(frozen=True)
class Engine:
    """How the processes of a run share the work.

    Attributes:
        name: none, DDP, DataParallel, FSDP1, FSDP2, or ZeRO-0 to ZeRO-3.
        asked: the same, as the launcher or the configuration asked for it; FSDP may come out as something else.
        processes: how many.
        devices: how many devices train: several to a process under DataParallel.
        device: of this process, such as cuda:0.
        mixed_precision: no, bf16 or fp16.
    """

    name: str
    asked: str
    processes: int
    devices: int
    device: str
    mixed_precision: str

    @property
    def is_fallback(self) -> bool:
        return self.name != self.asked

    @property
    def uses_deepspeed(self) -> bool:
        return self.name.startswith("ZeRO")

    @property
    def uses_fsdp(self) -> bool:
        return self.name.startswith("FSDP")

    @property
    def weight_shards(self) -> int:
        """Over how many processes the weights are divided; 1 where each has them all."""
        return self.processes if self.uses_fsdp or self.name == "ZeRO-3" else 1

    @property
    def gradient_shards(self) -> int:
        return self.processes if self.uses_fsdp or self.name in ("ZeRO-2", "ZeRO-3") else 1

    @property
    def optimizer_shards(self) -> int:
        return self.processes if self.uses_fsdp or self.name in ("ZeRO-1", "ZeRO-2", "ZeRO-3") else 1


def engine_in_force(args: TrainingArguments) -> Engine:
    """The engine that the trainer of a configuration will get.

    Args:
        args: any trainer's configuration, made in the process that trains.
    """
    kind = args.distributed_state.distributed_type.value
    plain = "none" if kind == "NO" else "DDP"
    if plain == "none" and args.n_gpu > 1:
        plain = "DataParallel"
    name = asked = plain
    if args.deepspeed_plugin is not None:
        name = asked = f"ZeRO-{args.deepspeed_plugin.zero_stage}"
    elif args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        version = (args.fsdp_plugin_args or {}).get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))
        asked = f"FSDP{version}"
        name = asked if kind in _SHARDABLE else plain
    return Engine(
        name=name,
        asked=asked,
        processes=args.world_size,
        devices=args.world_size * max(args.n_gpu, 1),
        device=str(args.device),
        mixed_precision="bf16" if args.bf16 else "fp16" if args.fp16 else "no",
    )


def check_engine(engine: Engine, *, allow_fallback: bool) -> str | None:
    """Refuse an engine that is not the one asked for.

    Returns:
        what to say of it where it is allowed; None where the two are the same.

    Raises:
        ValueError: FSDP was asked for, and accelerate puts something else in its place without a word; or one process
            sees several GPUs, which would multiply the batch and split groups under DataParallel.
    """
    if engine.name == "DataParallel":
        raise ValueError(
            f"one process sees {engine.devices} GPUs: start it with `accelerate launch --config_file "
            f"accelerate_configs/multi_gpu.yaml --num_processes {engine.devices}`, or choose one GPU with "
            "CUDA_VISIBLE_DEVICES=0"
        )
    if not engine.is_fallback:
        return None
    place = "a CPU" if engine.device.startswith("cpu") else "one process without a launcher"
    instead = {"none": "nothing is sharded", "DDP": "DDP trains instead, with all weights in every process"}
    found = f"{engine.asked} was asked for, and on {place} {instead.get(engine.name, f'{engine.name} trains instead')}"
    if not allow_fallback:
        raise ValueError(
            f"{found}: launch with accelerate_configs/multi_gpu.yaml or cpu.yaml, use zero2.yaml or zero3.yaml, which "
            "shard on a CPU as well, or give --allow_engine_fallback"
        )
    return found
