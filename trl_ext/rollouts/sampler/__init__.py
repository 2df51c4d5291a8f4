"""Fast sampling on a CPU, under any decoder of transformers with standard attention."""

from trl_ext.rollouts.sampler.hook import Sampler, evaluation_sampler, fast_rollouts, sampler_of

__all__ = ["Sampler", "evaluation_sampler", "fast_rollouts", "sampler_of"]
