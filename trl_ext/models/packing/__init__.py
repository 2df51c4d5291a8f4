"""Packed forward passes: rows without padding, and common prefixes encoded once."""

from trl_ext.models.packing.hook import Packing, last_tokens, packed_inputs, packing_of, share_prefixes

__all__ = ["Packing", "last_tokens", "packed_inputs", "packing_of", "share_prefixes"]
