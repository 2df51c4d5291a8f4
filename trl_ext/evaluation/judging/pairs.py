"""Judging a candidate's responses against a base's, in both orders, with concurrent questions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm

from trl_ext.evaluation.judging.protocol import (
    JudgeError,
    Judgement,
    JudgeUnavailable,
    Messages,
    PairwiseJudge,
    Usage,
    Verdict,
)
from trl_ext.evaluation.statistics.win_rate import PairOutcome, System

if TYPE_CHECKING:
    from trl_ext.evaluation.judging.cache import VerdictCache

# Consecutive server failures after which the run stops; at least `max_concurrency`.
FAILURES_IN_A_ROW = 4
# How long a run that ends early waits for the answers to open questions.
GRACE_SECONDS = 5.0


class JudgingResult(NamedTuple):
    """The result of judging a candidate against a base.

    Attributes:
        outcomes: one per row, in order, for `win_rate`.
        usage: calls and tokens of this run, and verdicts from the cache.
        verdicts: one JSON-ready dictionary per row, with the judge's answer in both orders, or the `reason` why it was
            not asked.
    """

    outcomes: list[PairOutcome]
    usage: Usage
    verdicts: list[dict[str, Any]]


class TooManyErrors(ValueError):
    """Raised when more rows than allowed could not be judged."""


class CallableJudge:
    """A function `f(prompt, response_a, response_b) -> "A" | "B" | "tie" | Judgement` as a judge."""

    def __init__(self, function: Callable[..., Verdict | Judgement]):
        self.judge = function
        # What `judge_pairs` reads from a judge.
        for name in ("identity", "sequential"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))


def judge_pairs(
    judge: PairwiseJudge | Callable[..., Verdict | Judgement],
    rows: Iterable[Mapping[str, Any]],
    candidate: Sequence[str],
    base: Sequence[str],
    *,
    candidate_finished: Sequence[bool] | None = None,
    base_finished: Sequence[bool] | None = None,
    cache: str | Path | None = None,
    max_concurrency: int = 8,
    max_error_fraction: float = 0.1,
    progress: str | None = None,
) -> JudgingResult:
    """Judge the candidate's response against the base's on every prompt, in both orders.

    Several questions run concurrently, and duplicate questions are asked once. Every verdict is written to `cache`
    before its thread asks the next question, so the same call resumes after a kill.

    Two kinds of rows are not asked about. A row with an empty candidate response is lost. A row with identical
    responses is a tie and not usable: it is excluded from `agreed`, is half a win under `half`, and counts as
    agreement in `agreement_rate`.

    Args:
        judge: a judge, or a function `f(prompt, response_a, response_b)`. It is called from several threads, unless it
            has a true attribute `sequential`.
        rows: prompt rows with `row_id` and `prompt`.
        candidate, base: one response for each row, in the same order.
        candidate_finished, base_finished: False if a response was truncated at the token limit; default: all finished.
        cache: file of verdicts; created if missing. Several processes may share it, but a question that two of them
            ask at the same time is paid for twice. Judges whose verdicts cost nothing do not use it.
        max_concurrency: maximum number of concurrent questions; with 1, all are asked in this thread.
        max_error_fraction: share of rows that may remain without a judgement; the run stops when it is exceeded.
        progress: label of the progress bar; None for no bar.

    Raises:
        TooManyErrors: more rows than `max_error_fraction` have an error; the cache holds the verdicts so far.
        JudgeUnavailable: the judge cannot answer any question; the cache holds the verdicts so far.
        CacheError: a verdict could not be written; the run stops.
        ValueError: the lengths differ, `max_error_fraction` is out of range, or an answer is not a verdict.
    """
    if not 0 <= max_error_fraction <= 1:
        raise ValueError(f"max_error_fraction must lie between 0 and 1, got {max_error_fraction}")
    judge = judge if hasattr(judge, "judge") else CallableJudge(judge)
    rows = list(rows)
    passes = make_questions(judge, rows, candidate, base, candidate_finished, base_finished)
    # A share such as 0.29 of 100 rows is 29, up to rounding.
    max_errors = math.floor(max_error_fraction * len(rows) + 1e-9)
    with open_cache(judge, cache) as store:
        run = JudgingRun(judge, store, max_concurrency, max_errors, progress)
        run.ask_all(distinct_questions(passes))
    judged = [run.judged(row["row_id"], pair) for row, pair in zip(rows, passes, strict=True)]
    failed = [outcome for outcome, _ in judged if outcome.error]
    if len(failed) > max_errors:
        raise TooManyErrors(
            f"{len(failed)} of {len(rows)} rows could not be judged, more than the share of {max_error_fraction:g} "
            f"that max_error_fraction allows; the first: row_id {failed[0].row_id}: {failed[0].error}"
        )
    return JudgingResult([outcome for outcome, _ in judged], run.usage, [verdict for _, verdict in judged])


class Question(NamedTuple):
    """One row in one order: which of two responses is better?"""

    key: str
    row_id: str
    prompt: Messages | str
    response_a: str
    response_b: str
    finished_a: bool = True
    finished_b: bool = True


def make_questions(
    judge: PairwiseJudge,
    rows: Sequence[Mapping[str, Any]],
    candidate: Sequence[str],
    base: Sequence[str],
    candidate_finished: Sequence[bool] | None = None,
    base_finished: Sequence[bool] | None = None,
) -> list[tuple[Question, Question] | PairOutcome]:
    """The two questions on every row: candidate's response first, and base's first.

    Returns the outcome instead if there is nothing to ask: the candidate's response is empty, or both responses are
    the same to this judge.
    """
    all_finished = [True] * len(rows)
    systems = (
        zip(texts, all_finished if finished is None else map(bool, finished), strict=True)
        for texts, finished in ((candidate, candidate_finished), (base, base_finished))
    )
    identity = getattr(judge, "identity", None) or {"kind": type(judge).__name__}
    uses_finished = getattr(judge, "uses_finished", False)

    def question(row: Mapping[str, Any], first: tuple[str, bool], second: tuple[str, bool]) -> Question:
        # A judge that sees whether a response finished may judge equal texts differently.
        asked = {**identity, "finished": [first[1], second[1]]} if uses_finished else identity
        text = json.dumps([asked, row["prompt"], first[0], second[0]], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        return Question(key, row["row_id"], row["prompt"], first[0], second[0], first[1], second[1])

    passes: list[tuple[Question, Question] | PairOutcome] = []
    for row, own, other in zip(rows, *systems, strict=True):
        if not own[0].strip():
            # `win_rate` reads only `empty` from it.
            passes.append(PairOutcome(row["row_id"], "base", "base", empty=True))
        elif own[0] == other[0] and (own[1] == other[1] or not uses_finished):
            passes.append(PairOutcome(row["row_id"], "tie", "tie", usable=False))
        else:
            passes.append((question(row, own, other), question(row, other, own)))
    return passes


def distinct_questions(passes: Iterable[tuple[Question, Question] | PairOutcome]) -> list[Question]:
    """The questions to ask, without duplicates."""
    pairs = (pair for pair in passes if not isinstance(pair, PairOutcome))
    return list({question.key: question for pair in pairs for question in pair}.values())


def open_cache(judge: PairwiseJudge, path: str | Path | None):
    """A context manager for the cache of a judge's verdicts; None without a path, or if verdicts cost nothing.

    Raises:
        ValueError: the judge does not declare what its verdicts depend on.
    """
    if path is None or getattr(judge, "identity", ()) is None:
        return nullcontext()
    if not hasattr(judge, "identity"):
        raise ValueError(
            f"cache={str(path)!r} needs a judge with an attribute `identity`, a dictionary of what verdicts depend on "
            "such as {'kind': 'mine', 'model': 'its-name'}: give it one, or leave the cache out"
        )
    # Not every build of Python has sqlite3, and most judges do not need it.
    from trl_ext.evaluation.judging.cache import VerdictCache

    return VerdictCache(path)


@dataclass
class JudgingRun:
    """Asks questions until all have been answered or have failed, or more than `max_errors` rows have failed.

    Threads only call the judge. The calling thread keeps the records and writes the cache.

    Attributes:
        answers: the record of each answer, by key, as stored in the cache.
        errors: the reason for each missing answer, by key.
        usage: usage of this run so far.
    """

    judge: PairwiseJudge
    cache: VerdictCache | None
    max_concurrency: int
    max_errors: int
    progress: str | None = None
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    usage: Usage = Usage()
    _failures_in_a_row: int = 0
    _failed_rows: set[str] = field(default_factory=set)

    def __post_init__(self):
        self._workers = 1 if getattr(self.judge, "sequential", False) else self.max_concurrency
        self._uses_finished = getattr(self.judge, "uses_finished", False)

    @property
    def _stopped(self) -> bool:
        # A failing server explains more than the number of failed rows does.
        return not self._failures_in_a_row and len(self._failed_rows) > self.max_errors

    def ask_all(self, questions: Sequence[Question]) -> None:
        """Fill `answers` and `errors`; raises what `judge_pairs` does, and any other exception from the judge.

        After an interrupt or an error, the answers to open questions are still kept.
        """
        if hasattr(self.judge, "prepare"):
            responses = [(q.prompt, q.response_a, q.finished_a) for q in questions]
            responses += [(q.prompt, q.response_b, q.finished_b) for q in questions]
            self.judge.prepare(responses, progress=self.progress)
        no_bar = self.progress is None
        with tqdm(total=len(questions), desc=self.progress, leave=False, disable=no_bar) as self._bar:
            unanswered = self._unanswered(questions)
            if self._workers == 1:
                for question in unanswered:
                    self._take(question, self._ask(question))
            else:
                self._ask_in_threads(unanswered)

    def _ask_in_threads(self, unanswered: Iterator[Question]) -> None:
        open_questions: dict[Future, Question] = {}
        pool = ThreadPoolExecutor(self._workers)
        try:
            while not self._stopped:
                for question in islice(unanswered, self._workers - len(open_questions)):
                    open_questions[pool.submit(self._ask, question)] = question
                if not open_questions:
                    break
                for future in wait(open_questions, return_when=FIRST_COMPLETED).done:
                    self._take(open_questions.pop(future), future.result())
        finally:
            # The open questions are already paid for. The first error is more informative than later ones.
            for future in wait(open_questions, timeout=GRACE_SECONDS).done:
                with suppress(Exception):
                    self._take(open_questions[future], future.result())
            # A request that waits to be sent again cannot be interrupted.
            pool.shutdown(wait=False, cancel_futures=True)

    def _unanswered(self, questions: Iterable[Question]) -> Iterator[Question]:
        """Questions that are not in the cache at the moment they would be asked."""
        for question in questions:
            if self._stopped:
                return
            record = None if self.cache is None else self.cache.get(question.key)
            if record is None:
                yield question
            else:
                self._record(question, record, Usage(cached=1))

    def _ask(self, question: Question) -> tuple[Judgement, Usage] | JudgeError:
        shown = question.prompt, question.response_a, question.response_b
        finished = {"finished_a": question.finished_a, "finished_b": question.finished_b}
        try:
            if hasattr(self.judge, "ask"):
                return self.judge.ask(*shown)
            answer = self.judge.judge(*shown, **(finished if self._uses_finished else {}))
        except JudgeError as error:
            return error
        judgement = answer if isinstance(answer, Judgement) else Judgement(answer)
        if judgement.verdict not in ("A", "B", "tie"):
            name, verdict = type(self.judge).__name__, judgement.verdict
            raise ValueError(f"row_id {question.row_id}: {name} must answer 'A', 'B' or 'tie', got {verdict!r}")
        return judgement, Usage(calls=1)

    def _take(self, question: Question, outcome: tuple[Judgement, Usage] | JudgeError) -> None:
        """Save an answer before anything else is asked, or count a failure."""
        if not isinstance(outcome, JudgeError):
            judgement, usage = outcome
            tokens = {name: getattr(usage, name) for name in ("input_tokens", "output_tokens")}
            record = judgement._asdict() | {"exclusion_tags": list(judgement.exclusion_tags)} | tokens
            if self.cache is not None:
                self.cache.add(question.key, record)
            self._record(question, record, usage)
            return
        self.errors[question.key] = reason = str(outcome) or type(outcome).__name__
        self._failed_rows.add(question.row_id)
        self.usage += replace(outcome.usage or Usage(calls=1), errors=1)
        self._failures_in_a_row = self._failures_in_a_row + 1 if outcome.server_failed else 0
        self._bar.update()
        if self._failures_in_a_row >= max(FAILURES_IN_A_ROW, self._workers):
            raise JudgeUnavailable(
                f"stopped after {self._failures_in_a_row} failures in a row, the last on row_id {question.row_id}: "
                f"{reason}; run again when this is fixed: a cache keeps the verdicts that came before"
            )

    def _record(self, question: Question, record: dict[str, Any], usage: Usage) -> None:
        self.answers[question.key] = record
        self.usage += usage
        self._failures_in_a_row = 0
        self._bar.update()

    def judged(self, row_id: str, pair: tuple[Question, Question] | PairOutcome) -> tuple[PairOutcome, dict[str, Any]]:
        """The outcome of one row and its verdicts; in the first question the candidate's response is A."""
        first, second, reason = None, None, None
        if isinstance(pair, PairOutcome):
            outcome, reason = pair, "empty response" if pair.empty else "identical responses"
        else:
            first, second = (self.answers.get(question.key) for question in pair)
            if first is None or second is None:
                errors = [self.errors[question.key] for question in pair if question.key in self.errors]
                # A run that ended because of other rows has no error of this one.
                outcome = PairOutcome(row_id, None, None, error=next(iter(errors), ""))
            else:
                systems: dict[Verdict, System] = {"A": "candidate", "B": "base", "tie": "tie"}
                swapped: dict[Verdict, System] = {"A": "base", "B": "candidate", "tie": "tie"}
                usable = first["usable"] and second["usable"]
                outcome = PairOutcome(row_id, systems[first["verdict"]], swapped[second["verdict"]], usable=usable)
        is_judged = outcome.error is None
        return outcome, {
            "row_id": row_id,
            "outcome": None if not is_judged else outcome.first if outcome.first == outcome.second else "disagree",
            "usable": outcome.usable if is_judged else None,
            "error": outcome.error,
            "empty": outcome.empty,
            "reason": reason,
            "candidate_first": first,
            "base_first": second,
        }
