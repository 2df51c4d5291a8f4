"""Prompts for small pretrained models, with requirements on the response that functions check."""

from trl_ext.instructions.scoring import DATA_DIR, requirements_met, score, score_parts, score_row

# Sample with this limit: an answer that meets its requirements ends well within it.
MAX_NEW_TOKENS = 96

__all__ = ["DATA_DIR", "MAX_NEW_TOKENS", "requirements_met", "score", "score_parts", "score_row"]
