"""Reference log-probabilities kept on disk, so that a second run on the same model and pairs computes none."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from safetensors.torch import load_file, save_file

from trl_ext.files import replacing

logger = logging.getLogger(__name__)

_SEGMENTS = ("prompt_ids", "chosen_ids", "rejected_ids")
COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


def with_reference_log_probs(
    dataset: Dataset, *, model_hash: str, passes: str, is_main_process: bool, compute: Callable[[Dataset], Dataset]
) -> Dataset:
    """The dataset with the reference log-probabilities of its pairs: from the cache, or computed and then cached.

    Args:
        dataset: pairs as token ids, in the columns prompt_ids, chosen_ids and rejected_ids.
        model_hash: of the weights of the reference, adapters included.
        passes: how forward passes are made, as far as it shows in the values: the precision, and packed or padded.
        is_main_process: which process reads and writes; every process must call this.
        compute: adds the columns ref_chosen_logps and ref_rejected_logps to a dataset.
    """
    cached = None
    path = None
    if is_main_process:
        path = cache_folder() / f"{_key(dataset, model_hash, passes)}.safetensors"
        cached = _read(path, len(dataset))
    (cached,) = broadcast_object_list([cached])
    if cached is None:
        dataset = compute(dataset)
        if is_main_process:
            _write(path, dataset)
        return dataset
    columns = {name: cached[name].tolist() for name in COLUMNS}
    return datasets.concatenate_datasets([dataset, Dataset.from_dict(columns)], axis=1)


def cache_folder() -> Path:
    """Where they are kept: beside the datasets that are cached (HF_DATASETS_CACHE)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "trl_ext-reference-log-probs"


def _key(dataset: Dataset, model_hash: str, passes: str) -> str:
    digest = hashlib.sha256(f"1 {model_hash} {passes} ".encode())
    for batch in dataset.select_columns(list(_SEGMENTS)).iter(batch_size=1000):
        for name in _SEGMENTS:
            lengths = [len(ids) for ids in batch[name]]
            digest.update(np.asarray(lengths, np.int64).tobytes())
            digest.update(np.asarray([token for ids in batch[name] for token in ids], np.int64).tobytes())
    return digest.hexdigest()


def _read(path: Path, rows: int) -> dict[str, torch.Tensor] | None:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        return None
    except Exception as error:
        logger.warning("%s cannot be read (%s): the reference log-probabilities are computed again", path, error)
        return None
    if sorted(tensors) != sorted(COLUMNS) or any(len(tensor) != rows for tensor in tensors.values()):
        return None
    logger.info("reference log-probabilities of %d pairs come from %s", rows, path)
    return tensors


def _write(path: Path, dataset: Dataset) -> None:
    tensors = {name: torch.tensor(dataset[name], dtype=torch.float32) for name in COLUMNS}
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary)
    except OSError as error:
        logger.warning("the reference log-probabilities cannot be kept in %s: %s", path, error)
