"""Data: schemas and a checked loader for benchmark rows, truncation, math problems, templates and packing."""

from __future__ import annotations

from trl_ext.data.benchmark import load_benchmark
from trl_ext.data.conversation import encode_turn
from trl_ext.data.schemas import PreferenceRow, PromptRow, UnpairedRow
from trl_ext.data.truncation import truncate_pair
from trl_ext.names import lazy_names

# Imported on first use: packing imports torch.
_MODULE_OF_NAME = {
    "PackedSFTDataset": "trl_ext.data.packed_sft",
    "load_math": "trl_ext.data.math",
    "load_prompt_template": "trl_ext.data.templates",
}

__all__ = [
    "PreferenceRow",
    "PromptRow",
    "UnpairedRow",
    "encode_turn",
    "load_benchmark",
    "truncate_pair",
    *_MODULE_OF_NAME,
]
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF_NAME)
