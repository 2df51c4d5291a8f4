"""Fast sampling on a CPU, under any decoder of transformers with standard attention."""

from trl_ext.rollouts.sampler.hook import Sampler, fast_rollouts, sampled_fast, sampler_of

__all__ = ["Sampler", "fast_rollouts", "sampled_fast", "sampler_of"]
