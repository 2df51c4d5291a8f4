"""Rollouts: responses sampled from a model."""

from trl_ext.rollouts.best_of_n import BestOfN, best_of_n, demonstrations, kl_bound, pick_best
from trl_ext.rollouts.engines import SamplingSettings, TransformersEngine, VLLMEngine
from trl_ext.rollouts.entropy import response_entropies
from trl_ext.rollouts.generation import Generation, generate_responses
from trl_ext.rollouts.sampler import fast_rollouts
from trl_ext.rollouts.sharding import end_processes, map_over_ranks

__all__ = [
    "BestOfN",
    "Generation",
    "SamplingSettings",
    "TransformersEngine",
    "VLLMEngine",
    "best_of_n",
    "demonstrations",
    "end_processes",
    "fast_rollouts",
    "generate_responses",
    "kl_bound",
    "map_over_ranks",
    "pick_best",
    "response_entropies",
]
