"""The data of a public evaluation: prompts, the frozen base's responses to them, and preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from trl_ext.data import load_benchmark
from trl_ext.data.rows import first_error
from trl_ext.evaluation.judging.protocol import last_user_text
from trl_ext.evaluation.submissions.rows import Response, read_responses, refuse_fatal
from trl_ext.files import existing_file, read_json

KINDS = {"gen": "prompts", "prefs": "preference pairs"}
# A method's name is that of its file, and a threshold is a rate.
_Method = Annotated[str, StringConstraints(pattern=r"^\w[\w-]{0,99}$")]
_Rate = Annotated[float, Field(ge=0, le=1, strict=True)]
_THRESHOLDS = TypeAdapter(Annotated[dict[_Method, _Rate], Field(min_length=1)])
MAX_PROMPT_TOKENS = 700
MAX_NEW_TOKENS = 256


def load_prompts(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Prompt rows with `row_id`, `prompt` (messages) and `prompt_text`, the last user message.

    Args:
        path: a JSONL file of prompts; None for the embedded ones.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: rows are malformed, or the file contains pairs.
    """
    return [{**row, "prompt_text": last_user_text(row["prompt"])} for row in _load(path, "gen")]


def load_pairs(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Preference rows with `row_id`, `prompt`, `chosen` and `rejected`, from a file as `load_prompts` reads it."""
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
    """The base's responses in the order of the prompts.

    Args:
        prompts: prompts from `load_prompts`.
        path: a JSONL file in the format of submissions; None for the embedded base, whose greedy responses are stored
            with the embedded prompts.
        max_new_tokens: the token limit of the responses in the file; None for 256.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: rows are malformed, or no file is given for prompts other than the embedded ones.
    """
    if path is not None:
        responses, problems = read_responses(path, prompts, max_new_tokens=max_new_tokens or MAX_NEW_TOKENS)
        refuse_fatal(path, problems)
        return responses
    from tokenizers import Tokenizer

    from trl_ext.toy import MODEL_DIR

    embedded = {row["row_id"]: row["reference_response_text"] for row in _load(None, "gen")}
    tokenizer, limit = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), default_max_new_tokens(None)
    responses = []
    for row_id in (row["row_id"] for row in prompts):
        if row_id not in embedded:
            raise ValueError(f"row_id {row_id} is not one of the embedded prompts: give --base_jsonl")
        # The generated end token is not in the text.
        tokens = len(tokenizer.encode(embedded[row_id], add_special_tokens=False).ids) + 1
        responses.append(Response(row_id, embedded[row_id], min(tokens, limit), max_new_tokens=limit))
    return responses


def load_thresholds(source: str | Path | Mapping[str, float]) -> dict[str, float]:
    """Thresholds by method, each in [0, 1], from a JSON file or a mapping.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or an entry is not a rate.
    """
    is_file = not isinstance(source, Mapping)
    values = read_json(Path(source).expanduser()) if is_file else dict(source)
    try:
        return _THRESHOLDS.validate_python(values)
    except ValidationError as error:
        raise ValueError(f"{source if is_file else 'thresholds'}: {first_error(error)}") from None


def default_max_new_tokens(path: str | Path | None) -> int:
    """The limit on new tokens: the embedded prompts' limit if `path` is None, else the course's 256."""
    if path is not None:
        return MAX_NEW_TOKENS
    from trl_ext.toy import MAX_NEW_TOKENS as embedded

    return embedded
