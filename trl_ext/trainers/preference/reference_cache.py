"""Reference log-probabilities cached on disk, so that a second run on the same model and pairs computes none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trl_ext.files import replacing
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.processes import warn_once_per_run
from trl_ext.trainers.policies import is_zero3

# Configuration entries that do not affect log-probabilities.
_INCIDENTAL = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "use_cache")
_SEGMENTS = ("prompt_ids", "chosen_ids", "rejected_ids")
COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def with_reference_log_probs(
    dataset: Dataset, *, reference: str, is_main_process: bool, compute: Callable[[Dataset], Dataset]
) -> Dataset:
    """The dataset with the reference log-probabilities of its pairs: from the cache, or computed and then cached.

    Args:
        dataset: pairs as token ids, in the columns prompt_ids, chosen_ids and rejected_ids.
        reference: the `reference_key`.
        is_main_process: whether this process reads and writes the cache; every process must call this.
        compute: adds the columns ref_chosen_logps and ref_rejected_logps to a dataset.
    """
    path = cached = None
    if is_main_process:
        path = cache_folder() / f"{_key(dataset, reference)}.safetensors"
        cached = load_file(path) if path.is_file() else None
    (cached,) = broadcast_object_list([cached])
    if cached is None:
        dataset = compute(dataset)
        if is_main_process:
            tensors = {name: torch.tensor(dataset[name], dtype=torch.float32) for name in COLUMNS}
            try:
                if all(tensor.isfinite().all() for tensor in tensors.values()):
                    with replacing(path) as temporary:
                        save_file(tensors, temporary)
            except (OSError, SafetensorError) as error:
                warn_once_per_run(f"the reference log-probabilities cannot be kept for later runs: {error}")
        return dataset
    warn_once_per_run(f"the reference log-probabilities of {len(dataset)} pairs come from an earlier run")
    columns = {name: cached[name].tolist() for name in COLUMNS}
    return datasets.concatenate_datasets([dataset, Dataset.from_dict(columns)], axis=1)


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


def reference_key(trainer) -> str:
    """Digest of everything except the pairs that a trainer's reference log-probabilities depend on.

    It covers the weights of the reference, its configuration and that of its adapter, and how passes are made, since
    packed and padded passes differ by rounding. It excludes the weights of an adapter that is switched off for the
    reference. Every process must call this.
    """
    model = trainer.model if trainer.ref_model is None else trainer.ref_model
    adapters = getattr(model, "peft_config", {})
    used = {"ref"} & set(adapters)
    config = {key: value for key, value in model.config.to_dict().items() if key not in _INCIDENTAL}
    passes = [trainer.accelerator.mixed_precision, model.config._attn_implementation, trainer.packing is not None]
    digest = hashlib.sha256(json.dumps([config, passes], sort_keys=True, default=str).encode())
    for name in used:
        digest.update(json.dumps(adapters[name].to_dict(), sort_keys=True, default=str).encode())
    gathers = is_zero3(trainer.accelerator)
    for name, parameter in sorted(model.named_parameters()):
        if any(part in adapters and part not in used for part in name.split(".")):
            continue
        # One parameter at a time, so that no process needs to hold the whole model.
        with _gathered(parameter) if gathers else nullcontext():
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} ".encode())
            digest.update(parameter.detach().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _gathered(parameter):
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


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


def cache_folder() -> Path:
    """The folder of the cache, next to the dataset cache (HF_DATASETS_CACHE)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "trl_ext-reference-log-probs"


def _key(dataset: Dataset, reference: str) -> str:
    digest = hashlib.sha256(f"1 {reference} ".encode())
    for batch in dataset.select_columns(list(_SEGMENTS)).iter(batch_size=1000):
        for name in _SEGMENTS:
            lengths = [len(ids) for ids in batch[name]]
            digest.update(np.asarray(lengths, np.int64).tobytes())
            digest.update(np.asarray([token for ids in batch[name] for token in ids], np.int64).tobytes())
    return digest.hexdigest()
