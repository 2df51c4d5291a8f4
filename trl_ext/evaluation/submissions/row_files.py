"""A file of rows that is made piece by piece, whole after each, and continued where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.rows import read_jsonl
from trl_ext.files import write_json, write_json_lines


class RowFile:
    """A JSONL file with one row per row_id, beside a file that says how its rows were made.

    Args:
        path: of the rows; `aot.jsonl` has `aot.settings.json` beside it.
        settings: how rows are made, JSON-ready. Rows made otherwise are refused.
        row_ids: all rows that there will be, in order.
        overwrite: drop the rows that are there.

    Attributes:
        rows: those that are there, by row_id and in order.

    Raises:
        FileExistsError: the file was made with other settings, or does not say how.
        ValueError: it is damaged.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], row_ids: Sequence[str], *, overwrite: bool = False
    ):
        self.path = Path(path)
        self.settings_path = self.path.with_name(f"{self.path.stem}.settings.json")
        self.settings = dict(settings)
        self.row_ids = list(row_ids)
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder: name a file")
        if self.path.exists() and not overwrite:
            self._check_settings()
            self._read()
        else:
            self.path.unlink(missing_ok=True)
            write_json(self.settings_path, self.settings)

    @property
    def missing(self) -> list[str]:
        """row_ids without a row, in order."""
        return [row_id for row_id in self.row_ids if row_id not in self.rows]

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows and write the file."""
        known = self.rows | {row["row_id"]: row for row in rows}
        self.rows = {row_id: known[row_id] for row_id in self.row_ids if row_id in known}
        write_json_lines(self.path, self.rows.values())

    def _check_settings(self) -> None:
        advice = "choose another --out, or replace it with --overwrite"
        try:
            earlier = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            message = f"{self.path} exists, and no {self.settings_path.name} says how it was made: {advice}"
            raise FileExistsError(message) from None
        for name, value in self.settings.items():
            # What a model is called changes with the folder one stands in; its weights are compared by their hash.
            if name != "model" and earlier.get(name) != value:
                was, now = (_short(settings, name) for settings in (earlier, self.settings))
                raise FileExistsError(f"{self.path} holds rows made with {was}, not with {now}: {advice}")

    def _read(self) -> None:
        split = read_jsonl(self.path)
        if split.problems:
            bad = split.problems[0]
            raise ValueError(f"{self.path}: line {bad.position}: {bad.message}; replace the file with --overwrite")
        for line, row in split.rows:
            if row.get("row_id") not in self.row_ids:
                raise ValueError(
                    f"{self.path}: line {line}: row_id {row.get('row_id')} is foreign; replace it with --overwrite"
                )
            self.rows[row["row_id"]] = row


def _short(settings: Mapping[str, Any], name: str) -> str:
    """A setting in words; a hash by the name of what it is of."""
    value = settings.get(name)
    if name == "model_sha256":
        return f"the model {settings.get('model')} ({str(value)[:12]})"
    return f"{name} {value[:12] if isinstance(value, str) and len(value) == 64 else value}"
