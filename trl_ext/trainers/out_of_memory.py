"""Out of memory: `auto_find_batch_size` with the optimizer batch kept, and what to do where that cannot be."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache

from trl_ext.trainers.faults import TrainingFault, is_out_of_memory

logger = logging.getLogger(__name__)

# What a trainer gathers while it trains, beside parameters, what `train` sets anew, and its `carried_over`.
_GATHERED = (
    "_metrics",
    "_unmerged",
    "_logs",
    "_buffered_inputs",
    "_last_loaded_step",
    "_step",
    "_window_tokens",
    "_pending_metrics",
    "_pending_extra_logs",
)


def smaller_micro_batch(size: int, *counts: int) -> tuple[int, ...] | None:
    """The next smaller micro-batch, at most half, that makes the same batches of `counts` micro-batches each.

    Returns:
        The size and the counts that go with it; None if there is none.
    """
    for smaller in range(size // 2, 0, -1):
        if all(size * count % smaller == 0 for count in counts):
            return (smaller, *(size * count // smaller for count in counts))
    return None


def check_memory_search(trainer) -> None:
    """Refuse `auto_find_batch_size` where the same updates cannot be had from smaller micro-batches.

    Raises:
        ValueError: with the reason, and what to do instead.
    """
    if not trainer.args.auto_find_batch_size:
        return
    reason = None
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        reason = "DeepSpeed and FSDP are set up for one size of micro-batch"
    elif trainer.accelerator.num_processes > 1:
        reason = "with several processes, one that runs out of memory cannot tell the others amid their exchange"
    elif getattr(trainer.args, "aot_scope", None) == "device" and trainer.objective.batch_coupled:
        reason = "aot_scope device sorts within a micro-batch, whose size changes the loss"
    if reason is not None:
        raise ValueError(
            f"auto_find_batch_size cannot be used: {reason}. Lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps by the same factor, or use gradient_checkpointing"
        )


def train_within_memory(trainer, train: Callable[[], Any]) -> Any:
    """Train; with `auto_find_batch_size`, again in smaller micro-batches if memory runs out before the first update.

    transformers' own search lowers the micro-batch by a tenth and leaves the accumulation, so that the optimizer batch
    shrinks, and begins again at step 0 from parameters that have been trained. Here an optimizer step has as many
    rows as before, a policy's rollout as many responses, and random numbers begin again, so that the run is the one
    that would have been begun with the smaller micro-batch.

    Raises:
        TrainingFault: memory ran out, and no smaller micro-batch is left to try; the message names what helps.
    """
    searches = trainer.args.auto_find_batch_size
    start = _Start(trainer) if searches else None
    trainer.args.auto_find_batch_size = False
    try:
        while True:
            trainer.update_guard.updates_begun = 0
            try:
                return train()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                smaller = _smaller(trainer) if searches and not trainer.update_guard.updates_begun else None
                if smaller is None:
                    raise TrainingFault(_message(trainer, error)) from error
            # Outside of the handler, whose traceback holds on to what the failed step had allocated.
            start.restore(trainer)
            _use(trainer, smaller)
    finally:
        trainer.args.auto_find_batch_size = searches


def _smaller(trainer) -> tuple[int, ...] | None:
    args = trainer.args
    counts = [args.gradient_accumulation_steps]
    if hasattr(args, "steps_per_generation"):
        counts.append(args.steps_per_generation)
    return smaller_micro_batch(args.per_device_train_batch_size, *counts)


def _use(trainer, sizes: tuple[int, ...]) -> None:
    args = trainer.args
    before = args.per_device_train_batch_size
    args.per_device_train_batch_size, args.gradient_accumulation_steps = sizes[:2]
    if len(sizes) > 2:
        args.steps_per_generation = sizes[2]
    trainer._train_batch_size = args.train_batch_size
    logger.warning(
        f"out of memory with per_device_train_batch_size {before}: going on with {sizes[0]} and "
        f"gradient_accumulation_steps {sizes[1]}, which make the same optimizer batch of {sizes[0] * sizes[1]}"
    )


class _Start:
    """The state in which a call of `train` begins."""

    def __init__(self, trainer):
        names = [*_GATHERED, *(name for name in trainer.carried_over if "." not in name)]
        self.gathered = {name: copy.deepcopy(getattr(trainer, name)) for name in names if hasattr(trainer, name)}
        self.optimizer = trainer.optimizer
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.device_random = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self, trainer) -> None:
        trainer.model.zero_grad(set_to_none=True)
        trainer.optimizer = self.optimizer
        trainer.model_wrapped = trainer.model
        for name, value in self.gathered.items():
            setattr(trainer, name, copy.deepcopy(value))
        clear_device_cache(garbage_collection=True)
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])
        torch.set_rng_state(self.random[2])
        if self.device_random:
            torch.cuda.set_rng_state_all(self.device_random)


def _message(trainer, error: Exception) -> str:
    args = trainer.args
    flags = []
    sizes = _smaller(trainer)
    if sizes is not None:
        rollout = f" --generation_batch_size {args.generation_batch_size}" if len(sizes) > 2 else ""
        flags.append(
            f"--per_device_train_batch_size {sizes[0]} --gradient_accumulation_steps {sizes[1]}{rollout} (the same "
            "optimizer batch)"
        )
    if not args.gradient_checkpointing:
        flags.append("--gradient_checkpointing true")
    if getattr(args, "packing", None) == "off":
        flags.append("--packing auto")
    limits = ("max_prompt_tokens", "max_response_tokens", "max_completion_length", "max_length")
    limits = [f"--{name}" for name in limits if getattr(args, name, None)]
    if limits:
        flags.append(f"lower {' or '.join(limits)}")
    resume = "; --resume_from_checkpoint goes on from a checkpoint" if trainer.state.global_step else ""
    first = next(iter(str(error).strip().splitlines()), "")
    return (
        f"out of memory in step {trainer.state.global_step + 1} with per_device_train_batch_size "
        f"{args.per_device_train_batch_size}: try {', '.join(flags)}{resume} ({first[:160]})"
    )
