"""Stores verdicts in an SQLite file as they arrive, so that a killed run loses none of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class CacheError(OSError):
    """Raised when the cache cannot be read or written."""


class VerdictCache:
    """A file of verdicts by key, created if missing. Runs on one machine may share it.

    A verdict is on disk when `add` returns, so a kill or a power failure loses none.

    Raises:
        CacheError: the file cannot be opened for writing, or is not a cache.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._one_line_errors():
            # The timeout allows for other runs that are writing. It would not cover a switch to a write-ahead log.
            self._database = sqlite3.connect(self.path, timeout=60)
            with self._database:
                self._database.execute("PRAGMA synchronous = EXTRA")
                self._database.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, record TEXT)")
                # Changes nothing, and fails here, not at the first verdict, if the file is read-only or another's.
                self._database.execute("UPDATE verdicts SET record = record WHERE key IS NULL")

    def __enter__(self) -> VerdictCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def get(self, key: str) -> dict[str, Any] | None:
        """The verdict under a key, or None."""
        with self._one_line_errors():
            found = self._database.execute("SELECT record FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if found is None else json.loads(found[0])

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Write a verdict, or raise CacheError. The first verdict for a key is kept."""
        with self._one_line_errors(), self._database:
            self._database.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (key, json.dumps(record)))

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            advice = "check the disk and the folder, or name another cache, which is an SQLite file"
            raise CacheError(f"{self.path}: {error}: {advice}") from None
