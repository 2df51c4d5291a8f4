"""Public data sets in this library's rows: `python -m trl_ext.data.formats IN OUT --format hh_rlhf`.

Turns Dolly's records (instruction, context, response, category) and HH-RLHF's pairs of transcripts into JSON lines
that `load_benchmark` reads. With `--plain`, prompts are text in HH-RLHF's turns, for models such as GPT-2 that have no
chat template; otherwise they are messages.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.rows import RawSplit, build_split, read_jsonl, text_field
from trl_ext.files import write_json_lines

Row = dict[str, Any]
Messages = list[dict[str, str]]

SIDES = ("chosen", "rejected")
# HH-RLHF's format of a turn, also used for plain prompts.
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"\n\n(Human|Assistant):")


def plain_prompt(messages: Messages) -> str:
    """A conversation as plain text that ends where the assistant's turn begins."""
    speakers = {role: speaker for speaker, role in SPEAKERS.items()}
    turns = [f"\n\n{speakers.get(m['role'], m['role'].capitalize())}: {m['content']}" for m in messages]
    return "".join(turns) + "\n\nAssistant:"


def convert_file(
    path: str | Path, form: str, *, plain: bool = False, prompts: bool = False, skip_bad_rows: bool = False
) -> list[Row]:
    """Convert a JSON lines file in another format to rows, and check them as `load_benchmark` does.

    Args:
        path: the file.
        form: `dolly` or `hh_rlhf`.
        plain: prompts as text rather than messages.
        prompts: turn pairs into prompts, each once, with the chosen response as `reference_response_text`.
        skip_bad_rows: leave bad records out instead of raising ValueError.
    """
    source = read_jsonl(path)
    split = RawSplit(source.source, source.stem, problems=source.problems)
    for line, record in source.rows:
        try:
            split.rows.append((line, FORMATS[form](record, plain)))
        except ValueError as error:
            split.problems.append((line, str(error)))
    rows = list(build_split(split, pairs=form == "hh_rlhf", skip_bad_rows=skip_bad_rows))
    return _only_prompts(rows) if prompts and form == "hh_rlhf" else rows


def _dolly_row(record: Mapping[str, Any], plain: bool) -> Row:
    """A record of databricks-dolly-15k; the prompt is the instruction with the context, which may be empty, below."""
    instruction, response = text_field(record, "instruction").strip(), text_field(record, "response").strip()
    context = text_field(record, "context", may_be_empty=True).strip()
    messages = [{"role": "user", "content": f"{instruction}\n\n{context}" if context else instruction}]
    return {
        "prompt": plain_prompt(messages) if plain else messages,
        "reference_response_text": f" {response}" if plain else response,
        "category": text_field(record, "category"),
    }


def _hh_rlhf_row(record: Mapping[str, Any], plain: bool) -> Row:
    """A record of HH-RLHF (Bai et al. 2022, arXiv 2204.05862), two transcripts that differ in the last turn only.

    In plain text a prompt ends with `Assistant:`, and a response begins with the space after it.
    """
    (prompt, chosen), (rejected_prompt, rejected) = (_prompt_and_response(record, side) for side in SIDES)
    if prompt != rejected_prompt:
        raise ValueError("chosen and rejected differ before the last turn")
    if plain:
        return {"prompt": plain_prompt(prompt), "chosen": f" {chosen}", "rejected": f" {rejected}"}
    responses = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt, **{side: [{"role": "assistant", "content": text}] for side, text in responses.items()}}


def _prompt_and_response(record: Mapping[str, Any], side: str) -> tuple[Messages, str]:
    transcript = text_field(record, side)
    if not transcript.startswith("\n\nHuman:"):
        raise ValueError(f"{side}: must begin with a blank line and Human:")
    # The split returns an empty first part, then speaker, text, speaker, text, ...
    parts = _TURN.split(transcript)[1:]
    turns = zip(parts[::2], parts[1::2], strict=True)
    *prompt, last = [{"role": SPEAKERS[speaker], "content": text.strip()} for speaker, text in turns]
    if last["role"] != "assistant" or not last["content"]:
        raise ValueError(f"{side}: the last turn must be the Assistant's, and not empty")
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
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert a file; ends with code 2 and one line where that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m trl_ext.data.formats", description=__doc__)
    parser.add_argument("source", metavar="IN", help="JSON lines as the data set has them; .gz is decompressed")
    parser.add_argument("out", metavar="OUT", help="such as my_benchmark/train_prefs.jsonl; replaced")
    parser.add_argument("--format", dest="form", required=True, choices=sorted(FORMATS), help="of IN")
    parser.add_argument("--plain", action="store_true", help="prompts as text, for models without a chat template")
    parser.add_argument("--prompts", action="store_true", help="of pairs, the prompts alone, each once")
    parser.add_argument("--skip_bad_rows", action="store_true", help="leave bad rows out, and say how many and why")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    try:
        rows = convert_file(options.pop("source"), options.pop("form"), **options)
        write_json_lines(out, rows)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
