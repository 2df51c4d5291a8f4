"""Guards calls of reward functions: names the rows of errors and timeouts, and passes only finite numbers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import signal
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
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

    Args:
        on_error: what to do when a function raises. "raise": a `RewardError` that names the first faulty row, which is
            found by calls with one row each; it names all rows if the call did not return in time, or if the function
            has a true attribute `scores_groups`, since it cannot score single rows. "skip": no row of the call has a
            reward, and the function is not called again.
        limit: seconds that a call may take (see `time_limit`); None or 0 for no limit. An asynchronous function is
            cancelled at an await.
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

        async def scored(**arguments: Any) -> list[float | None]:
            return await self._score(function, arguments)

        def scored_at_once(**arguments: Any) -> list[float | None]:
            return _run_at_once(self._score(function, arguments))

        is_coroutine = inspect.iscoroutinefunction
        guarded = scored if is_coroutine(function) or is_coroutine(type(function).__call__) else scored_at_once
        guarded.__name__ = function_name(function)
        return guarded

    async def _score(self, function: Callable, arguments: dict[str, Any]) -> list[float | None]:
        name, rows = function_name(function), _rows(arguments)
        rewards, error = await self._call(function, arguments)
        if error is not None:
            one_by_one = not isinstance(error, Stalled) and not getattr(function, "scores_groups", False)
            if self.on_error == "raise" and one_by_one:
                for row in rows:
                    _, fault = await self._call(function, row)
                    if fault is not None:
                        self._report(function, [row], fault)
                raise RewardError(
                    f"the reward function {name!r} failed on {len(rows)} responses together, though on none of them "
                    f"alone: {type(error).__name__}: {error}"
                ) from error
            self._report(function, rows, error)
            return [None] * len(rows)
        values = self._values(name, rewards, rows)
        for index, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                logger.warning(f"the reward function {name!r} gave {value} for {_describe(rows[index])}")
                values[index] = None
                self.not_finite.add(index)
        return values

    async def _call(self, function: Callable, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        clock = None
        try:
            with time_limit(self.limit):
                result = function(**arguments)
            if inspect.isawaitable(result):
                clock = asyncio.timeout(self.limit)
                async with clock:
                    result = await result
            return result, None
        except (Exception, Stalled) as error:
            return None, Stalled() if clock is not None and clock.expired() else error

    def _values(self, name: str, rewards: Any, rows: list[dict[str, Any]]) -> list[float | None]:
        """The return value of a function, checked to be a number or None for each response."""
        try:
            values = [None if reward is None else float(reward) for reward in rewards]
        except (TypeError, ValueError):
            values = None
        if values is None or len(values) != len(rows):
            found = f"{len(values)} rewards" if values is not None else f"{str(rewards)[:100]}"
            raise RewardError(
                f"the reward function {name!r} must return one number or None for each of {len(rows)} responses, and "
                f"returned {found}"
            )
        return values

    def _report(self, function: Callable, rows: list[dict[str, Any]], error: BaseException) -> None:
        """Raise a `RewardError` for rows or, where errors are skipped, log it and record that all rows failed."""
        named = list(dict.fromkeys(map(_describe, rows)))
        told = ", ".join(named[:_MOST_NAMED]) + (", ..." if len(named) > _MOST_NAMED else "")
        if isinstance(error, Stalled):
            what = f"did not come back within {self.limit:g} seconds (reward_timeout), given {told}"
        else:
            what = f"failed on {told}: {type(error).__name__}: {error}{_place(function, error)}"
        message = f"the reward function {function_name(function)!r} {what}"
        if self.on_error == "raise":
            raise RewardError(f"{message} (--reward_errors skip trains on without these rewards)") from error
        logger.warning(
            f"{message}; all {len(rows)} responses of the call are without a reward (a function may return None for "
            "the responses that it cannot score)"
        )
        self.failed.update(range(len(rows)))


def function_name(function: Callable) -> str:
    """A reward function's name in metrics."""
    return getattr(function, "__name__", type(function).__name__)


def _place(function: Callable, error: BaseException) -> str:
    """The line of the function's own file that raised the error; empty if it is not known."""
    plain = inspect.unwrap(getattr(function, "reward", function))
    code = getattr(plain, "__code__", None)
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if code and at.filename == code.co_filename]
    return f" ({Path(code.co_filename).name}, line {lines[-1]})" if lines else ""


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


def _describe(row: dict[str, Any]) -> str:
    """Describe a row by its row_id if the dataset has one, otherwise by its prompt."""
    if "row_id" in row:
        return f"row_id {row['row_id'][0]!r}"
    return f"the prompt {str(row['prompts'][0])[:120]!r}"


class Stalled(BaseException):
    """Raised in a call that exceeds its time limit; not an `Exception`, so the function's handlers do not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `Stalled` in the block once its time is up; None or 0 for no limit.

    It interrupts Python code and its blocking calls: sleep, locks, sockets, files, other processes. It cannot
    interrupt native code that does not return to Python, threads other than the main one, or anything on Windows.
    """
    main = threading.main_thread()
    if not seconds or _SIGNAL is None or threading.current_thread() is not main:
        yield
        return
    finished = False

    def expire(*_: object) -> None:
        if not finished:
            raise Stalled

    earlier = signal.signal(_SIGNAL, expire)
    timer = threading.Timer(seconds, signal.pthread_kill, (main.ident, _SIGNAL))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        finished = True
        timer.cancel()
        timer.join()
        signal.signal(_SIGNAL, earlier)
