"""Shared code of configurations: device-dependent defaults, where TRL's assume a GPU, and checks of values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from trl_ext.names import check_choice
from trl_ext.resilience.secrets import KeepsSecrets
from trl_ext.trainers.trl_settings import refuse_given

# Counts that several configurations have.
_COUNTS = ("max_prompt_tokens", "max_response_tokens", "per_device_train_batch_size", "per_device_eval_batch_size")
_COUNTS += ("gradient_accumulation_steps", "max_skipped_updates")


@dataclass
class CommonFields(KeepsSecrets):
    """Fields that every configuration adds to TRL's; a base before TRL's class, whose fields it can replace."""

    max_skipped_updates: int = HfArg(
        default=5, help="Stop, with a checkpoint, after this many updates in a row that were not finite."
    )
    logging_nan_inf_filter: bool = HfArg(
        default=False,
        help="transformers' look at the loss of every micro-batch, which waits for a GPU. Not needed: a loss "
        "that is not finite counts as 0 in the logged mean, and its update is skipped and counted.",
    )
    ddp_broadcast_buffers: bool | None = HfArg(
        default=False, help="Send buffers to all processes in every step. Not needed: those of these models are equal."
    )
    bf16: bool | None = HfArg(
        default=None, help="Mixed precision in bfloat16. Default: on where the accelerator has it, off on a CPU."
    )
    gradient_checkpointing: bool | None = HfArg(
        default=None,
        help="Recompute activations in the backward pass. Default: off on a CPU and, with token budgets on a GPU, "
        "after the first step if its memory holds them; otherwise on.",
    )
    # Whether memory may turn that off, where it was not given.
    recomputes_by_memory: ClassVar[bool] = False


@dataclass
class PackedFields(CommonFields):
    """Fields of a trainer that can pack its forward passes."""

    packing: str = HfArg(
        default="auto",
        help="auto: forward passes leave out padding and encode common prefixes once, where the model allows "
        "it and a check at the first batch agrees. off: TRL's own padded passes.",
    )
    compile_layers: bool = HfArg(
        default=False,
        help="Compile the layers of packed passes, for models without dropout on a GPU in half precision. The "
        "first steps take a minute longer.",
    )
    tokens_per_pass: str | None = HfArg(
        default=None,
        help="Tokens of a packed forward pass, such as 16384: the rows of an optimizer step go into as few "
        "passes as that allows, with the same update up to rounding. auto: as many tokens as the largest "
        "micro-batch of the step has with its padding and, after the first step on a GPU, as its memory takes. off: "
        "as many passes as micro-batches. Default: auto with an accelerator, off on a CPU.",
    )


@dataclass
class TruncatedFields(PackedFields):
    """Fields of a trainer on given responses, which are truncated separately from their prompts."""

    max_prompt_tokens: int | None = HfArg(default=512, help="Longer prompts lose their beginning. None for no limit.")
    max_response_tokens: int | None = HfArg(
        default=512, help="Longer responses lose their end, the end-of-turn token included. None for no limit."
    )
    max_length: int | None = HfArg(default=None, help="Not used: see max_prompt_tokens and max_response_tokens.")


def runs_on_cpu(use_cpu: bool) -> bool:
    """Whether training will run on the CPU: requested here or by `accelerate launch`, or no other device exists."""
    asked_by_launcher = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return use_cpu or asked_by_launcher or not torch.accelerator.is_available()


def resolve_device_defaults(args: TrainingArguments) -> None:
    """Resolve the fields that depend on the device and are unset (None), before TRL reads them.

    An accelerator uses bfloat16 where it has it, unless float16 is requested, gradient checkpointing, and packed
    passes of the size of padded micro-batches. A CPU uses float32, no checkpointing and a pass for each micro-batch.

    Raises:
        ValueError: float16 is requested on a CPU.
    """
    args.use_cpu = runs_on_cpu(args.use_cpu)
    if args.use_cpu and args.fp16:
        raise ValueError("fp16 needs a GPU, and this run is on a CPU: leave fp16 out to train in float32")
    args.recomputes_by_memory = args.gradient_checkpointing is None and not args.use_cpu
    if args.gradient_checkpointing is None:
        args.gradient_checkpointing = not args.use_cpu
    if getattr(args, "tokens_per_pass", "off") is None:
        args.tokens_per_pass = "off" if args.use_cpu else "auto"
    if args.bf16 is None:
        native = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        args.bf16 = not args.use_cpu and not args.fp16 and native


def configuration(trainer: object, args: Any, config_class: type) -> Any:
    """The given configuration, or a new one; a TypeError for one of another class, such as TRL's of that name."""
    args = config_class() if args is None else args
    if not isinstance(args, config_class):
        name, given = config_class.__name__, type(args)
        raise TypeError(
            f"{type(trainer).__name__} takes a {name}, got {given.__name__} of {given.__module__}: "
            f"from trl_ext import {name}"
        )
    return args


# ---- Checks of fields ----


def check_at_least(
    args: Any, least: dict[str, float], *, positive: Sequence[str] = (), shares: Sequence[str] = ()
) -> None:
    """Raise ValueError for a field that is neither None nor a finite number within its bounds.

    Args:
        args: the configuration.
        least: least values of fields.
        positive: fields that must be above 0.
        shares: fields that must lie in [0, 1].
    """
    bounds = [
        (name, f"be at least {bound}", lambda value, bound=bound: value >= bound) for name, bound in least.items()
    ]
    bounds += [(name, "be positive", lambda value: value > 0) for name in positive]
    bounds += [(name, "lie in [0, 1]", lambda value: 0 <= value <= 1) for name in shares]
    for name, bound, is_within in bounds:
        value = getattr(args, name)
        if value is not None and not (is_within(value) and value < math.inf):
            raise ValueError(f"{name} must {bound}, got {value}")


def check_training(args: TrainingArguments, **least: float) -> None:
    """Check the fields that configurations share; `least` has least values of further fields, or other ones."""
    least = {name: 1 for name in _COUNTS if hasattr(args, name)} | least
    check_at_least(args, least, positive=["num_train_epochs"] if args.max_steps == -1 else [])
    if args.max_steps < 1 and args.max_steps != -1:
        raise ValueError(f"max_steps must be at least 1, got {args.max_steps}; -1 trains num_train_epochs")
    if isinstance(args, PackedFields):
        check_choice("packing", args.packing, ("auto", "off"))
        given = "auto" if args.tokens_per_pass is None else str(args.tokens_per_pass)
        if given not in ("auto", "off") and not (given.isdecimal() and int(given)):
            raise ValueError(f"tokens_per_pass must be auto, off or a number of tokens, got {given!r}")
    if isinstance(args, TruncatedFields):
        refuse_given(args, {"max_length": "use max_prompt_tokens and max_response_tokens"})


def parse_json_option(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """An option that is a JSON object, from a dictionary or from text; a ValueError names one that is not."""
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object such as '{{\"gamma\": 0.5}}', got {value!r}")
    return value
