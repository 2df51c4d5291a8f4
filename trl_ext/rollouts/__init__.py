"""Rollouts: responses sampled from a model."""

from trl_ext.processes import end_processes, map_over_ranks
from trl_ext.rollouts.best_of_n import best_of_n, demonstrations, kl_bound, pick_best
from trl_ext.rollouts.generation import (
    Generation,
    SamplingSettings,
    TransformersEngine,
    VLLMEngine,
    generate_responses,
    response_entropies,
)
from trl_ext.rollouts.responses import load_engine, sample_responses
from trl_ext.rollouts.sampler import fast_rollouts

__all__ = ["Generation", "SamplingSettings", "TransformersEngine", "VLLMEngine", "best_of_n", "demonstrations"]
__all__ += ["end_processes", "fast_rollouts", "generate_responses", "kl_bound", "load_engine", "map_over_ranks"]
__all__ += ["pick_best", "response_entropies", "sample_responses"]
