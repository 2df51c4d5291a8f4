"""Greedy responses of a base, kept for later runs with the same base and prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list

from trl_ext.files import read_json, write_json
from trl_ext.processes import is_main_process
from trl_ext.rollouts import Generation


def with_kept_responses(
    folder: str | Path,
    model,
    prompts: Sequence[list[int]],
    settings: dict[str, Any],
    generate: Callable[[Sequence[int]], list[Generation]],
) -> list[Generation]:
    """Responses to prompts: those that the folder holds, and new ones, which are added to it.

    The folder has a file for each base and settings. Responses from another processor may differ from new ones by
    rounding. Every process must call this; all return the same result.

    Args:
        folder: where responses are kept.
        model: the base, with whole weights.
        prompts: token ids of each prompt.
        settings: everything else that greedy responses depend on, as JSON values.
        generate: generates responses to the prompts with these indices.

    Raises:
        ValueError: the file is damaged.
    """
    path, kept = None, {}
    if is_main_process():
        path = Path(folder) / f"{_digest(model, settings)}.json"
        kept = {tuple(row["prompt_ids"]): Generation(**row) for row in (read_json(path) if path.is_file() else [])}
    [kept] = broadcast_object_list([kept])
    missing = [index for index, prompt in enumerate(prompts) if tuple(prompt) not in kept]
    if missing:
        kept |= {tuple(row.prompt_ids): row for row in generate(missing)}
        if is_main_process():
            write_json(path, [asdict(replace(row, log_probs=None)) for row in kept.values()])
    return [kept[tuple(prompt)] for prompt in prompts]


def _digest(model, settings: dict[str, Any]) -> str:
    """A digest of a base's weights, of settings, and of the versions that generate."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    dtype = str(torch.get_autocast_dtype(model.device.type)) if torch.is_autocast_enabled(model.device.type) else None
    about = {**settings, **versions, "autocast": dtype, "device": model.device.type}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, weight in model.named_parameters():
        # The base of a run that goes on with an adapter is that adapter's frozen copy.
        if "lora_" not in name or ".ref." in name:
            digest.update(name.replace("base_model.model.", "").replace(".base_layer", "").encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
