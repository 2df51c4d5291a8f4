"""Judging a candidate's responses against a base's: many questions at once, none lost and none paid for twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.evaluation.judge import Judgement, PairwiseJudge, Verdict, pair_outcome
from trl_ext.evaluation.judging.cache import VerdictCache, verdict_key
from trl_ext.evaluation.judging.prices import Usage
from trl_ext.evaluation.judging.run import JudgingRun, Question, as_judgement
from trl_ext.evaluation.win_rate import PairOutcome

# What the row of a comparison says that was not asked about.
EMPTY = "empty response"
IDENTICAL = "identical responses"
# Its error, where the run stopped before both of its questions were answered.
NOT_ASKED = "not asked: too many rows before it could not be judged"


@dataclass(frozen=True)
class JudgingResult:
    """What judging a candidate against a base brought.

    Attributes:
        outcomes: one per row, in order, for `win_rate`.
        usage: calls, tokens and dollars of this run, and what came from the cache.
        verdicts: one JSON-ready dictionary per row, with the judge's answer in both orders, or the `reason` why it
            was not asked.
    """

    outcomes: list[PairOutcome]
    usage: Usage
    verdicts: list[dict[str, Any]]


class TooManyErrors(ValueError):
    """Raised when more rows than allowed could not be judged; `result` holds those that were."""

    def __init__(self, message: str, result: JudgingResult):
        super().__init__(message)
        self.result = result


class CallableJudge:
    """A function `f(prompt, response_a, response_b) -> "A" | "B" | "tie" | Judgement` as a judge."""

    def __init__(self, function: Callable[..., Verdict | Judgement]):
        self.judge = function


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

    For judges that take their time and cost money: several questions are asked at once, a question that occurs twice
    is asked once, and every verdict is in `cache` as soon as it is there, so that a run that ends early goes on where
    it was.

    Two kinds of rows are not asked about. One whose candidate response is empty is lost. One whose responses are
    identical is a tie of no use: as a pass would name the same label in both orders, or tag it `near_identical`, it
    leaves `agreed` and is half a win under `half`; in `agreement_rate` it counts as agreement.

    Args:
        judge: a judge, or a function `f(prompt, response_a, response_b)`. It is called from several threads, unless it
            has a true attribute `sequential`.
        rows: prompt rows with `row_id` and `prompt`.
        candidate, base: one response for each row, in the same order.
        candidate_finished, base_finished: False where a response was cut at the token limit; default: all ended.
        cache: file of verdicts; made if it is missing. Several processes may share it. Judges whose verdicts cost
            nothing do not use it.
        max_concurrency: questions that may be open at once.
        max_error_fraction: share of the rows that may remain without a judgement; the run stops at the first beyond.
        progress: what a progress bar calls the work; None for no bar.

    Raises:
        TooManyErrors: more rows than `max_error_fraction` have an error; what was judged is in the cache.
        KeyboardInterrupt: it says how many verdicts are in the cache.
        JudgeUnavailable: the judge answers no question at all; what was judged is in the cache.
        CacheError: a verdict could not be written; the run stops.
        ValueError: the lengths differ, an argument is out of range, or an answer of the judge is no verdict.
    """
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
    if not 0 <= max_error_fraction <= 1:
        raise ValueError(f"max_error_fraction must lie between 0 and 1, got {max_error_fraction}")
    judge = judge if hasattr(judge, "judge") else CallableJudge(judge)
    rows = list(rows)
    passes = make_questions(judge, rows, candidate, base, candidate_finished, base_finished)
    questions = distinct_questions(passes)
    rows_of = _rows_of(passes)

    def too_many(errors: Collection[str]) -> bool:
        failed = {index for key in errors for index in rows_of[key]}
        return len(failed) > 0 and len(failed) / len(rows) > max_error_fraction

    with open_cache(judge, cache) as store:
        run = JudgingRun(judge, store, max_concurrency, progress, too_many)
        try:
            run.ask_all(questions)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_kept(run, len(questions), store)) from None
    result = _collect(rows, passes, run)
    errors = run.errors if run.stopped_by is None else run.stopped_by
    if too_many(errors):
        failed = sorted({index for key in errors for index in rows_of[key]})
        raise TooManyErrors(_failure(rows, passes, run, failed, max_error_fraction, store), result)
    return result


