"""Who grades a response: one of the verified rewards, by name, on the rows that problems are loaded as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trl_ext.registry import nearest
from trl_ext.rewards.verified import ANSWER_READERS, ANSWER_REWARDS, KINDS, countdown_reward

# f(response, row) -> `reward`, `format_reward` and `answer_reward`, each 0 or 1.
Grader = Callable[[str, Mapping[str, Any]], dict[str, float]]


@dataclass(frozen=True)
class VerifiedGrader:
    """One of the verified rewards on rows of `trl_ext.data.math.load_math`; made by `grader`."""

    kind: str
    fast: bool

    def __call__(self, response: str, row: Mapping[str, Any]) -> dict[str, float]:
        """`reward`, `format_reward` and `answer_reward` of a response, each 0 or 1."""
        if self.kind == "countdown":
            return _countdown(response, row)
        return ANSWER_REWARDS[self.kind](response, row["answer"], fast=self.fast)

    def parsed_answer(self, response: str) -> str | None:
        """The answer that the reward reads out of a response; None where there is none."""
        return ANSWER_READERS[self.kind](response)


def grader(kind: str = "r1_zero", *, fast: bool = True) -> VerifiedGrader:
    """A function that grades a response to a row of `trl_ext.data.math.load_math`.

    Args:
        kind: `r1_zero` (tags), `question_only` (a box), `gsm8k` (the last number), or `countdown` (tags around an
            expression of given numbers).
        fast: False to ask math-verify about answers that string and value do not settle.

    Raises:
        ValueError: there is no such kind, or math-verify is asked for and not installed.
    """
    if kind not in KINDS:
        raise ValueError(
            f"the reward must be one of {', '.join(KINDS)}, got {kind!r}{nearest(str(kind), list(KINDS))}"
        )
    if not fast:
        from trl_ext.rewards.time_limit import require_math_verify

        require_math_verify()
    return VerifiedGrader(kind, fast)


def name_of(grade: Grader) -> str:
    """What a grader is called where runs are compared: one of `grader` by its settings, another by its function."""
    return (
        repr(grade) if isinstance(grade, VerifiedGrader) else getattr(grade, "__qualname__", type(grade).__qualname__)
    )


def _countdown(response: str, row: Mapping[str, Any]) -> dict[str, float]:
    if "numbers" not in row:
        raise ValueError(
            f"row_id {row['row_id']}: no numbers; the reward countdown is for rows with numbers and target"
        )
    return countdown_reward(response, row["numbers"], row["answer"])
