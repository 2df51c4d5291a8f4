"""Data: schemas and a checked loader for benchmark rows, truncation, math problems and templates."""

from __future__ import annotations

from trl_ext.names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".benchmark": "load_benchmark",
        ".conversation": "encode_turn",
        ".math": "load_math load_prompt_template",
    },
)
