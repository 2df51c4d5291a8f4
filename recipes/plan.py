"""`--print_plan`: what a run would do and need, printed before a weight is loaded; and engines that fall back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import get_peft_config

from trl_ext.models import resolve_model_path
from trl_ext.trainers.defaults import is_main_process, warn_once_per_run
from trl_ext.trainers.engine import check_engine, engine_in_force
from trl_ext.trainers.memory_estimate import LEFT_OUT
from trl_ext.trainers.plan import plan_run


@dataclass
class LaunchArguments:
    """How a run is launched, beside what it is of."""

    print_plan: str | None = field(
        default=None,
        metadata={
            "help": "Print processes, engine, updates, memory and files, and end before a weight is loaded; json for "
            "one line of JSON.",
            "nargs": "?",
            "const": "text",
        },
    )
    allow_engine_fallback: bool = field(
        default=False,
        metadata={"help": "Train on where FSDP was asked for and accelerate puts DDP or nothing in its place."},
    )

    def __post_init__(self):
        if self.print_plan not in (None, "text", "json"):
            raise ValueError(f"print_plan must be text or json, got {self.print_plan!r}")


def say_refusal(check: Callable[[], str | None]) -> str | None:
    """What a check finds; where it refuses the run, which a plan does not, why."""
    try:
        return check()
    except (OSError, ValueError) as error:
        warn_once_per_run(f"the run itself would be refused: {error}")
        return None


def check_launch(launch: LaunchArguments, training) -> None:
    """Refuse an engine that is not the one asked for, or say that it is not.

    Raises:
        ValueError: it is not, and nothing allows that; a plan is printed all the same.
    """

    def check() -> str | None:
        return check_engine(engine_in_force(training), allow_fallback=launch.allow_engine_fallback)

    fallback = check() if launch.print_plan is None else say_refusal(check)
    if fallback is not None:
        warn_once_per_run(fallback)


def end_with_plan(
    launch: LaunchArguments, model, training, datasets: Mapping[str, Any], files: tuple[str, ...]
) -> None:
    """Print the plan and end the program with code 0, where that was asked for.

    Args:
        launch: of the run.
        model: its model arguments.
        training: the trainer's configuration.
        datasets: that the trainer is given.
        files: that a run may write into its folder, beside checkpoints.

    Raises:
        ValueError: as `plan_run`, and where the model cannot be read.
    """
    if launch.print_plan is None:
        return
    try:
        plan = plan_run(
            training,
            resolve_model_path(model.model_name_or_path),
            datasets=datasets,
            revision=model.model_revision,
            dtype="float32" if training.use_cpu and not training.bf16 else model.dtype,
            quantized_bits=4 if model.load_in_4bit else 8 if model.load_in_8bit else None,
            peft_config=get_peft_config(model),
        )
    except OSError as error:
        raise ValueError(
            f"the model {model.model_name_or_path!r} could not be read for its plan; without a network, give a copy's "
            f"folder with --model_name_or_path. ({error})"
        ) from error
    plan["model"] = model.model_name_or_path
    plan["files"] = {"folder": training.output_dir, "names": list(files), "trackers": list(training.report_to)}
    plan["left_out"] = LEFT_OUT
    if is_main_process():
        # Alone on the last line, below what the recipe and the engine say.
        print(json.dumps(plan) if launch.print_plan == "json" else plan_text(plan))
        sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    raise SystemExit(0)


def plan_text(plan: Mapping[str, Any]) -> str:
    """The plan in lines."""
    engine, parameters, memory, disk = (plan[name] for name in ("engine", "parameters", "memory", "disk"))
    fallback = "" if engine["name"] == engine["asked"] else f" ({engine['asked']} was asked for)"
    updates = [f"  {name.replace('_', ' ')}: {_number(value)}" for name, value in plan["updates"].items()]
    why = explain_memory(plan["pass"])
    parts = [
        f"  {name}: {_size(value)}{why.get(name, '')}" for name, value in memory.items() if value and name != "total"
    ]
    files, reference = plan["files"], ", and a reference model as large" if parameters["reference"] else ""
    kept = (
        "as many checkpoints as are written" if disk["checkpoints"] is None else f"{disk['checkpoints']} checkpoints"
    )
    total = "" if disk["total"] is None else f", {_size(disk['total'])} in all"
    trackers = f"; and to {', '.join(files['trackers'])}" if files["trackers"] else ""
    where = os.path.join(files["folder"], "")
    return "\n".join(
        [
            f"plan for {plan['model']}",
            f"processes: {engine['processes']}, the first on {engine['device']}; engine: {engine['name']}{fallback}; "
            f"mixed precision: {engine['mixed_precision']}",
            "updates:",
            *updates,
            f"parameters: {parameters['total']:,} in {parameters['dtype']}, of which {parameters['trained']:,} are "
            f"trained{reference}",
            f"memory of each process's device, about {_size(memory['total'])}:",
            *parts,
            f"  left out: {plan['left_out']}",
            f"disk: {kept} of {_size(disk['checkpoint'])} and the model of {_size(disk['model'])}{total}",
            f"written into {where}: checkpoint-*/, samples/, the model, and what applies of "
            f"{', '.join(files['names'])}{trackers}",
        ]
    )


def explain_memory(one_pass: Mapping[str, Any]) -> dict[str, str]:
    """What those parts of the memory follow from that grow with a pass, by their names."""
    rows, tokens, length = (f"{one_pass[name]:,}" for name in ("rows", "tokens", "length"))
    kept = "inputs of all layers and one layer at a time" if one_pass["recomputes_layers"] else "all layers"
    logits = one_pass["logits"]
    sampled, longest = (f"{one_pass[name]:,}" for name in ("generated_rows", "generated_length"))
    return {
        "activations": f" (of {tokens} tokens, {rows} rows of at most {length} in a pass: {kept})",
        "logits": f" (of {logits['positions']:,} of these tokens at a time and {logits['outputs']:,} outputs, in "
        f"float32, {logits['copies']} copies)",
        "generation": f" (keys and values of {sampled} responses at once, of at most {longest} tokens with their "
        "prompts)",
    }


def _number(value: Any) -> str:
    return "known only in training" if value is None else f"{value:,}"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
