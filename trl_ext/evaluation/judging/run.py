"""The threads that put questions to a judge and write every verdict down as it arrives."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trl_ext.evaluation.judge import (
    JudgeError,
    Judgement,
    JudgeUnavailable,
    Messages,
    PairwiseJudge,
    ask_judge,
)
from trl_ext.evaluation.judging.cache import CacheError, VerdictCache
from trl_ext.evaluation.judging.prices import Usage

# While another process asks the same question, seconds between looks at whether it is answered.
LOOK_AGAIN = 0.1
# Failures of the server in a row, with no answer between them, after which the run stops; at least `max_concurrency`.
FAILURES_IN_A_ROW = 4


@dataclass(frozen=True)
class Question:
    """One pass over one row: which of two responses is better, shown in this order."""

    key: str
    row_id: str
    prompt: Messages | str
    response_a: str
    response_b: str
    finished_a: bool = True
    finished_b: bool = True


class JudgingRun:
    """Asks questions until all are answered or have failed.

    A judge with a method `ask` is given the event that ends the run and the semaphore that bounds its open requests,
    and returns its judgement with what it cost. Others are called as `PairwiseJudge` says.

    Args:
        judge: the judge.
        cache: where verdicts are kept; None for nowhere.
        max_concurrency: questions that may be open at once.
        progress: what a progress bar calls the work; None for no bar.
        too_many: whether the questions of these keys are more than may fail; the run then stops.

    Attributes:
        answers: by key, what was answered, as it stands in the cache.
        errors: by key, why there is no answer.
        stopped_by: the keys whose failures stopped the run; None if they were not too many.
        usage: what this run has cost so far.
    """

    def __init__(
        self,
        judge: PairwiseJudge,
        cache: VerdictCache | None,
        max_concurrency: int,
        progress: str | None = None,
        too_many: Callable[[Collection[str]], bool] | None = None,
    ):
        self.judge = judge
        self.cache = cache
        self.stopped_by: tuple[str, ...] | None = None
        self.answers: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.usage = Usage()
        self._progress = progress
        self._concurrency = 1 if getattr(judge, "sequential", False) else max_concurrency
        self._slots = threading.Semaphore(self._concurrency)
        self._pending: deque[tuple[float, Question]] = deque()
        self._unsaved: list[dict[str, Any]] = []
        self._write_error: CacheError | None = None
        self._failures_in_a_row = 0
        self._too_many = too_many
        self._has_new_errors = False
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def ask_all(self, questions: Sequence[Question]) -> None:
        """Fill `answers` and `errors`; on an interrupt, or an error that ends the run, open questions are awaited.

        Raises:
            JudgeUnavailable: the judge answers no question.
            CacheError: a verdict could not be written.
            Exception: whatever else the judge raised.
        """
        if hasattr(self.judge, "prepare"):
            responses = [(q.prompt, q.response_a, q.finished_a) for q in questions]
            responses += [(q.prompt, q.response_b, q.finished_b) for q in questions]
            self.judge.prepare(responses, progress=self._progress)
        self._pending.extend((0.0, question) for question in questions)
        # More threads than may have a question open: while some read and write, the others keep the judge busy.
        threads = min(len(questions), self._concurrency + (self._concurrency + 1) // 2 * (self._concurrency > 1))
        with self._progress_bar(len(questions)) as self._bar:
            if self._concurrency == 1 and self.cache is None:
                # No answer need be awaited to be written down, and a judge may depend on the thread that it is in.
                self._work()
            else:
                self._work_in_threads(threads)
        if self._failure is not None:
            raise self._failure

    def _work_in_threads(self, count: int) -> None:
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException:
            self._stop.set()
            for worker in workers:
                worker.join()
            raise
        finally:
            self._save_again()

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if not self._pending:
                    return
                not_before, question = self._pending.popleft()
            if self._stop.wait(max(0.0, not_before - time.monotonic())):
                return
            try:
                self._settle(question)
            except BaseException as error:
                self._fail(error)

    def _settle(self, question: Question) -> None:
        """Answer a question from the cache or by the judge, or put it back while another process asks it."""
        if self.cache is None:
            self._ask(question)
            return
        record = self.cache.get(question.key)
        if record is None:
            if not self.cache.claim(question.key):
                self.cache.refresh()
                with self._lock:
                    self._pending.append((time.monotonic() + LOOK_AGAIN, question))
                return
            try:
                # Whoever held the claim before has written the verdict down.
                self.cache.refresh()
                record = self.cache.get(question.key)
                if record is None:
                    self._ask(question)
            finally:
                self.cache.release(question.key)
        if record is not None:
            self._record(question, record, Usage(cached=1, dollars=0.0, cached_dollars=record.get("dollars")))

    def _ask(self, question: Question) -> None:
        try:
            judgement, usage = self._call(question)
        except JudgeError as error:
            self._record_error(question, error)
            return
        record = _as_record(question, judgement, usage)
        if self.cache is not None:
            try:
                self.cache.append(record)
            except CacheError as error:
                with self._lock:
                    self._unsaved.append(record)
                    self._write_error = error
                raise
        self._record(question, record, usage)
        if self.cache is not None:
            self.cache.check_flushed()

    def _call(self, question: Question) -> tuple[Judgement, Usage]:
        shown = question.response_a, question.response_b
        if hasattr(self.judge, "ask"):
            return self.judge.ask(question.prompt, *shown, stop=self._stop, slots=self._slots)
        row = {"row_id": question.row_id, "prompt": question.prompt}
        with self._slots:
            if self._stop.is_set():
                raise JudgeError("stopped before it was asked", usage=Usage())
            return ask_judge(self.judge, row, *shown, question.finished_a, question.finished_b), Usage(calls=1)

    def _record(self, question: Question, record: dict[str, Any], usage: Usage) -> None:
        with self._lock:
            self.answers[question.key] = record
            self.usage += usage
            self._failures_in_a_row = 0
            self._stop_if_too_many()
            self._show_progress()

    def _record_error(self, question: Question, error: JudgeError) -> None:
        reason = str(error) or type(error).__name__
        with self._lock:
            self.errors[question.key] = reason
            self.usage += replace(error.usage or Usage(calls=1), errors=1)
            self._failures_in_a_row = self._failures_in_a_row + 1 if error.server_failed else 0
            in_a_row = self._failures_in_a_row
            self._has_new_errors = True
            self._stop_if_too_many()
            self._show_progress()
        if in_a_row == max(FAILURES_IN_A_ROW, self._concurrency):
            raise JudgeUnavailable(
                f"stopped after {in_a_row} failures in a row, the last on row_id {question.row_id}: {reason}; "
                "what was judged before is in the cache, if there is one: run again when this is mended"
            )

    def _stop_if_too_many(self) -> None:
        """Stop once enough questions have failed; not while the server itself fails, which says more of the cause."""
        if self._too_many is None or not self._has_new_errors or self._failures_in_a_row or self._stop.is_set():
            return
        self._has_new_errors = False
        if self._too_many(self.errors):
            self.stopped_by = tuple(self.errors)
            self._stop.set()

    def _fail(self, error: BaseException) -> None:
        """End the run with its first error; what is open is awaited, and written down."""
        with self._lock:
            self._failure = self._failure or error
        self._stop.set()

    def _save_again(self) -> None:
        """Try once more to write what could not be written, else into a temporary file, since it is paid for."""
        if not self._unsaved:
            return
        still = []
        for record in self._unsaved:
            try:
                self.cache.append(record)
            except CacheError:
                still.append(record)
        what = f"{len(still)} verdicts are lost" if still else "all verdicts are saved now"
        if still:
            with suppress(OSError):
                what = f"{len(still)} verdicts that it has no room for lie in {_rescue(still)}: append them to it"
        problem = f"{self.cache.path} cannot be written to: {self._write_error.strerror}"
        self._failure = CacheError(f"{problem}; {what}; make room and run again")

    def _progress_bar(self, total: int):
        if self._progress is None:
            return nullcontext()
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=self._progress, leave=False)

    def _show_progress(self) -> None:
        if self._bar is not None:
            if self.usage.dollars:
                self._bar.set_postfix_str(f"${self.usage.dollars:.2f}", refresh=False)
            self._bar.update()


def as_judgement(record: dict[str, Any]) -> Judgement:
    """The judgement in a record of the cache."""
    fields = {name: record[name] for name in Judgement._fields if name in record}
    return Judgement(**fields | {"exclusion_tags": tuple(fields.get("exclusion_tags", ()))})


def _as_record(question: Question, judgement: Judgement, usage: Usage) -> dict[str, Any]:
    cost = {"input_tokens": usage.input_tokens, "cached_input_tokens": usage.cached_input_tokens}
    cost |= {"output_tokens": usage.output_tokens, "dollars": usage.dollars}
    fields = judgement._asdict() | {"exclusion_tags": list(judgement.exclusion_tags)}
    return {"key": question.key, "row_id": question.row_id, **fields, **cost}


def _rescue(records: list[dict[str, Any]]) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="verdicts-", suffix=".jsonl")
    os.close(descriptor)
    cache = VerdictCache(name)
    try:
        for record in records:
            cache.append(record)
    finally:
        with suppress(CacheError):  # a flush that fails leaves them in the file nevertheless
            cache.close()
    return Path(name)
