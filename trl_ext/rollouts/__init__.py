"""Rollouts: responses sampled from a model."""

from trl_ext.rollouts.engines import SamplingSettings, TransformersEngine, VLLMEngine
from trl_ext.rollouts.entropy import response_entropies
from trl_ext.rollouts.generation import Generation, generate_responses
from trl_ext.rollouts.sharding import end_processes, map_over_ranks

__all__ = [
    "Generation",
    "SamplingSettings",
    "TransformersEngine",
    "VLLMEngine",
    "end_processes",
    "generate_responses",
    "map_over_ranks",
    "response_entropies",
]
