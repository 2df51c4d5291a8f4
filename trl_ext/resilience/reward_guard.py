"""Guards calls of reward functions: names the rows of errors and timeouts, and passes only finite numbers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from trl_ext.resilience.faults import TrainingFault

logger = logging.getLogger(__name__)

# Arguments that a function uses to report to the trainer; a second call for the same rows must not report again.
_REPORTS = ("log_extra", "log_metric")
# Most rows that the message names when a whole call fails.
_MOST_NAMED = 20
# Not SIGALRM, which libraries use for their own time limits.
_SIGNAL = getattr(signal, "SIGVTALRM", None)


class RewardError(TrainingFault):
    """A reward function failed or did not return; the message names the function and the rows."""


class RewardGuard:
    """Wraps the reward functions of one trainer and records the faults of the latest rollout.

    A function may return None for a response that it cannot score. A number that is not finite is a fault: it is
    reported with its row and passed on as None, and its row is stored in `not_finite`. Rows on which a function failed
    are in `failed`. Neither kind has a reward, whatever other functions return.

    If a function raises, it is called again with each row separately, to find the faulty ones. A function with a true
    attribute `scores_groups` cannot score separate rows, so it fails on all rows of the call. So does a call that does
    not return.

    Args:
        on_error: what to do when a function raises: "raise" a `RewardError` that names the rows, or "skip" the rows
            on which it fails, which then have no reward.
        limit: seconds that a call may take (see `time_limit` for what can be interrupted); None or 0 for no limit. An
            asynchronous function is cancelled at an await.
    """

    def __init__(self, on_error: str, limit: float | None = None):
        self.on_error = on_error
        self.limit = limit or None
        self.failed: set[int] = set()
        self.not_finite: set[int] = set()

    def begin(self) -> None:
        """Clear the previous rollout's faults."""
        self.failed = set()
        self.not_finite = set()

    def wrap(self, function: Callable) -> Callable:
        """The function with faults handled; asynchronous if the function is."""
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

            async def guarded(**arguments: Any) -> list[float | None]:
                return await self._score(self._await, function, arguments)
        else:

            def guarded(**arguments: Any) -> list[float | None]:
                return _run_at_once(self._score(self._call, function, arguments))

        guarded.__name__ = function_name(function)
        return guarded

    async def _score(self, call: Callable, function: Callable, arguments: dict[str, Any]) -> list[float | None]:
        name, rows = function_name(function), _rows(arguments)
        rewards, error = await call(function, arguments)
        if isinstance(error, Stalled) or (error is not None and getattr(function, "scores_groups", False)):
            self._report(name, dict(enumerate(rows)), error)
            return [None] * len(rows)
        if error is not None:
            rewards = []
            for index, row in enumerate(rows):
                own, fault = await call(function, row)
                if fault is not None:
                    self._report(name, {index: row}, fault)
                rewards.append(None if fault is not None else _numbers(name, own, 1)[0])
            if self.on_error == "raise":
                raise RewardError(
                    f"the reward function {name!r} failed on {len(rows)} responses together, though on none of them "
                    f"alone (the first is {_describe(rows[0])}): {type(error).__name__}: {error}"
                ) from error
        values = _numbers(name, rewards, len(rows))
        for index, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                logger.warning(f"the reward function {name!r} gave {value} for {_describe(rows[index])}")
                values[index] = None
                self.not_finite.add(index)
        return values

    async def _call(self, function: Callable, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        try:
            with time_limit(self.limit, f"the reward function {function_name(function)!r}"):
                return function(**arguments), None
        except (Exception, Stalled) as error:
            return None, error

    async def _await(self, function: Callable, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        clock = None
        try:
            # A function that never awaits blocks the event loop, which the time limit can only report.
            with time_limit(self.limit, f"the asynchronous reward function {function_name(function)!r}"):
                async with asyncio.timeout(self.limit) as clock:
                    return await function(**arguments), None
        except (Exception, Stalled) as error:
            return None, Stalled() if clock is not None and clock.expired() else error

    def _report(self, name: str, rows: dict[int, dict[str, Any]], error: BaseException) -> None:
        """Raise a `RewardError` for rows, by their indices, or log it and record that they failed."""
        named = list(dict.fromkeys(map(_describe, rows.values())))
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        told = ", ".join(named[:_MOST_NAMED]) + more
        if isinstance(error, Stalled):
            what = f"did not come back within {self.limit:g} seconds (reward_timeout), given {told}"
        else:
            what = f"failed on {told}: {type(error).__name__}: {error}"
        message = f"the reward function {name!r} {what}"
        if self.on_error == "raise":
            raise RewardError(f"{message} (--reward_errors skip trains on without these rewards)") from error
        logger.warning(message)
        self.failed.update(rows)


def function_name(function: Callable) -> str:
    """A reward function's name in metrics."""
    return getattr(function, "__name__", type(function).__name__)


def ignore(*arguments: Any) -> None:
    """Replaces `log_extra` and `log_metric` where a function's reports are not wanted."""


def _run_at_once(coroutine: Coroutine) -> Any:
    """The result of a coroutine that awaits nothing but other such coroutines; needs no event loop."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise RuntimeError("the coroutine waits for an event loop")


def _rows(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Split the arguments of a call into those for each row."""
    count = len(arguments["prompts"])
    rows = []
    for index in range(count):
        row = {
            name: [value[index]] if isinstance(value, list) and len(value) == count else value
            for name, value in arguments.items()
        }
        rows.append({**row, **{name: ignore for name in _REPORTS if name in row}})
    return rows


def _numbers(name: str, rewards: Any, count: int) -> list[float | None]:
    """The return value of a function, checked to be a number or None for each response."""
    try:
        values = [None if reward is None else float(reward) for reward in rewards]
    except (TypeError, ValueError):
        values = None
    if values is None or len(values) != count:
        found = f"{len(values)} rewards" if values is not None else f"{str(rewards)[:100]}"
        raise RewardError(
            f"the reward function {name!r} must return one number or None for each of {count} responses, "
            f"and returned {found}"
        )
    return values


def _describe(row: dict[str, Any]) -> str:
    """Describe a row by its row_id if the dataset has one, otherwise by its prompt."""
    if "row_id" in row:
        return f"row_id {row['row_id'][0]!r}"
    return f"the prompt {str(row['prompts'][0])[:120]!r}"


class Stalled(BaseException):
    """Raised in a call that exceeds its time limit; not an `Exception`, so the function's handlers do not catch it."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raise `Stalled` in the block once its time is up.

    It interrupts Python code and its blocking calls: sleep, locks, sockets, files, other processes. It cannot
    interrupt native code that does not return to Python, threads other than the main one, or anything on Windows. In
    those cases it only logs that the call has not returned.

    Args:
        seconds: wall-clock limit; None or 0 for no limit.
        what: the name of the call, for the log.
    """
    if not seconds:
        yield
        return
    main = threading.main_thread()
    can_interrupt = threading.current_thread() is main and _SIGNAL is not None and hasattr(signal, "pthread_kill")
    finished = threading.Event()

    def watch() -> None:
        # If nothing can be interrupted from here, the caller may still cancel the call.
        if not finished.wait(seconds if can_interrupt else seconds + 5):
            logger.warning(f"{what} has not come back after {seconds:g} seconds")
            if can_interrupt:
                signal.pthread_kill(main.ident, _SIGNAL)

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
        # Runs even if the time is up exactly between the two.
        finished.set()
        watcher.join()
        if can_interrupt:
            signal.signal(_SIGNAL, earlier)
