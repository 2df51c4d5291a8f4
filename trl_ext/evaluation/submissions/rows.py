"""The rows of a submission: responses to prompts and scores of pairs, read with the location of each fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.data.rows import SHOWN_CHARACTERS, first_few, read_jsonl
from trl_ext.files import brief

# A text may not tokenize back into the same tokens; a count from the text may be off by this many.
RECOUNT_SLACK = 4
EMPTY_FILE = "the file is empty"
SHOWN_PROBLEMS = 5
# Longer than any token of any vocabulary, so that a text beyond this can be rejected without tokenizing it.
MAX_CHARACTERS_PER_TOKEN = 1000


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


@dataclass(frozen=True)
class RowProblem:
    """A fault in a row of a submission.

    Attributes:
        file: the file.
        row_id: the row; None if it has no row_id.
        message: the fault and, if helpful, its line.
        fatal: whether it prevents grading the file.
    """

    file: str
    row_id: str | None
    message: str
    fatal: bool = True

    def __str__(self) -> str:
        row = "" if self.row_id is None else f"row_id {brief(self.row_id)}: "
        return f"{self.file}: {row}{brief(self.message, 200)}"


def read_responses(
    path: str | Path,
    prompts: Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int,
    count_tokens: Callable[[str], int] | None = None,
) -> tuple[list[Response], list[RowProblem]]:
    """Read `row_id, prompt_text, response_text, generated_num_tokens` for every prompt.

    Args:
        path: a JSONL file.
        prompts: rows with `row_id` and `prompt_text`.
        max_new_tokens: maximum number of tokens in a response.
        count_tokens: counts the tokens of a text, to check the numbers in the rows; None for no check.

    Returns:
        Responses in the order of the prompts, and problems. If a problem is fatal, responses may be missing. An empty
        response is a non-fatal problem.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    rows, problems = _read_rows(path, [row["row_id"] for row in prompts], "prompts")
    file, responses = str(path), []
    for prompt in prompts:
        row = rows.get(prompt["row_id"])
        if row is None:
            continue
        found = list(_response_problems(row, prompt["prompt_text"], max_new_tokens, count_tokens))
        problems += [RowProblem(file, prompt["row_id"], message, fatal) for message, fatal in found]
        if not any(fatal for _, fatal in found):
            responses.append(
                Response(prompt["row_id"], row["response_text"], row["generated_num_tokens"], max_new_tokens)
            )
    return responses, problems


def read_pair_scores(
    path: str | Path, row_ids: Sequence[str]
) -> tuple[tuple[list[float], list[float]], list[RowProblem]]:
    """Read `row_id, chosen_score, rejected_score` for every pair.

    Returns:
        The chosen and the rejected scores in the order of `row_ids`, and problems, all of them fatal.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    rows, problems = _read_rows(path, row_ids, "pairs")
    chosen, rejected = [], []
    for row_id in row_ids:
        if row_id not in rows:
            continue
        scores = [rows[row_id].get(name) for name in ("chosen_score", "rejected_score")]
        for name, score in zip(("chosen_score", "rejected_score"), scores, strict=True):
            if not _is_finite(score):
                problems.append(RowProblem(str(path), row_id, f"{name} must be a finite number, {_found(score)}"))
        chosen.append(scores[0])
        rejected.append(scores[1])
    return (chosen, rejected), problems


def refuse_fatal(problems: Iterable[RowProblem]) -> None:
    """Raise ValueError if any problem is fatal, with the first five of each file in one line, and its path once."""
    by_file: dict[str, list[str]] = {}
    for problem in problems:
        if problem.fatal:
            by_file.setdefault(problem.file, []).append(str(problem))
    if by_file:
        limit = SHOWN_CHARACTERS // len(by_file)
        raise ValueError("; ".join(in_one_line(file, lines, limit) for file, lines in by_file.items()))


def in_one_line(file: str, problems: Sequence[str], limit: int = SHOWN_CHARACTERS) -> str:
    """The first five of a file's problems as text, in about `limit` characters, with the file's name once."""
    return f"{file}: {first_few([problem.removeprefix(f'{file}: ') for problem in problems], limit)}"


def response_row(prompt: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any]:
    """One row of a file of responses."""
    return {
        "row_id": prompt["row_id"],
        "prompt_text": prompt["prompt_text"],
        "response_text": text,
        "generated_num_tokens": tokens,
    }


def _read_rows(
    path: str | Path, row_ids: Iterable[str], what: str
) -> tuple[dict[str, dict[str, Any]], list[RowProblem]]:
    """Rows by row_id, and the problems with the row_ids of the file."""
    file, path, row_ids = str(path), Path(path), list(row_ids)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    split = read_jsonl(path)
    problems = [RowProblem(file, None, f"line {bad.position}: {bad.message}") for bad in split.problems]
    if not split.rows and not problems and row_ids:
        return {}, [RowProblem(file, None, EMPTY_FILE)]
    wanted, rows, line_of = set(row_ids), {}, {}
    for line, row in split.rows:
        row_id = row.get("row_id")
        if isinstance(row_id, int) and not isinstance(row_id, bool):
            row_id = str(row_id)
        if not isinstance(row_id, str) or not row_id:
            problems.append(RowProblem(file, None, f"line {line}: row_id must be a text, {_found(row_id)}"))
        elif row_id not in wanted:
            problems.append(RowProblem(file, row_id, f"line {line}: foreign: none of the {len(row_ids)} {what}"))
        elif row_id in rows:
            problems.append(RowProblem(file, row_id, f"duplicate: on lines {line_of[row_id]} and {line}"))
        else:
            rows[row_id], line_of[row_id] = row, line
    problems += [RowProblem(file, row_id, "missing") for row_id in row_ids if row_id not in rows]
    return rows, problems


def _response_problems(
    row: Mapping[str, Any], prompt_text: str, max_new_tokens: int, count_tokens: Callable[[str], int] | None
) -> Iterator[tuple[str, bool]]:
    text, tokens = row.get("response_text"), row.get("generated_num_tokens")
    if row.get("prompt_text") != prompt_text:
        yield "prompt_text is not the benchmark's for this row_id", True
    if not isinstance(text, str):
        yield f"response_text must be a text, {_found(text)}", True
    elif len(text) > MAX_CHARACTERS_PER_TOKEN * max_new_tokens:
        yield f"over the token budget: the text has {len(text)} characters, for {max_new_tokens} tokens", True
        return
    elif not text.strip():
        yield "the response is empty", False
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        yield f"generated_num_tokens must be a count, {_found(tokens)}", True
    elif tokens > max_new_tokens:
        stated = brief(tokens, 25)
        yield f"over the token budget: generated_num_tokens is {stated}, at most {max_new_tokens} are allowed", True
    elif isinstance(text, str) and count_tokens is not None:
        # A character that is cut within its bytes decodes to U+FFFD, which is longer than the generated bytes.
        counted = count_tokens(text.rstrip("\ufffd"))
        if counted > max_new_tokens + RECOUNT_SLACK:
            yield f"over the token budget: the text has {counted} tokens, at most {max_new_tokens} are allowed", True


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _found(value: Any) -> str:
    return "and is missing" if value is None else f"got {brief(value, 40)!r}"
