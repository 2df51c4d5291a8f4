"""Reference log-probabilities before training: when they save passes, what TRL's cache of them depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datasets import Dataset

from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.trainers.policies import is_zero3


def precomputes_reference(objective, args, given: dict[str, Any]) -> bool:
    """Whether to compute reference log-probabilities before training: if requested, or if that saves passes.

    `given` holds the trainer's datasets by argument.
    """
    if args.precompute_ref_log_probs is not None:
        return args.precompute_ref_log_probs
    sharded = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")
    if not objective.needs_reference or args.sync_ref_model or sharded:
        return False
    train_dataset, eval_dataset = given.get("train_dataset"), given.get("eval_dataset")
    sets = [train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset])]
    if not train_dataset or any(one is not None and not isinstance(one, Dataset) for one in sets):
        return False
    if {"image", "images"} & set(train_dataset.column_names):
        return False
    if args.max_steps <= 0:
        return args.num_train_epochs > 1
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return args.max_steps * step > len(train_dataset)


def cache_key(trainer) -> str:
    """Digest of everything except the pairs that a trainer's reference log-probabilities depend on.

    TRL names its cache by the weights alone, and with ZeRO-3 by those of a process, which are empty. Every process
    must call this.
    """
    model = trainer.accelerator.unwrap_model(trainer.model if trainer.ref_model is None else trainer.ref_model)
    passes = [trainer.accelerator.mixed_precision, model.config._attn_implementation, trainer.packing is not None]
    known = [trainer._precompute_model_hash, model.config.to_json_string(), getattr(model, "peft_config", None)]
    digest = hashlib.sha256(repr([*passes, *known]).encode())
    if is_zero3(trainer.accelerator):
        import deepspeed

        for parameter in model.parameters():
            # One parameter at a time, so that no process needs to hold the whole model.
            with deepspeed.zero.GatheredParameters([parameter]):
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def reference_passes(trainer) -> Iterator[None]:
    """Run a trainer's passes for reference log-probabilities without effect on the training that follows.

    Training draws the same random numbers, such as those of dropout, whether these passes run or the log-probabilities
    come from disk.

    ZeRO-3 records the order of modules, by their numbers, in a first pass. TRL creates an engine for these passes, and
    training creates another, which renumbers the modules. After a single pass, the first engine then fails to find its
    numbers ("pop from an empty deque").
    """
    with preserved_random_state():
        yield
    engine = trainer._precompute_engine
    if engine is not None and is_zero3(trainer.accelerator):
        coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
