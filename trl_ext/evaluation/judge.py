"""Judging responses in pairs: what a judge is, a judge by a known score, and the comparison in both orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from trl_ext.evaluation.win_rate import PairOutcome, System

Verdict = Literal["A", "B", "tie"]
Messages = Sequence[Mapping[str, str]]


class Judgement(NamedTuple):
    """A verdict with the judge's opinion on whether the comparison is fit to be counted."""

    verdict: Verdict
    usable: bool = True


class JudgeError(Exception):
    """Raised by a judge that cannot judge one row, such as after a failed request; `compare` records it."""


class PairwiseJudge(Protocol):
    """Says which of two responses to a prompt is better.

    `prompt` is a list of messages, or a string in TRL's plain format. A judge that rates usability returns a
    `Judgement`. One with a true attribute `uses_finished` is also given the keywords `finished_a` and `finished_b`:
    False for a response that was cut at the token limit.
    """

    def judge(self, prompt: Messages | str, response_a: str, response_b: str) -> Verdict | Judgement: ...


class GroundTruthJudge:
    """Prefers the response with the higher score, for tasks whose score is known.

    Args:
        score_function: `f(prompt_text, response) -> float` on the text of the last user message; it must take the
            keyword `finished` if responses may be cut. Default: the score of the toy benchmark.
        tolerance: scores that differ by no more than this are a tie.
    """

    uses_finished = True

    def __init__(self, score_function: Callable[..., float] | None = None, tolerance: float = 1e-9):
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        if score_function is None:
            from trl_ext.toy import score as score_function
        self.score_function = score_function
        self.tolerance = tolerance

    def judge(
        self,
        prompt: Messages | str,
        response_a: str,
        response_b: str,
        *,
        finished_a: bool = True,
        finished_b: bool = True,
    ) -> Verdict:
        prompt_text = last_user_text(prompt)
        difference = self._score(prompt_text, response_a, finished_a) - self._score(
            prompt_text, response_b, finished_b
        )
        if abs(difference) <= self.tolerance:
            return "tie"
        return "A" if difference > 0 else "B"

    def _score(self, prompt_text: str, response: str, finished: bool) -> float:
        # Only where it matters, so that a score without the keyword serves for responses that all ended.
        keywords = {} if finished else {"finished": False}
        score = float(self.score_function(prompt_text, response, **keywords))
        if not math.isfinite(score):
            raise ValueError(f"score_function returned {score} for the prompt {prompt_text[:80]!r}; expected a number")
        return score


def last_user_text(prompt: Messages | str) -> str:
    """The text of a prompt's last user message, or a plain prompt itself."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message["role"] == "user":
            return message["content"]
    raise ValueError("the prompt has no user message")


def compare(
    judge: PairwiseJudge,
    rows: Iterable[Mapping[str, Any]],
    candidate: Sequence[str],
    base: Sequence[str],
    *,
    candidate_finished: Sequence[bool] | None = None,
    base_finished: Sequence[bool] | None = None,
) -> list[PairOutcome]:
    """Judge the candidate's response against the base's on every prompt, in both orders.

    Args:
        judge: the judge; its `JudgeError` on a row is recorded in the outcome, any other exception is not caught.
        rows: prompt rows with `row_id` and `prompt`, as `load_benchmark` returns them.
        candidate, base: one response for each row, in the same order.
        candidate_finished, base_finished: False where a response was cut at the token limit; default: all ended. Only
            judges that use the flags see them.

    Returns:
        One outcome for each row, in order.

    Raises:
        ValueError: the lengths differ, or the judge returned something that is no verdict.
    """
    rows = list(rows)
    arguments = {
        "candidate": candidate,
        "base": base,
        "candidate_finished": [True] * len(rows) if candidate_finished is None else candidate_finished,
        "base_finished": [True] * len(rows) if base_finished is None else base_finished,
    }
    for name, values in arguments.items():
        if len(values) != len(rows):
            raise ValueError(f"{name}: has {len(values)} entries for {len(rows)} rows; give one for each row")
    return [_compare_row(judge, row, *values) for row, *values in zip(rows, *arguments.values(), strict=True)]


def _compare_row(
    judge: PairwiseJudge,
    row: Mapping[str, Any],
    candidate: str,
    base: str,
    candidate_finished: bool,
    base_finished: bool,
) -> PairOutcome:
    row_id, empty = row["row_id"], not candidate.strip()
    try:
        first = _ask(judge, row, candidate, base, candidate_finished, base_finished)
        second = _ask(judge, row, base, candidate, base_finished, candidate_finished)
    except JudgeError as error:
        return PairOutcome(row_id, None, None, error=str(error) or type(error).__name__, empty=empty)
    return PairOutcome(
        row_id,
        first=_system(first.verdict, shown_first="candidate", shown_second="base"),
        second=_system(second.verdict, shown_first="base", shown_second="candidate"),
        usable=first.usable and second.usable,
        empty=empty,
    )


def _ask(
    judge: PairwiseJudge,
    row: Mapping[str, Any],
    response_a: str,
    response_b: str,
    finished_a: bool,
    finished_b: bool,
) -> Judgement:
    uses_finished = getattr(judge, "uses_finished", False)
    keywords = {"finished_a": finished_a, "finished_b": finished_b} if uses_finished else {}
    answer = judge.judge(row["prompt"], response_a, response_b, **keywords)
    judgement = answer if isinstance(answer, Judgement) else Judgement(answer)
    if judgement.verdict not in ("A", "B", "tie"):
        name = type(judge).__name__
        raise ValueError(f"row_id {row['row_id']}: {name} must answer 'A', 'B' or 'tie', got {judgement.verdict!r}")
    return judgement


def _system(verdict: Verdict, *, shown_first: System, shown_second: System) -> System:
    return {"A": shown_first, "B": shown_second, "tie": "tie"}[verdict]
