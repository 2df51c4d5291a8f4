"""Benchmark rows: their schemas, the loader that checks them, and the truncation of prompts and responses."""

from trl_ext.data.benchmark import load_benchmark
from trl_ext.data.conversation import encode_turn
from trl_ext.data.schemas import PreferenceRow, PromptRow
from trl_ext.data.truncation import truncate_pair

__all__ = ["PreferenceRow", "PromptRow", "encode_turn", "load_benchmark", "truncate_pair"]
