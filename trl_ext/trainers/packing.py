"""How the trainers pack their forward passes: the setting `packing`, and grouping of responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trl_ext.models.packing import Packing, packing_of, share_prefixes
from trl_ext.processes import warn_once_per_run


def pack_trainer(trainer) -> Packing | None:
    """Pack the passes of a trainer's model and reference model as configured; None, and one line why, if not."""
    models = [trainer.model, getattr(trainer, "ref_model", None)]
    reason = None
    if trainer.args.packing == "off":
        reason = "as asked"
    elif trainer.args.torch_compile:
        reason = "the model is compiled"
    elif trainer.is_fsdp_enabled:
        reason = "packing has not been tried under FSDP"
    elif getattr(trainer.model.config, "output_router_logits", False):
        reason = "the loss of its router counts padding (output_router_logits)"
    if reason is None:
        return share_prefixes(*models)
    for model in models:
        earlier = None if model is None else packing_of(model)
        if earlier is not None:
            earlier.remove()
    warn_once_per_run(f"packing: off, rows are padded: {reason}")
    return None


def keeps_groups(trainer) -> bool:
    """Whether a policy trainer keeps the responses to a prompt in one micro-batch, by its `keep_groups`.

    TRL distributes the responses of a rollout over its micro-batches at random. If one optimizer step takes the whole
    rollout and every term is a sum over responses, their distribution does not change the gradient.
    """
    args = trainer.args
    if args.keep_groups != "auto":
        return args.keep_groups == "on"
    packing = packing_of(trainer.model)
    whole = args.gradient_accumulation_steps % args.steps_per_generation == 0
    averaged_apart = trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1 or trainer.aux_loss_enabled
    # Your own loss may compare the responses of a micro-batch.
    coupled = averaged_apart or trainer.algorithm.surrogate == "own"
    return packing is not None and packing.active and whole and not coupled


def can_regroup(batches: list[dict[str, Any]]) -> bool:
    """Whether micro-batches hold rows only: the patches of images are not rows."""
    return not any(name in batches[0] for name in ("pixel_values", "image_grid_thw", "num_images"))


def regroup(batches: list[dict[str, Any]], groups: str) -> list[dict[str, Any]]:
    """Redistribute the rows of micro-batches of equal size so that rows with the same entry `groups` are consecutive.

    Groups, and the rows within each, keep the order in which they first appear, and so stay as random as the input.
    """
    labels = [int(group) for batch in batches for group in batch[groups]]
    first: dict[int, int] = {}
    for group in labels:
        first.setdefault(group, len(first))
    order = sorted(range(len(labels)), key=lambda row: first[labels[row]])
    size = len(labels) // len(batches)

    def deal(values: list) -> list:
        if isinstance(values[0], Tensor) and values[0].ndim:
            return list(torch.cat(values)[torch.tensor(order, device=values[0].device)].split(size))
        if isinstance(values[0], list):
            rows = [row for part in values for row in part]
            return [[rows[row] for row in order[start : start + size]] for start in range(0, len(rows), size)]
        return values

    columns = {name: deal([batch[name] for batch in batches]) for name in batches[0]}
    return [{name: parts[index] for name, parts in columns.items()} for index in range(len(batches))]
