"""Models: loading, packed passes, scores of tokens and sequences, and one base under several adapters."""

from trl_ext.models.loading import load_policy, resolve_model_path
from trl_ext.models.packing import Packing, packing_of, share_prefixes
from trl_ext.models.scoring import response_log_probs, score_responses, score_sequences, token_entropy
from trl_ext.models.shared_backbone import SharedBackbone
from trl_ext.models.tokens import completion_mask, tokenize_prompt_and_output

__all__ = [
    "Packing",
    "SharedBackbone",
    "completion_mask",
    "load_policy",
    "packing_of",
    "resolve_model_path",
    "response_log_probs",
    "score_responses",
    "score_sequences",
    "share_prefixes",
    "token_entropy",
    "tokenize_prompt_and_output",
]
