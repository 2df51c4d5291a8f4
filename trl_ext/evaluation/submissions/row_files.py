"""A file of rows that is written in parts, complete after each, and resumed where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trl_ext.evaluation.submissions.rows import read_rows
from trl_ext.files import brief, read_json, write_json, write_json_lines

# A model's name depends on the working directory; its weights are compared by their hash. The batch size only changes
# the last bits of a result, which can decide between two nearly equal tokens.
FREE = ("model", "batch_size")


class RowFile:
    """A JSONL file with one row per row_id, and a second file that records how the rows were made.

    Args:
        path: file of the rows; the settings of `aot.jsonl` are in `aot.settings.json`.
        row_type: the fields of a row.
        settings: how rows are made, JSON-ready; rows with other settings are rejected, except for those in `FREE`.
        row_ids: all rows that the file will have, in order.
        overwrite: discard existing rows.

    Attributes:
        rows: existing rows, by row_id and in order.

    Raises:
        FileExistsError: the file was made with other or unknown settings.
        ValueError: the file is damaged.
    """

    def __init__(self, path, row_type: type[BaseModel], settings: Mapping, row_ids: Sequence[str], *, overwrite=False):
        self.path = Path(path)
        self.settings_path = self.path.with_name(f"{self.path.stem}.settings.json")
        self.settings = dict(settings)
        self.row_ids = list(row_ids)
        self.rows: dict[str, dict[str, Any]] = {}
        if overwrite or not self.path.exists():
            self.path.unlink(missing_ok=True)
            write_json(self.settings_path, self.settings)
            return
        self._check_settings()
        self.rows, problems = read_rows(self.path, row_type, self.row_ids, complete=False)
        if problems:
            raise ValueError(f"{problems[0]}; replace the file with --overwrite")

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
            earlier = read_json(self.settings_path)
        except (OSError, ValueError):
            message = f"{self.path} exists, and no {self.settings_path.name} says how it was made: {advice}"
            raise FileExistsError(message) from None
        for name, value in self.settings.items():
            if name not in FREE and earlier.get(name) != value:
                was, now = (_short(settings, name) for settings in (earlier, self.settings))
                raise FileExistsError(f"{self.path} holds rows made with {was}, not with {now}: {advice}")


def _short(settings: Mapping[str, Any], name: str) -> str:
    """A setting in words; for a hash, the name of its object."""
    value = brief(str(settings.get(name))[:12])
    return f"the model {brief(settings.get('model'), 100)} ({value})" if name == "model_sha256" else f"{name} {value}"
