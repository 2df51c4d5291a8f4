"""The rows of a submission: responses to prompts and scores of pairs, read with the location of each fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, FiniteFloat, NonNegativeInt, ValidationError

from trl_ext.data.rows import first_error, first_few, read_jsonl
from trl_ext.evaluation.statistics.win_rate import System
from trl_ext.files import brief

RowType = TypeVar("RowType", bound=BaseModel)


class ResponseRow(BaseModel, strict=True):
    """The fields of a row of responses, beside its row_id."""

    prompt_text: str
    response_text: str
    generated_num_tokens: NonNegativeInt


class ScoreRow(BaseModel, strict=True):
    """The fields of a row of scores, beside its row_id."""

    chosen_score: FiniteFloat
    rejected_score: FiniteFloat


class HumanLabel(BaseModel, strict=True):
    """The fields of a row of human labels, beside its row_id: the system that a person prefers."""

    outcome: System


@dataclass(frozen=True)
class Response:
    """A submitted response.

    Attributes:
        row_id: the prompt's row_id.
        text: the response.
        tokens: number of generated tokens, including the end token.
        max_new_tokens: the token limit.
    """

    row_id: str
    text: str
    tokens: int
    max_new_tokens: int

    @property
    def finished(self) -> bool:
        """False if truncated at the limit. This includes a response whose end token was the last one allowed."""
        return self.tokens < self.max_new_tokens


class RowProblem(NamedTuple):
    """A fault in a row of a submission: the row, if it has a row_id, and whether it prevents grading the file."""

    row_id: str | None
    message: str
    fatal: bool = True

    def __str__(self) -> str:
        return brief(self.message if self.row_id is None else f"row_id {brief(self.row_id)}: {self.message}", 200)


def read_rows(
    path: str | Path, row_type: type[RowType], row_ids: Sequence[str], *, complete: bool = True
) -> tuple[dict[str, RowType], list[RowProblem]]:
    """Read the rows of a JSONL file by their row_id: the good ones, and the problems, all of them fatal.

    `row_type` has a row's fields, and `row_ids` are the rows that the file may hold, all of them if `complete`.
    """
    split = read_jsonl(path)
    problems = [RowProblem(None, f"line {line}: {message}") for line, message in split.problems]
    wanted, rows, line_of = set(row_ids), {}, {}
    for line, row in split.rows:
        row_id = str(row.get("row_id"))
        if row_id not in wanted:
            problems.append(RowProblem(row_id, f"line {line}: foreign: none of the {len(row_ids)} rows"))
        elif row_id in line_of:
            problems.append(RowProblem(row_id, f"duplicate: on lines {line_of[row_id]} and {line}"))
        else:
            line_of[row_id] = line
            try:
                rows[row_id] = row_type.model_validate(row)
            except ValidationError as error:
                problems.append(RowProblem(row_id, f"line {line}: {first_error(error)}"))
    if complete:
        problems += [RowProblem(row_id, "missing") for row_id in row_ids if row_id not in line_of]
    return rows, problems


def read_responses(
    path: str | Path, prompts: Sequence[Mapping[str, Any]], *, max_new_tokens: int
) -> tuple[list[Response], list[RowProblem]]:
    """Read `row_id, prompt_text, response_text, generated_num_tokens` for every prompt.

    Args:
        path: a JSONL file.
        prompts: rows with `row_id` and `prompt_text`.
        max_new_tokens: maximum number of tokens in a response.

    Returns:
        Responses in the order of the prompts, and problems. If a problem is fatal, responses may be missing. An empty
        response is a non-fatal problem.
    """
    rows, problems = read_rows(path, ResponseRow, [row["row_id"] for row in prompts])
    responses = []
    for prompt in prompts:
        row_id = prompt["row_id"]
        if row_id not in rows:
            continue
        text, tokens = rows[row_id].response_text, rows[row_id].generated_num_tokens
        responses.append(Response(row_id, text, tokens, max_new_tokens))
        if rows[row_id].prompt_text != prompt["prompt_text"]:
            problems.append(RowProblem(row_id, "prompt_text is not the benchmark's for this row_id"))
        elif tokens > max_new_tokens:
            message = f"over the token budget of {max_new_tokens}: generated_num_tokens is {tokens}"
            problems.append(RowProblem(row_id, message))
        elif not text.strip():
            problems.append(RowProblem(row_id, "the response is empty", fatal=False))
    return responses, problems


def read_pair_scores(
    path: str | Path, row_ids: Sequence[str]
) -> tuple[tuple[list[float], list[float]], list[RowProblem]]:
    """Read `row_id, chosen_score, rejected_score` for every pair.

    Returns:
        The chosen and the rejected scores of the good rows in the order of `row_ids`, and problems, all of them fatal.
    """
    rows, problems = read_rows(path, ScoreRow, row_ids)
    good = [rows[row_id] for row_id in row_ids if row_id in rows]
    return ([row.chosen_score for row in good], [row.rejected_score for row in good]), problems


def read_human_labels(path: str | Path, row_ids: Sequence[str]) -> dict[str, System]:
    """Read `row_id, outcome` of the prompts that a person has judged; outcomes by row_id.

    Raises:
        ValueError: the file is empty, or a row is foreign, a duplicate or wrong.
    """
    rows, problems = read_rows(path, HumanLabel, row_ids, complete=False)
    refuse_fatal(path, problems)
    if not rows:
        raise ValueError(f"{path}: the file is empty")
    return {row_id: row.outcome for row_id, row in rows.items()}


def refuse_fatal(path: str | Path, problems: Iterable[RowProblem]) -> None:
    """Raise ValueError if any problem of a file is fatal, with the first five in one line."""
    if fatal := [str(problem) for problem in problems if problem.fatal]:
        raise ValueError(f"{path}: {first_few(fatal)}")
