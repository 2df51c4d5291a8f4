"""Extract the answer of a LaTeX solution from its last `\\boxed{}`."""

from __future__ import annotations

import re

ESCAPE_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
SPACED_BOX = re.compile(r"\\boxed\s+\{")
# Without braces, TeX boxes a single token, but authors mean the whole formula that follows.
BARE_BOX = re.compile(r"\\boxed(?![A-Za-z{])\s*([^\s$]+)")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; None if there is no box, or the last has no brace or is not closed."""
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("{", start + len("\\boxed")):
        return None
    first = position = start + len("\\boxed{")
    depth = 1
    for match in ESCAPE_OR_BRACE.finditer(text, position):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[first : match.start()]
    return None


def boxed_answer(solution: str) -> str | None:
    """The boxed answer of a written solution: `last_boxed`, or for `\\boxed 5$` the text before `$` or a space.

    Returns:
        The answer, or None if there is none or it is empty.
    """
    solution = SPACED_BOX.sub(r"\\boxed{", solution)
    bare = BARE_BOX.match(solution, max(solution.rfind("\\boxed"), 0))
    answer = bare[1].rstrip(".,;") if bare else last_boxed(solution)
    return answer.strip() or None if answer else None
