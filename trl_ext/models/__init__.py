"""Models: loading, packed passes, log-probabilities of texts, and one base under several adapters."""

from __future__ import annotations

from trl_ext.names import lazy_names

# Some modules import torch, so they are imported when their names are used.
__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".loading": "load_policy resolve_model_path",
        ".log_probs": "score_responses",
        ".packing": "Packing packing_of share_prefixes",
        ".sequence_scores": "score_sequences",
        ".shared_backbone": "SharedBackbone",
        ".tokenization": "completion_mask response_log_probs token_entropy tokenize_prompt_and_output",
    },
)
