"""The data of a public evaluation, and the rows of a submission, read with the location of each fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from trl_ext.data import load_benchmark
from trl_ext.data.rows import first_error, first_few, read_jsonl
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.statistics.win_rate import System
from trl_ext.files import brief, existing_file, read_json

KINDS = {"gen": "prompts", "prefs": "preference pairs"}
_THRESHOLDS = TypeAdapter(Annotated[dict[str, Annotated[float, Field(ge=0, le=1, strict=True)]], Field(min_length=1)])
MAX_PROMPT_TOKENS = 700
MAX_NEW_TOKENS = 256


def load_prompts(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Prompt rows with `row_id`, `prompt` (messages) and `prompt_text`, the last user message.

    They come from a JSONL file, or are the embedded ones. A file with malformed rows or of pairs raises ValueError.
    """
    return [{**row, "prompt_text": last_user_text(row["prompt"])} for row in _load(path, "gen")]


def load_pairs(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Preference rows with `row_id`, `prompt`, `chosen` and `rejected`, from a file or embedded, as `load_prompts`."""
    return _load(path, "prefs")


def _load(path: str | Path | None, kind: str) -> list[dict[str, Any]]:
    if path is None:
        return list(load_benchmark("toy", splits=f"test_{kind}")[f"test_{kind}"])
    ((name, rows),) = load_benchmark(existing_file(Path(path).expanduser())).items()
    found = name.rpartition("_")[2]
    if found != kind:
        raise ValueError(f"{path} holds {KINDS[found]}; expected {KINDS[kind]}")
    return list(rows)


def load_base(
    prompts: list[dict[str, Any]], path: str | Path | None = None, *, max_new_tokens: int | None = None
) -> list[Response]:
    """The base's responses to prompts of `load_prompts`, from a JSONL file in the format of submissions.

    Without a file they are the greedy responses that are stored with the embedded prompts; other prompts raise
    ValueError, and so do malformed rows. `max_new_tokens` is the limit of the responses in the file; None for 256.
    """
    if path is not None:
        return read_responses(path, prompts, max_new_tokens=max_new_tokens or MAX_NEW_TOKENS).of(path)
    from tokenizers import Tokenizer

    from trl_ext.toy import MODEL_DIR

    embedded = {row["row_id"]: row["reference_response_text"] for row in _load(None, "gen")}
    tokenizer, limit = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), default_max_new_tokens(None)
    responses = []
    for row in prompts:
        if (text := embedded.get(row["row_id"])) is None:
            raise ValueError(f"row_id {row['row_id']} is not one of the embedded prompts: give --base_jsonl")
        # The generated end token is not in the text.
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids) + 1
        responses.append(Response(row["row_id"], text, min(tokens, limit), tokens < limit))
    return responses


def load_thresholds(path: str | Path) -> dict[str, float]:
    """Thresholds by method from a JSON file; ValueError if the file is damaged, or an entry is no rate in [0, 1]."""
    try:
        return _THRESHOLDS.validate_python(read_json(Path(path).expanduser()))
    except ValidationError as error:
        raise ValueError(f"{path}: {first_error(error)}") from None


def default_max_new_tokens(path: str | Path | None) -> int:
    """The limit on new tokens: the embedded prompts' limit if `path` is None, else the course's 256."""
    if path is not None:
        return MAX_NEW_TOKENS
    from trl_ext.toy import MAX_NEW_TOKENS as embedded

    return embedded


# ---- The fields of a row of each kind of file, beside its row_id ----


class ResponseRow(BaseModel, strict=True):
    prompt_text: str
    response_text: str
    generated_num_tokens: NonNegativeInt


class ScoreRow(BaseModel, strict=True):
    chosen_score: FiniteFloat
    rejected_score: FiniteFloat


class HumanLabel(BaseModel, strict=True):
    outcome: System


# ---- Reading rows ----


class Response(NamedTuple):
    """A submitted response, its number of generated tokens with the end token, and whether it ended under the limit.

    A response whose end token was the last one allowed counts as truncated.
    """

    row_id: str
    text: str
    tokens: int
    finished: bool


class FileRows(NamedTuple):
    """What a file of a submission holds: its good rows, the problems that prevent grading it, and its warnings."""

    rows: Any
    problems: list[str]
    warnings: list[str]

    def of(self, path: str | Path) -> Any:
        """The rows; ValueError with the first problems of the file at `path`, if it has any."""
        if self.problems:
            raise ValueError(f"{path}: {first_few(self.problems)}")
        return self.rows


def read_rows(
    path: str | Path, row_type: type[BaseModel], row_ids: Sequence[str], *, complete: bool = True
) -> FileRows:
    """The rows of a JSONL file by their row_id, one of `row_ids`; all of these must be there if `complete`."""
    wanted = set(row_ids)

    def convert(raw: dict[str, Any]) -> dict[str, Any]:
        if str(raw.get("row_id")) not in wanted:
            raise ValueError(f"foreign: none of the {len(row_ids)} rows")
        try:
            return {"row": row_type.model_validate(raw)}
        except ValidationError as error:
            raise ValueError(first_error(error)) from None

    split = read_jsonl(path)
    rows = {row["row_id"]: row["row"] for row in split.check(convert)}
    problems = [f"line {line}: {message}" for line, message in sorted(split.problems)]
    if complete:
        found = {str(row.get("row_id")) for _, row in split.rows}
        problems += [f"row_id {brief(row_id)}: missing" for row_id in row_ids if row_id not in found]
    return FileRows(rows, problems, [])


def read_responses(path: str | Path, prompts: Sequence[Mapping[str, Any]], *, max_new_tokens: int) -> FileRows:
    """The responses of a JSONL file in the order of the prompts. An empty response is a warning."""
    found = read_rows(path, ResponseRow, [row["row_id"] for row in prompts])
    responses = []
    for prompt in prompts:
        row_id = prompt["row_id"]
        if row_id not in found.rows:
            continue
        row = found.rows[row_id]
        text, tokens = row.response_text, row.generated_num_tokens
        responses.append(Response(row_id, text, tokens, tokens < max_new_tokens))
        if row.prompt_text != prompt["prompt_text"]:
            found.problems.append(f"row_id {brief(row_id)}: prompt_text is not the benchmark's for this row_id")
        elif tokens > max_new_tokens:
            budget = f"over the token budget of {max_new_tokens}"
            found.problems.append(f"row_id {brief(row_id)}: {budget}: generated_num_tokens is {tokens}")
        elif not text.strip():
            found.warnings.append(f"row_id {brief(row_id)}: the response is empty")
    return found._replace(rows=responses)


def read_pair_scores(path: str | Path, row_ids: Sequence[str]) -> FileRows:
    """The chosen and the rejected scores of a JSONL file, two lists in the order of the pairs."""
    found = read_rows(path, ScoreRow, row_ids)
    good = [found.rows[row_id] for row_id in row_ids if row_id in found.rows]
    return found._replace(rows=([row.chosen_score for row in good], [row.rejected_score for row in good]))


def read_human_labels(path: str | Path, row_ids: Sequence[str]) -> dict[str, System]:
    """Outcomes by row_id of the prompts that a person has judged; ValueError if a row is bad, or there are none."""
    rows = read_rows(path, HumanLabel, row_ids, complete=False).of(path)
    if not rows:
        raise ValueError(f"{path}: the file is empty")
    return {row_id: row.outcome for row_id, row in rows.items()}
