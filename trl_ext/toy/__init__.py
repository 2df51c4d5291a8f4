"""The embedded toy setup: a tiny language model and a small graded benchmark, on which methods train in a minute."""

from pathlib import Path

from trl_ext.toy.prompts import kind_of
from trl_ext.toy.scoring import score, score_parts

MODEL_DIR = Path(__file__).parent / "model"
DATA_DIR = Path(__file__).parent / "data"
# Sample with this limit: every good answer ends well within it.
MAX_NEW_TOKENS = 48

__all__ = ["DATA_DIR", "MAX_NEW_TOKENS", "MODEL_DIR", "kind_of", "score", "score_parts"]
