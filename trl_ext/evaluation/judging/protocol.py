"""The interface of a pairwise judge: its call, its verdict, its errors and its usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Verdict = Literal["A", "B", "tie"]
Messages = Sequence[Mapping[str, str]]


class Judgement(NamedTuple):
    """A verdict, the better response, and the judge's details about it.

    Attributes:
        usable: False if the judge considers the comparison unfit to be counted.
        worst: the worse response; the same as `verdict` if the judge named one label for both.
        confidence: in [0, 1].
        strength: how much better the better response is, 1 to 5.
        quality: quality of the comparison as an example, 1 to 5.
        exclusion_tags: reasons to exclude the comparison.
    """

    verdict: Verdict
    usable: bool = True
    worst: Verdict | None = None
    confidence: float | None = None
    strength: int | None = None
    quality: int | None = None
    exclusion_tags: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Usage:
    """How often a judge was called, and the tokens.

    Attributes:
        calls: questions sent, including repeats after an answer without a verdict, but not the client's own retries.
        cached: verdicts taken from the cache.
        retries: the part of `calls` that repeated a question.
        errors: questions that ended without a verdict.
        input_tokens, output_tokens: as counted by the server; output includes reasoning.
    """

    calls: int = 0
    cached: int = 0
    retries: int = 0
    errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


class JudgeError(Exception):
    """Raised by a judge that cannot judge one row, for example after a failed request. It is recorded with the row.

    Attributes:
        usage: usage of the failed attempts, if the judge counts it.
        server_failed: True if the likely cause is the server or the model, not the row. Many such consecutive errors
            stop the run.
    """

    def __init__(self, message: str = "", *, usage: Usage | None = None, server_failed: bool = False):
        super().__init__(message)
        self.usage = usage
        self.server_failed = server_failed


class JudgeUnavailable(ValueError):
    """Raised when no question could be answered: a rejected key, an unknown model, or an exhausted quota."""


class PairwiseJudge(Protocol):
    """Decides which of two responses to a prompt is better.

    `prompt` is a list of messages, or a string in TRL's plain format. A judge with a true attribute `uses_finished`
    also receives the keywords `finished_a` and `finished_b`, False for a response truncated at the token limit.

    `judge_pairs` calls a judge from several threads unless `sequential` is true. It caches verdicts if `identity` is a
    JSON-ready dictionary of everything that a verdict depends on other than the question; None if they cost nothing.
    """

    def judge(self, prompt: Messages | str, response_a: str, response_b: str) -> Verdict | Judgement: ...


def last_user_text(prompt: Messages | str) -> str:
    """The text of a prompt's last user message, or a plain prompt itself."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message["role"] == "user":
            return message["content"]
    raise ValueError("the prompt has no user message")