def make_questions(
    judge: PairwiseJudge,
    rows: Sequence[Mapping[str, Any]],
    candidate: Sequence[str],
    base: Sequence[str],
    candidate_finished: Sequence[bool] | None = None,
    base_finished: Sequence[bool] | None = None,
) -> list[tuple[Question, Question] | PairOutcome]:
    """The questions on every row, with the candidate's response first and with the base's.

    The outcome itself where there is nothing to ask: the candidate's response is empty, or both are the same to this
    judge.
    """
    flags = {
        "candidate_finished": [True] * len(rows) if candidate_finished is None else candidate_finished,
        "base_finished": [True] * len(rows) if base_finished is None else base_finished,
    }
    columns = {"candidate": candidate, "base": base, **flags}
    for name, values in columns.items():
        if len(values) != len(rows):
            raise ValueError(f"{name}: has {len(values)} entries for {len(rows)} rows; give one for each row")
    identity = getattr(judge, "identity", None) or {"kind": type(judge).__name__}
    uses_finished = getattr(judge, "uses_finished", False)

    def question(row: Mapping[str, Any], first: tuple[str, bool], second: tuple[str, bool]) -> Question:
        # A judge that sees whether a response ended may judge the same texts otherwise.
        asked = {**identity, "finished": [first[1], second[1]]} if uses_finished else identity
        key = verdict_key(asked, row["prompt"], first[0], second[0])
        return Question(key, row["row_id"], row["prompt"], first[0], second[0], bool(first[1]), bool(second[1]))

    passes: list[tuple[Question, Question] | PairOutcome] = []
    for row, own, other, own_ended, other_ended in zip(rows, *columns.values(), strict=True):
        shown = (own, own_ended), (other, other_ended)
        if not own.strip():
            # What `win_rate` reads of it is `empty` alone.
            passes.append(PairOutcome(row["row_id"], "base", "base", empty=True))
        elif own == other and (bool(own_ended) == bool(other_ended) or not uses_finished):
            passes.append(PairOutcome(row["row_id"], "tie", "tie", usable=False))
        else:
            passes.append((question(row, *shown), question(row, *shown[::-1])))
    return passes


def distinct_questions(passes: Iterable[tuple[Question, Question] | PairOutcome]) -> list[Question]:
    """The questions to ask, each once."""
    pairs = (pair for pair in passes if not isinstance(pair, PairOutcome))
    return list({question.key: question for pair in pairs for question in pair}.values())


def open_cache(judge: PairwiseJudge, path: str | Path | None):
    """The cache of a judge's verdicts, as a context; it holds None without a path, or for verdicts that cost nothing.

    Raises:
        ValueError: the judge does not say what its verdicts depend on.
    """
    if path is None or (hasattr(judge, "identity") and judge.identity is None):
        return contextlib.nullcontext()
    if not hasattr(judge, "identity"):
        raise ValueError(
            f"cache={str(path)!r} needs a judge with an attribute `identity`, a dictionary of what verdicts depend on "
            "such as {'kind': 'mine', 'model': 'its-name'}: give it one, or leave the cache out"
        )
    return VerdictCache(path)


def _collect(rows: list[Mapping[str, Any]], passes: list, run: JudgingRun) -> JudgingResult:
    outcomes, verdicts = [], []
    for row, pair in zip(rows, passes, strict=True):
        if isinstance(pair, PairOutcome):
            outcomes.append(pair)
            verdicts.append(_verdict_row(pair, reason=EMPTY if pair.empty else IDENTICAL))
            continue
        answers = [run.answers.get(question.key) for question in pair]
        errors = [run.errors[question.key] for question in pair if question.key in run.errors]
        if None in answers:
            outcome = PairOutcome(row["row_id"], None, None, error=errors[0] if errors else NOT_ASKED)
        else:
            outcome = pair_outcome(row["row_id"], *map(as_judgement, answers))
        outcomes.append(outcome)
        verdicts.append(_verdict_row(outcome, *answers))
    return JudgingResult(outcomes, run.usage, verdicts)


def _verdict_row(
    outcome: PairOutcome, first: dict | None = None, second: dict | None = None, *, reason: str | None = None
) -> dict[str, Any]:
    judged = outcome.error is None
    return {
        "row_id": outcome.row_id,
        "outcome": None if not judged else outcome.first if outcome.first == outcome.second else "disagree",
        "usable": outcome.usable if judged else None,
        "error": outcome.error,
        "empty": outcome.empty,
        "reason": reason,
        "candidate_first": _answer_alone(first),
        "base_first": _answer_alone(second),
    }


def _answer_alone(record: dict[str, Any] | None) -> dict[str, Any] | None:
    # The row_id in a record is that of the row that asked first.
    return None if record is None else {name: value for name, value in record.items() if name not in ("key", "row_id")}


def _rows_of(passes: list[tuple[Question, Question] | PairOutcome]) -> dict[str, list[int]]:
    """By key, the places of the rows that a question decides: more than one where rows repeat."""
    rows_of: dict[str, list[int]] = {}
    for index, pair in enumerate(passes):
        for question in () if isinstance(pair, PairOutcome) else pair:
            rows_of.setdefault(question.key, []).append(index)
    return rows_of


def _kept(run: JudgingRun, asked: int, store: VerdictCache | None) -> str:
    """How much of a run that was interrupted need not be done again."""
    if store is None:
        return "no verdict is kept, since there is no cache of them: run again"
    return f"{len(run.answers)} of {asked} verdicts are kept in {store.path}, and the same command goes on from there"


def _failure(
    rows: list[Mapping[str, Any]],
    passes: list,
    run: JudgingRun,
    failed: list[int],
    max_error_fraction: float,
    store: VerdictCache | None,
) -> str:
    """What `TooManyErrors` says, in one line."""
    stopped = "" if run.stopped_by is None else ", so that the run stopped"
    count = len(run.answers)
    saved = f"; {count} verdicts are kept in {store.path}, and the next run goes on from there" if store else ""
    reason = next(run.errors[question.key] for question in passes[failed[0]] if question.key in run.errors)
    return (
        f"{len(failed)} of {len(rows)} rows could not be judged, more than the share of {max_error_fraction:g} that "
        f"max_error_fraction allows{stopped}{saved}; the first: row_id {rows[failed[0]]['row_id']}: {reason}"
    )
