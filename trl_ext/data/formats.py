"""Public data sets in this library's rows: `python -m trl_ext.data.formats IN OUT --format hh_rlhf`.

Turns Dolly's records (instruction, context, response, category) and HH-RLHF's pairs of transcripts into JSON lines
that `load_benchmark` reads. With `--plain`, prompts are text in HH-RLHF's turns, for models such as GPT-2 that have no
chat template; otherwise they are messages.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.rows import RawSplit, build_split, read_jsonl, text_field
from trl_ext.files import write_json_lines

Row = dict[str, Any]
Messages = list[dict[str, str]]

# HH-RLHF's format of a turn, also used for plain prompts.
ROLES = {"Human": "user", "Assistant": "assistant"}
SPEAKERS = {role: speaker for speaker, role in ROLES.items()}
_TURN = re.compile(r"\n\n(Human|Assistant):")


def plain_prompt(messages: Messages) -> str:
    """A conversation as plain text that ends where the assistant's turn begins."""
    turns = [f"\n\n{SPEAKERS.get(m['role'], m['role'].capitalize())}: {m['content']}" for m in messages]
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
    if not prompts or form != "hh_rlhf":
        return rows
    first = {}
    for row in rows:
        chosen = row["chosen"] if plain else row["chosen"][0]["content"]
        found = {"row_id": row["row_id"], "prompt": row["prompt"], "reference_response_text": chosen}
        first.setdefault(repr(row["prompt"]), found)
    return list(first.values())


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
    *prompt, chosen = _turns(record, "chosen")
    *rejected_prompt, rejected = _turns(record, "rejected")
    if prompt != rejected_prompt:
        raise ValueError("chosen and rejected differ before the last turn")
    if plain:
        return {
            "prompt": plain_prompt(prompt),
            "chosen": f" {chosen['content']}",
            "rejected": f" {rejected['content']}",
        }
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}


def _turns(record: Mapping[str, Any], side: str) -> Messages:
    transcript = text_field(record, side)
    if not transcript.startswith("\n\nHuman:"):
        raise ValueError(f"{side}: must begin with a blank line and Human:")
    # The split returns an empty first part, then speaker, text, speaker, text, ...
    parts = _TURN.split(transcript)[1:]
    speakers_and_texts = zip(parts[::2], parts[1::2], strict=True)
    turns = [{"role": ROLES[speaker], "content": text.strip()} for speaker, text in speakers_and_texts]
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"]:
        raise ValueError(f"{side}: the last turn must be the Assistant's, and not empty")
    return turns


FORMATS = {"dolly": _dolly_row, "hh_rlhf": _hh_rlhf_row}


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert a file; ends with code 2 and one line where that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m trl_ext.data.formats", description=__doc__)
    parser.add_argument("source", metavar="IN", help="JSON lines as the data set has them; .gz is decompressed")
    parser.add_argument("out", metavar="OUT", help="such as my_benchmark/train_prefs.jsonl; replaced")
    parser.add_argument("--format", dest="form", required=True, choices=sorted(FORMATS), help="of IN")
    parser.add_argument("--plain", action="store_true", help="prompts as text, for models without a chat template")
    parser.add_argument("--prompts", action="store_true", help="of pairs, the prompts alone, each once")
    parser.add_argument("--skip_bad_rows", action="store_true", help="leave bad rows out, and say how many and why")
    given = parser.parse_args(arguments)
    choices = {"plain": given.plain, "prompts": given.prompts, "skip_bad_rows": given.skip_bad_rows}
    try:
        rows = convert_file(given.source, given.form, **choices)
        write_json_lines(given.out, rows)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{given.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
