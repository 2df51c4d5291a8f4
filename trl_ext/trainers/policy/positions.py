"""Positions of left-padded prompts for models with absolute positions, such as GPT-2."""

from __future__ import annotations

import inspect

from torch import nn

from trl_ext.models.packing import packing_of


def count_from_the_first_token(*models: nn.Module) -> None:
    """Make passes for log-probabilities count positions from each row's first token, as generation does.

    TRL pads prompts on the left and passes no positions, so a model with learnt absolute positions would score its
    samples at different positions than in generation. Models with rotary positions are left as they are, since only
    position differences matter there. Packed passes set their own positions.
    """
    for model in models:
        if getattr(model.config.get_text_config(), "rope_parameters", None):
            continue
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if "position_ids" in inspect.signature(base.forward).parameters:
            model.register_forward_pre_hook(_name_positions, with_kwargs=True)


def _name_positions(model, args, kwargs):
    packing, mask = packing_of(model), kwargs.get("attention_mask")
    is_packed = packing is not None and packing.active
    if is_packed or not kwargs.get("fused_lm_head") or mask is None or kwargs.get("position_ids") is not None:
        return None
    return args, {**kwargs, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
