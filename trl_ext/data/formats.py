"""Public data sets in this library's rows: `python -m trl_ext.data.formats IN OUT --format hh_rlhf`.

Turns Dolly's records (instruction, context, response, category), HH-RLHF's pairs of transcripts and TRL's rows of
prompt and completion, as `recipes/best_of_n.py --keep` writes them, into JSON lines that `load_benchmark` reads. With
`--plain`, prompts are text in HH-RLHF's turns, for models such as GPT-2 that have no chat template; otherwise they are
messages.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.rows import Problem, RawSplit, build_split, read_jsonl
from trl_ext.files import brief, write_json_lines

Row = dict[str, Any]
Messages = list[dict[str, str]]

SIDES = ("chosen", "rejected")
# How HH-RLHF writes a turn, and how a plain prompt is written.
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"\n\n(Human|Assistant):")


def dolly_to_rows(records: Iterable[Mapping[str, Any]], *, plain: bool = False) -> list[Row]:
    """Records of databricks-dolly-15k as prompts with their demonstration.

    Args:
        records: with the texts `instruction`, `context` (may be empty), `response` and `category`.
        plain: prompts as text rather than messages.

    Returns:
        Rows with `prompt` (the instruction, and the context below it), `reference_response_text` and `category`.

    Raises:
        ValueError: a record lacks a field or has an empty one; the message numbers it from 1.
    """
    return _numbered(_dolly_row, records, plain)


def hh_rlhf_to_rows(records: Iterable[Mapping[str, Any]], *, plain: bool = False) -> list[Row]:
    """Records of HH-RLHF (Bai et al. 2022, arXiv 2204.05862) as preference pairs.

    The prompt is what the two transcripts share, all but the last turn, which must be the assistant's in both.

    Args:
        records: with the transcripts `chosen` and `rejected`, in turns that begin with a blank line and `Human:` or
            `Assistant:`.
        plain: prompts and responses as text rather than messages.

    Returns:
        Rows with `prompt`, `chosen` and `rejected`. In plain text a prompt ends with `Assistant:`, and a response
        begins with the space after it.

    Raises:
        ValueError: a record that is no such pair; the message numbers it from 1.
    """
    return _numbered(_hh_rlhf_row, records, plain)


def plain_prompt(messages: Messages) -> str:
    """A conversation as text in which the assistant's turn is next."""
    speakers = {role: speaker for speaker, role in SPEAKERS.items()}
    turns = [f"\n\n{speakers[message['role']]}: {message['content']}" for message in messages]
    return "".join(turns) + "\n\nAssistant:"


def convert_file(
    path: str | Path, form: str, *, plain: bool = False, prompts: bool = False, skip_bad_rows: bool = False
) -> list[Row]:
    """The rows of a file of JSON lines in another format, checked as `load_benchmark` checks them.

    Args:
        path: the file.
        form: `dolly`, `hh_rlhf` or `prompt_completion`.
        plain: prompts as text rather than messages; `prompt_completion` leaves them as they are.
        prompts: of pairs, each prompt once, with its chosen response as `reference_response_text`.
        skip_bad_rows: leave bad records out, with a count of the reasons in the log, instead of raising.

    Raises:
        FileNotFoundError: no such file.
        ValueError: bad records; the message gives the file, and line and field of five.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {brief(path, 200)}")
    source = read_jsonl(Path(path))
    split = RawSplit(source.source, source.stem, problems=source.problems)
    for line, record in source.rows:
        try:
            split.rows.append((line, FORMATS[form](record, plain)))
        except _BadRecord as error:
            split.problems.append(Problem(line, None, error.reason, str(error)))
    rows = list(build_split(split, pairs=form == "hh_rlhf", skip_bad_rows=skip_bad_rows))
    return _only_prompts(rows) if prompts and form == "hh_rlhf" else rows


class _BadRecord(ValueError):
    """What is wrong with a record, with a phrase to count it by."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def _numbered(convert: Callable, records: Iterable[Mapping[str, Any]], plain: bool) -> list[Row]:
    rows = []
    for number, record in enumerate(records, start=1):
        try:
            rows.append(convert(record, plain))
        except _BadRecord as error:
            raise ValueError(f"record {number}: {error}") from None
    return rows


def _text(record: Mapping[str, Any], field: str, *, may_be_empty: bool = False) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        found = f"is a {type(value).__name__}" if field in record else f"missing; the record has {', '.join(record)}"
        raise _BadRecord(f"invalid {field}", f"{field}: must be text, {brief(found, 100)}")
    if "\r" in value:
        raise _BadRecord(
            "carriage return", f"{field}: a carriage return at character {value.index(chr(13)) + 1}; end lines by \\n"
        )
    if not may_be_empty and not value.strip():
        raise _BadRecord(f"empty {field}", f"{field}: empty")
    return value


