"""How a run is launched: flags that are no part of its settings, and a check of its parallel engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from transformers.hf_argparser import HfArg

from trl_ext.names import check_choice
from trl_ext.processes import is_main_process, warn_once_per_run


@dataclass
class LaunchArguments:
    """How a run is launched."""

    allow_engine_fallback: bool = HfArg(
        default=False, help="Train on where FSDP was asked for and accelerate puts DDP or nothing in its place."
    )
    doctor: str = HfArg(
        default="on", help="Examine data, model and configuration before training, without a step; off to leave it."
    )

    def __post_init__(self):
        check_choice("doctor", self.doctor, ("on", "off"))


class Engine(NamedTuple):
    """The engine that will run, and the requested one: none, DDP, DataParallel, FSDP1, FSDP2, or ZeRO-0 to ZeRO-3."""

    name: str
    asked: str


def engine_in_force(args) -> Engine:
    """The engine that the trainer will get from a configuration."""
    kind = args.distributed_state.distributed_type.value
    plain = "DDP" if kind != "NO" else "DataParallel" if args.n_gpu > 1 else "none"
    name = asked = plain
    if args.deepspeed_plugin is not None:
        name = asked = f"ZeRO-{args.deepspeed_plugin.zero_stage}"
    elif args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        version = (args.fsdp_plugin_args or {}).get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))
        asked = f"FSDP{version}"
        # Accelerate enables FSDP only for processes on accelerators, and then changes their kind.
        shards = kind == "FSDP" or (kind.startswith("MULTI_") and kind not in ("MULTI_CPU", "MULTI_NEURON"))
        name = asked if shards else plain
    return Engine(name, asked)


def check_engine(engine: Engine, device: str, *, allow_fallback: bool) -> None:
    """Warn if the engine is not the requested one and a fallback is allowed.

    Raises:
        ValueError: FSDP was requested and accelerate silently uses something else; or one process sees several GPUs,
            where DataParallel would multiply the batch and split groups.
    """
    if engine.name == "DataParallel":
        raise ValueError(
            "one process sees several GPUs: start it with `accelerate launch --config_file "
            "accelerate_configs/multi_gpu.yaml --num_processes N`, or choose one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if engine.name == engine.asked:
        return
    place = "a CPU" if device.startswith("cpu") else "one process without a launcher"
    instead = {"none": "nothing is sharded", "DDP": "DDP trains instead, with all weights in every process"}
    found = f"{engine.asked} was asked for, and on {place} {instead[engine.name]}"
    if not allow_fallback:
        raise ValueError(
            f"{found}: launch with accelerate_configs/multi_gpu.yaml or cpu.yaml, use zero2.yaml or zero3.yaml, which "
            "shard on a CPU as well, or give --allow_engine_fallback"
        )
    warn_once_per_run(found)


def print_batch(training) -> None:
    """Print what one update is computed on."""
    rows, accumulation = training.train_batch_size, training.gradient_accumulation_steps
    processes = training.world_size
    if is_main_process():
        print(
            f"batch of {rows * accumulation * processes} = {rows} per device x {accumulation} accumulated x "
            f"{processes} process{'es' if processes > 1 else ''} (engine: {engine_in_force(training).name})"
        )
