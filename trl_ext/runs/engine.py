"""The parallel engine that trains a run, and its batch."""

from __future__ import annotations

import os

from trl_ext.processes import is_main_process


def engine_in_force(args) -> str:
    """The engine that the trainer will get from a configuration: none, DDP, FSDP1, FSDP2, or ZeRO-0 to ZeRO-3.

    Raises:
        ValueError: FSDP was requested and accelerate silently uses something else; or one process sees several GPUs,
            where DataParallel would multiply the batch and split groups.
    """
    kind = args.distributed_state.distributed_type.value
    if args.deepspeed_plugin is not None:
        return f"ZeRO-{args.deepspeed_plugin.zero_stage}"
    if args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        version = (args.fsdp_plugin_args or {}).get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))
        # Accelerate enables FSDP only for processes on accelerators, and then changes their kind.
        if kind == "FSDP" or (kind.startswith("MULTI_") and kind not in ("MULTI_CPU", "MULTI_NEURON")):
            return f"FSDP{version}"
        raise ValueError(
            f"FSDP{version} was asked for, and on a CPU or in one process without a launcher nothing is sharded: "
            "launch with accelerate_configs/multi_gpu.yaml or cpu.yaml, or use zero2.yaml or zero3.yaml, which shard "
            "on a CPU as well"
        )
    if kind == "NO" and args.n_gpu > 1:
        raise ValueError(
            "one process sees several GPUs: start it with `accelerate launch --config_file "
            "accelerate_configs/multi_gpu.yaml --num_processes N`, or choose one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    return "none" if kind == "NO" else "DDP"


def print_batch(training) -> None:
    """Print what one update is computed on."""
    rows, accumulation = training.train_batch_size, training.gradient_accumulation_steps
    processes = training.world_size
    if is_main_process():
        print(
            f"batch of {rows * accumulation * processes} = {rows} per device x {accumulation} accumulated x "
            f"{processes} process{'es' if processes > 1 else ''} (engine: {engine_in_force(training)})"
        )
