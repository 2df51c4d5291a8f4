"""The setting `packing` of the trainers, and the order of responses by which packed passes encode prompts once."""

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
    elif trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        reason = "packing has not been tried under FSDP 1"
    elif getattr(trainer.model.config, "output_router_logits", False):
        reason = "the loss of its router counts padding (output_router_logits)"
    if reason is None:
        compiles = getattr(trainer.args, "compile_layers", False)
        if compiles and (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
            compiles = False
            warn_once_per_run("compile_layers: off, the hooks of DeepSpeed and FSDP on the layers cannot be compiled")
        return share_prefixes(*models, compile_layers=compiles)
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


def regroup(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Redistribute the rows of micro-batches of equal size so that rows of one `group` are consecutive.

    Groups, and the rows within each, keep the order in which they first appear, and so stay as random as the input.
    Micro-batches with images are returned as they are, since the patches of images are not rows.
    """
    if "num_images" in batches[0]:
        return batches
    groups = torch.cat([batch["group"] for batch in batches]).tolist()
    first: dict[int, int] = {}
    for row, group in enumerate(groups):
        first.setdefault(group, row)
    order = torch.tensor(sorted(range(len(groups)), key=lambda row: first[groups[row]]))
    columns = {}
    for name, value in batches[0].items():
        columns[name] = [batch[name] for batch in batches]
        if isinstance(value, Tensor) and value.ndim:
            rows = torch.cat(columns[name])
            columns[name] = rows[order.to(rows.device)].split(len(value))
    return [{name: parts[index] for name, parts in columns.items()} for index in range(len(batches))]
