"""A file of rows that is written in parts, complete after each, and resumed where it stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.rows import read_jsonl
from trl_ext.files import brief, read_json, write_json, write_json_lines

logger = logging.getLogger(__name__)

# A model's name depends on the working directory; its weights are compared by their hash.
FREE = ("model",)
# Padding only changes the last bits of a result, which can decide between two nearly equal tokens.
NEARLY_FREE = ("batch_size",)
# The fields to read back, by the kind of rows according to the settings.
FIELDS = {
    "greedy responses": {"prompt_text": str, "response_text": str, "generated_num_tokens": int},
    "scores of pairs": {"chosen_score": int | float, "rejected_score": int | float},
}


class RowFile:
    """A JSONL file with one row per row_id, and a second file that records how the rows were made.

    Args:
        path: file of the rows; the settings of `aot.jsonl` are in `aot.settings.json`.
        settings: how rows are made, JSON-ready. Rows with other settings are rejected. A different `batch_size` only
            gives a warning, and the stored settings remain those of the first rows.
        row_ids: all rows that the file will have, in order.
        overwrite: discard existing rows.

    Attributes:
        rows: existing rows, by row_id and in order.

    Raises:
        FileExistsError: the file was made with other or unknown settings.
        ValueError: the file is damaged.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], row_ids: Sequence[str], *, overwrite: bool = False
    ):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            what = "a folder" if self.path.is_dir() else "no ordinary file"
            raise ValueError(f"{self.path} is {what}: name a file")
        self.settings_path = self.path.with_name(f"{self.path.stem}.settings.json")
        self.settings = dict(settings)
        self.row_ids = list(row_ids)
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not overwrite:
            earlier = self._check_settings()
            self._read()
            self._warn_of_others(earlier)
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

    def _check_settings(self) -> dict[str, Any]:
        advice = "choose another --out, or replace it with --overwrite"
        try:
            earlier = read_json(self.settings_path)
            if not isinstance(earlier, dict):
                raise ValueError("no object")
        except (OSError, ValueError):
            message = f"{self.path} exists, and no {self.settings_path.name} says how it was made: {advice}"
            raise FileExistsError(message) from None
        for name, value in self.settings.items():
            if name not in (*FREE, *NEARLY_FREE) and earlier.get(name) != value:
                was, now = (_short(settings, name) for settings in (earlier, self.settings))
                raise FileExistsError(f"{self.path} holds rows made with {was}, not with {now}: {advice}")
        return earlier

    def _warn_of_others(self, earlier: Mapping[str, Any]) -> None:
        """Warn only if rows are left to make: nothing else depends on these settings."""
        for name in NEARLY_FREE if self.missing else ():
            if name in earlier and name in self.settings and earlier[name] != self.settings[name]:
                logger.warning(
                    "%s holds %d rows made with %s %s, and the other %d are made with %s: rounding differs, so a few "
                    "may not be what one run would give",
                    *(self.path, len(self.rows), name, earlier[name], len(self.missing), self.settings[name]),
                )

    def _read(self) -> None:
        split = read_jsonl(self.path)
        known, advice = set(self.row_ids), "replace the file with --overwrite"
        if split.problems:
            bad = split.problems[0]
            raise ValueError(f"{self.path}: line {bad.position}: {bad.message}; {advice}")
        for line, row in split.rows:
            row_id = row.get("row_id")
            if not isinstance(row_id, str) or row_id not in known:
                raise ValueError(f"{self.path}: line {line}: row_id {brief(row_id)} is foreign; {advice}")
            if row_id in self.rows:
                raise ValueError(f"{self.path}: line {line}: row_id {brief(row_id)} stands there twice; {advice}")
            for name, kinds in FIELDS.get(self.settings.get("rows"), {}).items():
                value = row.get(name)
                if isinstance(value, bool) or not isinstance(value, kinds):
                    got = "and is missing" if value is None else f"got {brief(repr(value), 40)}"
                    raise ValueError(f"{self.path}: line {line}: {name} is damaged, {got}; {advice}")
            self.rows[row_id] = row


def _short(settings: Mapping[str, Any], name: str) -> str:
    """A setting in words; for a hash, the name of its object."""
    value = settings.get(name)
    if name == "model_sha256":
        return f"the model {brief(settings.get('model'), 100)} ({brief(str(value)[:12])})"
    return f"{name} {value[:12] if isinstance(value, str) and len(value) == 64 else brief(value)}"
