"""Judging responses in pairs: what a judge is, a judge by a known score, and the comparison in both orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from trl_ext.evaluation.win_rate import PairOutcome, System

if TYPE_CHECKING:
    from trl_ext.evaluation.judging.prices import Usage

Verdict = Literal["A", "B", "tie"]
Messages = Sequence[Mapping[str, str]]


class Judgement(NamedTuple):
    """A verdict and what the judge said about it; all but the verdict is optional.

    Attributes:
        verdict: the better response.
        usable: False if the judge finds the comparison unfit to be counted.
        worst: the worse response; the same as `verdict` if the judge named one label for both.
        confidence: in [0, 1].
        strength: by how much the better response is better, 1 to 5.
        quality: how good an example the comparison is, 1 to 5.
        exclusion_tags: reasons to exclude the comparison.
        reason: the judge's, in a sentence or two.
    """

    verdict: Verdict
    usable: bool = True
    worst: Verdict | None = None
    confidence: float | None = None
    strength: int | None = None
    quality: int | None = None
    exclusion_tags: tuple[str, ...] = ()
    reason: str | None = None


class JudgeError(Exception):
    """Raised by a judge that cannot judge one row, such as after a failed request; it is recorded with the row.

    Attributes:
        usage: what the failed attempts cost, where the judge counts it.
        server_failed: True if there was no answer at all, rather than one that is no verdict. When many in a row are
            of that kind the cause is not in the rows.
    """

    def __init__(self, message: str = "", *, usage: Usage | None = None, server_failed: bool = False):
        super().__init__(message)
        self.usage = usage
        self.server_failed = server_failed


class JudgeUnavailable(ValueError):
    """Raised when asking on is pointless: the key is refused, the model is unknown, the quota is spent."""


# A judge that names one response as both the best and the worst finds neither good.
ALL_WEAK = "all_weak"


def normalised(judgement: Judgement) -> Judgement:
    """The judgement with `usable` and `quality` made to agree with its tags and labels.

    Any exclusion tag makes it unusable, of quality 2 at most. One label for best and worst makes it unusable, of
    quality 1 at most, and adds the tag `all_weak`; the verdict stays the best label.
    """
    tags, limit = judgement.exclusion_tags, 5
    if judgement.worst == judgement.verdict:
        tags = tags if ALL_WEAK in tags else (*tags, ALL_WEAK)
        limit = 1
    elif tags:
        limit = 2
    quality = None if judgement.quality is None else min(judgement.quality, limit)
    return judgement._replace(exclusion_tags=tags, usable=judgement.usable and not tags, quality=quality)


class PairwiseJudge(Protocol):
    """Says which of two responses to a prompt is better.

    `prompt` is a list of messages, or a string in TRL's plain format. A judge that rates usability returns a
    `Judgement`. One with a true attribute `uses_finished` is also given the keywords `finished_a` and `finished_b`:
    False for a response that was cut at the token limit.

    For `judge_pairs`, which calls it from several threads: a true attribute `sequential` has it called from one, and
    an attribute `identity` lets verdicts be kept in a cache on disk. That is a JSON-ready dictionary of whatever a
    verdict depends on beside the question, or None for verdicts that cost nothing.
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
    sequential = True
    identity = None

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
    """Judge the candidate's response against the base's on every prompt, in both orders, one question after another.

    As `judge_pairs`, without a cache and without a limit of errors: a row whose candidate response is empty is lost,
    equal responses are a tie, and neither is asked about; a question that occurs twice is asked once.

    Args:
        judge: the judge, called from this thread; its `JudgeError` on a row is recorded in the outcome, any other
            exception is not caught.
        rows: prompt rows with `row_id` and `prompt`, as `load_benchmark` returns them.
        candidate, base: one response for each row, in the same order.
        candidate_finished, base_finished: False where a response was cut at the token limit; default: all ended. Only
            judges that use the flags see them.

    Returns:
        One outcome for each row, in order.

    Raises:
        JudgeUnavailable: the judge answers no question at all.
        ValueError: the lengths differ, or the judge returned something that is no verdict.
    """
    from trl_ext.evaluation.judging.pairs import judge_pairs

    finished = {"candidate_finished": candidate_finished, "base_finished": base_finished}
    return judge_pairs(judge, rows, candidate, base, **finished, max_concurrency=1, max_error_fraction=1).outcomes


def pair_outcome(row_id: str, first: Judgement, second: Judgement) -> PairOutcome:
    """The outcome of one row: `first` with the candidate's response shown as A, `second` with the base's."""
    return PairOutcome(
        row_id,
        first=_system(first.verdict, shown_first="candidate", shown_second="base"),
        second=_system(second.verdict, shown_first="base", shown_second="candidate"),
        usable=first.usable and second.usable,
    )


def ask_judge(
    judge: PairwiseJudge,
    row: Mapping[str, Any],
    response_a: str,
    response_b: str,
    finished_a: bool,
    finished_b: bool,
) -> Judgement:
    """One pass over one row; raises ValueError if the judge's answer is no verdict."""
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
