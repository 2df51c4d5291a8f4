"""The graded task of the embedded benchmark: `score` a response, explain it with `score_parts`, name its kind."""

from __future__ import annotations

from trl_ext.toy.prompts import kind_of, parse
from trl_ext.toy.scoring import grade

__all__ = ["kind_of", "score", "score_parts"]


def score_parts(prompt: str, response: str, *, finished: bool = True) -> dict[str, float]:
    """Return the named parts of a score: credits are positive, penalties negative.

    Args:
        prompt: the text of the user message. A text that is not a prompt of the benchmark raises `ValueError`.
        response: the text of the response, without special tokens.
        finished: False for a response that was cut at the token limit, before its end token. It then earns no credit
            for its ending and loses a further 0.2; surplus words and items cost the same as otherwise.
    """
    return grade(parse(prompt), response, finished)


def score(prompt: str, response: str, *, finished: bool = True) -> float:
    """Grade a response in [0, 1]: the sum of `score_parts`, clipped to the interval. An empty response scores 0."""
    # Rounding removes floating-point error (0.6 + 0.2 + 0.2 differs from 1), so that equal answers tie exactly.
    return round(min(1.0, max(0.0, sum(score_parts(prompt, response, finished=finished).values()))), 9)
