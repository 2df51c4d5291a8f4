"""Data: schemas and a checked loader for benchmark rows, truncation, math problems, templates and packing."""

from __future__ import annotations

from trl_ext.names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".benchmark": "load_benchmark",
        ".conversation": "encode_turn",
        ".math": "load_math",
        ".packed_sft": "PackedSFTDataset",
        ".schemas": "PreferenceRow PromptRow UnpairedRow",
        ".templates": "load_prompt_template",
        ".truncation": "truncate_pair",
    },
)
