"""A time limit for calls of Python functions that may never come back."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# Of the processor's time and not of the clock, so that hardly anything else uses it; SIGALRM is many a library's own.
_SIGNAL = getattr(signal, "SIGVTALRM", None)


class Stalled(BaseException):
    """Raised in a call that has used up its time; no `Exception`, so that a function's own handlers let it pass."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raise `Stalled` in the block once its time is up, and again every second while the block swallows it.

    Interrupted are Python code and what it waits for: sleep, locks, sockets, files, other processes. Not interrupted
    are native code that does not come back to Python, other threads than the main one, and Windows: there, a line in
    the log says that the call has not come back, and the block goes on.

    Args:
        seconds: of the clock; None or 0 for no limit.
        what: is called, for the line in the log.
    """
    if not seconds:
        yield
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    can_interrupt = in_main_thread and _SIGNAL is not None and hasattr(signal, "pthread_kill")
    finished = threading.Event()

    def watch() -> None:
        # Where there is nothing to interrupt by, something else may still do it.
        wait, told = seconds if can_interrupt else seconds + 5, False
        while not finished.wait(wait):
            if can_interrupt:
                signal.pthread_kill(threading.main_thread().ident, _SIGNAL)
            if not told and (wait == 1.0 or not can_interrupt):
                told = True
                logger.warning(f"{what} has not come back after {seconds:g} seconds and cannot be interrupted now")
            wait = 1.0

    def expire(*_: object) -> None:
        if not finished.is_set():
            raise Stalled

    earlier = signal.signal(_SIGNAL, expire) if can_interrupt else None
    watcher = threading.Thread(target=watch, name="time limit", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            finished.set()
    finally:
        # Reached even if the time is up just between the two.
        finished.set()
        watcher.join()
        if can_interrupt:
            signal.signal(_SIGNAL, earlier)
