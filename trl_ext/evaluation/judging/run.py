"""One run of a judge over many questions: threads, the cache, and when to stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm.auto import tqdm

from trl_ext.evaluation.judging.protocol import JudgeError, Judgement, JudgeUnavailable, Messages, PairwiseJudge, Usage

if TYPE_CHECKING:
    from trl_ext.evaluation.judging.cache import VerdictCache

# Consecutive server failures after which the run stops; at least `max_concurrency`.
FAILURES_IN_A_ROW = 4
# How long a run that ends early waits for the answers to open questions.
GRACE_SECONDS = 5.0


class Question(NamedTuple):
    """One row in one order: which of two responses is better?"""

    key: str
    row_id: str
    prompt: Messages | str
    response_a: str
    response_b: str
    finished_a: bool = True
    finished_b: bool = True


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

    @property
    def _workers(self) -> int:
        return 1 if getattr(self.judge, "sequential", False) else self.max_concurrency

    @property
    def _stopped(self) -> bool:
        # A failing server explains more than the number of failed rows does.
        return not self._failures_in_a_row and len(self._failed_rows) > self.max_errors

    def ask_all(self, questions: Sequence[Question]) -> None:
        """Fill `answers` and `errors`. After an interrupt or an error, the answers to open questions are still kept.

        Raises:
            JudgeUnavailable, CacheError: as in `judge_pairs`.
            Exception: any other exception from the judge.
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
        try:
            if hasattr(self.judge, "ask"):
                return self.judge.ask(*shown)
            uses_finished = getattr(self.judge, "uses_finished", False)
            finished = {"finished_a": question.finished_a, "finished_b": question.finished_b} if uses_finished else {}
            answer = self.judge.judge(*shown, **finished)
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
            tokens = {name: getattr(usage, name) for name in ("input_tokens", "cached_input_tokens", "output_tokens")}
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
