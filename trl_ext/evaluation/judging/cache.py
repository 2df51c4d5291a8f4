"""Verdicts kept on disk as they arrive, in a file that several processes may share and that a kill cannot damage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VERDICTS = ("A", "B", "tie")
# Every line begins so; one that is cut short is still told from a line of another file.
_LINE_START = b'{"key": "'
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FIRST_READ = 1 << 20


class CacheError(OSError):
    """Raised when a verdict cannot be written."""


def verdict_key(identity: dict[str, Any], prompt: Any, shown_first: str, shown_second: str) -> str:
    """SHA-256 over the judge with its settings, the prompt, and the two responses in the order they are shown in."""
    question = json.dumps([identity, prompt, shown_first, shown_second], sort_keys=True)
    return hashlib.sha256(question.encode()).hexdigest()


class VerdictCache:
    """A file of one JSON object per verdict, which only grows.

    Each line is appended with a single write and brought to the disk by a thread right after, so that a run killed at
    any moment loses nothing that was written, and a machine that loses power only the last moments. A last line that
    was cut short is ended by the next append and ignored from then on. Caches that share the file, in one process or
    several, see each other's verdicts on `refresh`, and lock the keys they are about to ask for; the system drops a
    lock with the process that holds it. May be used from several threads.

    On Linux the locks belong to the open file, so that two caches of one process exclude each other, and nobody's
    reading of the file drops them. Elsewhere they belong to the process: there, use one cache per process and file.

    Args:
        path: the file; made if it is missing, and its folder too.

    Raises:
        ValueError: the file is there and is no cache.
        OSError: it cannot be opened for writing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._records: dict[str, dict[str, Any]] = {}
        self._read_to = 0
        self._claimed: set[str] = set()
        self._lock = threading.RLock()
        self._has_locks = True
        self._sync_error: OSError | None = None
        self._unsynced, self._closing = threading.Event(), False
        self._syncer = threading.Thread(target=self._sync, daemon=True)
        try:
            self._check_is_cache()
            self.refresh()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._syncer.start()

    def __enter__(self) -> VerdictCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CacheError:
            # What ended the work says more.
            if kind is None:
                raise

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> dict[str, Any] | None:
        """The verdict under a key, as of the last `refresh`; the first one, should there be two."""
        return self._records.get(key)

    def refresh(self) -> None:
        """Read what was appended since the last time, by whom ever."""
        with self._lock:
            size = _FIRST_READ
            while chunk := os.pread(self._descriptor, size, self._read_to):
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) < size:
                    break  # a line that another process is writing, or that was cut short
                if not end:
                    size *= 2
                    continue
                for line in chunk[:end].split(b"\n"):
                    record = _parse(line)
                    if record is not None:
                        self._records.setdefault(record["key"], record)
                self._read_to += end

    def claim(self, key: str) -> bool:
        """Take the right to ask for a key; False if somebody else has it. Ends with `release`, or the process."""
        with self._lock:
            if key in self._claimed:
                return False
            if not self._range_lock(fcntl.LOCK_EX | fcntl.LOCK_NB, _lock_position(key)):
                return False
            self._claimed.add(key)
            return True

    def release(self, key: str) -> None:
        """Give up a claim."""
        with self._lock:
            self._claimed.discard(key)
            self._range_lock(fcntl.LOCK_UN, _lock_position(key))

    def append(self, record: dict[str, Any]) -> None:
        """Write a verdict; `record` has its `key`.

        Raises:
            CacheError: it could not be written.
        """
        line = json.dumps({"key": record["key"], **record}).encode() + b"\n"
        with self._lock, self._appending():
            try:
                size = os.fstat(self._descriptor).st_size
                if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line
                written = os.write(self._descriptor, line)
            except OSError as error:
                raise CacheError(error.errno, error.strerror, str(self.path)) from None
            if written < len(line):
                raise CacheError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._records.setdefault(record["key"], record)
        self._unsynced.set()

    def check_flushed(self) -> None:
        """Raise what a flush met; the system reports a loss once, so that a later flush that succeeds mends nothing.

        Raises:
            CacheError: what the file holds could not be brought to the disk.
        """
        error = self._sync_error
        if error is not None:
            raise CacheError(
                f"{self.path}: the disk does not take what was written ({error.strerror}); its {len(self)} verdicts "
                "are in the file, unless the machine fails now: make room and run again, which goes on from there"
            )

    def close(self) -> None:
        """Bring everything to the disk, and give up all claims.

        Raises:
            CacheError: something could not be brought to the disk.
        """
        if self._closing:
            return
        self._closing = True
        self._unsynced.set()
        self._syncer.join()
        self._flush()  # the thread may have been at an earlier line
        os.close(self._descriptor)
        self.check_flushed()

    def _sync(self) -> None:
        """Flush after appends, and not in them: asking on need not wait for the disk."""
        while not self._closing:
            self._unsynced.wait()
            self._unsynced.clear()
            self._flush()

    def _flush(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._sync_error = error

    def _check_is_cache(self) -> None:
        start = os.pread(self._descriptor, len(_LINE_START), 0)
        if start != _LINE_START[: len(start)]:
            raise ValueError(f"{self.path} is no cache of verdicts: name another file, or a new one")

    @contextmanager
    def _appending(self) -> Iterator[None]:
        """The lock that keeps processes from taking each other's half-written line for one that was cut short."""
        self._range_lock(fcntl.LOCK_EX, 0)
        try:
            yield
        finally:
            self._range_lock(fcntl.LOCK_UN, 0)

    def _range_lock(self, operation: int, position: int) -> bool:
        """Lock or unlock one byte; False if somebody else holds it. Locks may lie beyond the end of the file."""
        if not self._has_locks:
            return True
        try:
            _lock_byte(self._descriptor, operation, position)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._has_locks = False
            warnings.warn(
                f"{self.path}: the file system has no locks; two runs on this cache may pay for a verdict twice",
                stacklevel=2,
            )
        return True


def _lock_byte(descriptor: int, operation: int, position: int) -> None:
    """As `fcntl.lockf` on one byte, with a lock that the open file owns, where the system has such locks."""
    if sys.platform == "linux":
        kind = fcntl.F_UNLCK if operation == fcntl.LOCK_UN else fcntl.F_WRLCK
        command = fcntl.F_OFD_SETLKW if operation == fcntl.LOCK_EX else fcntl.F_OFD_SETLK
        # `struct flock`: kind, where the position counts from, the position, the length, and no process.
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, position, 1, 0)
        try:
            fcntl.fcntl(descriptor, command, lock)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    fcntl.lockf(descriptor, operation, 1, position)


def _lock_position(key: str) -> int:
    # Byte 0 is for appends; 60 bits of the key keep two keys apart.
    return 1 + int(key[:15], 16)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None for one that was cut short."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and isinstance(record.get("key"), str) and record.get("verdict") in VERDICTS
    return record if whole else None