# ---- Prompt and completion ----


def _prompt_completion_row(record: Mapping[str, Any], plain: bool) -> Row:
    completion = record.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        completion = completion[0].get("content")
    text = _text({**record, "completion": completion}, "completion")
    return {name: value for name, value in record.items() if name != "completion"} | {"reference_response_text": text}


# ---- Dolly ----


def _dolly_row(record: Mapping[str, Any], plain: bool) -> Row:
    instruction, response = _text(record, "instruction").strip(), _text(record, "response").strip()
    context = _text(record, "context", may_be_empty=True).strip()
    messages = [{"role": "user", "content": f"{instruction}\n\n{context}" if context else instruction}]
    return {
        "prompt": plain_prompt(messages) if plain else messages,
        "reference_response_text": f" {response}" if plain else response,
        "category": _text(record, "category"),
    }


# ---- HH-RLHF ----


def _hh_rlhf_row(record: Mapping[str, Any], plain: bool) -> Row:
    (prompt, chosen), (rejected_prompt, rejected) = (_prompt_and_response(record, side) for side in SIDES)
    if prompt != rejected_prompt:
        shared = next(
            (i for i, (one, other) in enumerate(zip(prompt, rejected_prompt, strict=False)) if one != other),
            min(len(prompt), len(rejected_prompt)),
        )
        raise _BadRecord(
            "different prompts", f"chosen and rejected part in turn {shared + 1}, before the last turn of both"
        )
    if chosen == rejected:
        raise _BadRecord("chosen equal to rejected", "chosen: equal to rejected")
    if plain:
        return {"prompt": plain_prompt(prompt), "chosen": f" {chosen}", "rejected": f" {rejected}"}
    return {"prompt": prompt, **{side: _response(text) for side, text in zip(SIDES, (chosen, rejected), strict=True)}}


def _response(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]


def _prompt_and_response(record: Mapping[str, Any], side: str) -> tuple[Messages, str]:
    transcript = _text(record, side)
    if not transcript.startswith("\n\nHuman:"):
        begins = brief(repr(transcript[:20]))
        raise _BadRecord("no transcript", f"{side}: must begin with a blank line and Human:, begins with {begins}")
    # The separator's group gives speaker, text, speaker, text, ... behind an empty first part.
    parts = _TURN.split(transcript)[1:]
    turns = [
        {"role": SPEAKERS[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    *prompt, last = turns
    if last["role"] != "assistant":
        raise _BadRecord("no Assistant turn", f"{side}: the last turn must be the Assistant's, and is the Human's")
    if not last["content"]:
        raise _BadRecord("empty response", f"{side}: the last turn is empty")
    if prompt[-1]["role"] != "user":
        raise _BadRecord("no Human turn", f"{side}: the turn before the last must be the Human's")
    return prompt, last["content"]


def _only_prompts(rows: Sequence[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        chosen = row["chosen"] if isinstance(row["chosen"], str) else row["chosen"][0]["content"]
        kept = {"row_id": row["row_id"], "prompt": row["prompt"], "reference_response_text": chosen}
        found.setdefault(repr(row["prompt"]), kept)
    return list(found.values())


FORMATS: dict[str, Callable[[Mapping[str, Any], bool], Row]] = {
    "dolly": _dolly_row,
    "hh_rlhf": _hh_rlhf_row,
    "prompt_completion": _prompt_completion_row,
}


# ---- The command ----


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print below its usage."""

    def error(self, message: str):
        raise ValueError(message)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert a file; ends with code 2 and one line where that cannot be done."""
    parser = _Parser(
        prog="python -m trl_ext.data.formats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="IN", help="JSON lines as the data set has them, not compressed")
    parser.add_argument("out", metavar="OUT", help="such as my_benchmark/train_prefs.jsonl; replaced")
    parser.add_argument("--format", required=True, choices=sorted(FORMATS), help="of IN")
    parser.add_argument("--plain", action="store_true", help="prompts as text, for models without a chat template")
    parser.add_argument("--prompts", action="store_true", help="of pairs, the prompts alone, each once")
    parser.add_argument("--skip_bad_rows", action="store_true", help="leave bad rows out, and say how many and why")
    try:
        given = parser.parse_args(arguments)
        options = {"plain": given.plain, "prompts": given.prompts, "skip_bad_rows": given.skip_bad_rows}
        rows = convert_file(given.source, given.format, **options)
        write_json_lines(given.out, rows)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{given.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
