"""Packed forward passes: rows without padding, and common prefixes encoded once."""

from trl_ext.models.packing.plan import Plan, plan_batch
from trl_ext.models.packing.wrap import (
    Packing,
    last_tokens,
    may_draw,
    packed_inputs,
    packing_obstacle,
    packing_of,
    share_prefixes,
    sliding_window,
    unwrapped,
)

__all__ = [
    "Packing",
    "Plan",
    "last_tokens",
    "may_draw",
    "packed_inputs",
    "packing_obstacle",
    "packing_of",
    "plan_batch",
    "share_prefixes",
    "sliding_window",
    "unwrapped",
]
