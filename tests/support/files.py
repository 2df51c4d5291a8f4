"""Rows of data and files of them, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path

PAIR = {"prompt_text": "Name a fruit.", "chosen_text": "An apple.", "rejected_text": "A stone."}


def write_rows(path: Path, rows: list) -> Path:
    """Write rows as JSONL, in a folder that need not exist; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def labelled(count: int, **changes) -> list[dict]:
    """Responses with a label, every second one good."""
    return [
        {"row_id": f"r{i}", "prompt_text": f"Name a fruit, {i}.", "completion": f"An apple {i}.", "label": i % 2 == 0}
        | changes
        for i in range(count)
    ]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def pair(row_id, **changes):
    return {"row_id": row_id, **PAIR, **changes}
