"""Models: where they are loaded from, log-probabilities of given texts, and one base under many adapters."""

from trl_ext.models.loading import resolve_model_path
from trl_ext.models.log_probs import score_responses
from trl_ext.models.sequence_scores import score_sequences
from trl_ext.models.shared_backbone import SharedBackbone

__all__ = ["SharedBackbone", "resolve_model_path", "score_responses", "score_sequences"]
