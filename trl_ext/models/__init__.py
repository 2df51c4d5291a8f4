"""Models: where they are loaded from, and log-probabilities of given texts."""

from trl_ext.models.loading import resolve_model_path
from trl_ext.models.log_probs import score_responses
from trl_ext.models.sequence_scores import score_sequences

__all__ = ["resolve_model_path", "score_responses", "score_sequences"]
