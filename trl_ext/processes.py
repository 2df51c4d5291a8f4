"""The processes of a launch, readable before any distributed state exists."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def is_main_process() -> bool:
    """Whether this is the first process, readable before any distributed state exists."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """The number of processes, readable before any distributed state exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def warn_once_per_run(message: str) -> None:
    """Log a warning from the first process only, and not again before `begin_warnings`."""
    if is_main_process() and message not in _warned:
        _warned.add(message)
        logger.warning(message)


def begin_warnings() -> None:
    """Let each warning be logged again, as when another training begins in this process."""
    _warned.clear()


@contextmanager
def quiet_when_closed() -> Iterator[None]:
    """End without a traceback if the reader of the standard output, such as `head`, has closed it."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            # Otherwise the interpreter would flush once more, and complain, when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        # Another pipe or socket is broken.
        raise
