"""Prompts for small pretrained models, with requirements on the response that functions check."""

from pathlib import Path

from trl_ext.instructions.scoring import requirements_met, score, score_parts

DATA_DIR = Path(__file__).parent / "data"
# Sample with this limit: an answer that meets its requirements ends well within it.
MAX_NEW_TOKENS = 160

__all__ = ["DATA_DIR", "MAX_NEW_TOKENS", "requirements_met", "score", "score_parts"]
