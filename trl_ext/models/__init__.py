"""Models: loading, packed passes, log-probabilities of texts, and one base under several adapters."""

from __future__ import annotations

from trl_ext.models.loading import resolve_model_path
from trl_ext.names import lazy_names

# These import torch, so they load on first use.
_MODULE_OF_NAME = {
    "Packing": "trl_ext.models.packing",
    "SharedBackbone": "trl_ext.models.shared_backbone",
    "completion_mask": "trl_ext.models.tokenization",
    "packing_of": "trl_ext.models.packing",
    "response_log_probs": "trl_ext.models.tokenization",
    "score_responses": "trl_ext.models.log_probs",
    "score_sequences": "trl_ext.models.sequence_scores",
    "share_prefixes": "trl_ext.models.packing",
    "token_entropy": "trl_ext.models.tokenization",
    "tokenize_prompt_and_output": "trl_ext.models.tokenization",
}

__all__ = ["resolve_model_path", *_MODULE_OF_NAME]
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF_NAME)
