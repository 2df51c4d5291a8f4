"""Evaluation on held-out rows during and after training."""

from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
from trl_ext.held_out.table import GenerationTableCallback

__all__ = ["GenerationEvaluation", "GenerationSettings", "GenerationTableCallback"]
