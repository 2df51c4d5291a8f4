"""Guards calls of reward functions: names the rows of errors and timeouts, and passes only finite numbers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from trl_ext.files import brief
from trl_ext.resilience.faults import TrainingFault

logger = logging.getLogger(__name__)

Row = dict[str, Any]
# What a function returned, or what it raised.
Outcome = tuple[Any, Exception | None]


class RewardError(TrainingFault):
    """A reward function failed or did not return; the message names the function and the rows."""


class TimedOut(Exception):
    """A reward function did not return in time."""


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
        limit: seconds that a call may take; None or 0 for no limit. With a limit, a function runs in a thread, which
            is left behind when the time is up; an asynchronous function is cancelled at an await.
    """

    def __init__(self, on_error: str, limit: float | None = None):
        self.on_error = on_error
        self.limit = limit or None
        self.begin()

    def begin(self) -> None:
        """Clear the previous rollout's faults."""
        self.failed: set[int] = set()
        self.not_finite: set[int] = set()

    def wrap(self, function: Callable) -> Callable:
        """The function with faults handled; asynchronous if the function is."""

        def scored(**arguments: Any) -> list[float | None]:
            rows, outcome = _rows(arguments), _call(function, arguments, self.limit)
            for row in self._suspects(function, rows, outcome):
                self._raise_if_failed(function, [row], _call(function, row, self.limit))
            return self._rewards(function, rows, outcome)

        async def scored_later(**arguments: Any) -> list[float | None]:
            rows, outcome = _rows(arguments), await _await(function, arguments, self.limit)
            for row in self._suspects(function, rows, outcome):
                self._raise_if_failed(function, [row], await _await(function, row, self.limit))
            return self._rewards(function, rows, outcome)

        is_coroutine = inspect.iscoroutinefunction
        guarded = scored_later if is_coroutine(function) or is_coroutine(type(function).__call__) else scored
        guarded.__name__ = function_name(function)
        return guarded

    def _suspects(self, function: Callable, rows: list[Row], outcome: Outcome) -> list[Row]:
        """The rows to call a function with, one by one, to find the first on which it fails."""
        _, error = outcome
        whole = isinstance(error, TimedOut) or getattr(function, "scores_groups", False)
        return [] if error is None or self.on_error == "skip" or whole else rows

    def _raise_if_failed(self, function: Callable, rows: list[Row], outcome: Outcome) -> None:
        _, error = outcome
        if error is not None and self.on_error == "raise":
            message = self._message(function, rows, error)
            raise RewardError(f"{message} (--reward_errors skip trains on without these rewards)") from error

    def _rewards(self, function: Callable, rows: list[Row], outcome: Outcome) -> list[float | None]:
        """The rewards of a call, one finite number or None for each row."""
        self._raise_if_failed(function, rows, outcome)
        rewards, error = outcome
        if error is not None:
            logger.warning(
                f"{self._message(function, rows, error)}; all {len(rows)} responses of the call are without a reward "
                "(a function may return None for the responses that it cannot score)"
            )
            self.failed.update(range(len(rows)))
            return [None] * len(rows)
        name = function_name(function)
        try:
            values = [None if reward is None else float(reward) for reward in rewards]
        except (TypeError, ValueError):
            values = None
        if values is None or len(values) != len(rows):
            found = f"{len(values)} rewards" if values is not None else brief(rewards, 100)
            raise RewardError(
                f"the reward function {name!r} must return one number or None for each of {len(rows)} responses, and "
                f"returned {found}"
            )
        for index, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                logger.warning(f"the reward function {name!r} gave {value} for {_describe(rows[index])}")
                values[index] = None
                self.not_finite.add(index)
        return values

    def _message(self, function: Callable, rows: list[Row], error: Exception) -> str:
        told = brief(", ".join(dict.fromkeys(map(_describe, rows))), 1000)
        if isinstance(error, TimedOut):
            what = f"did not come back within {self.limit:g} seconds (reward_timeout), given {told}"
        else:
            # On none of them alone: that was tried.
            tried = len(rows) > 1 and self._suspects(function, rows, (None, error))
            together = f"{len(rows)} responses together: " if tried else ""
            what = f"failed on {together}{told}: {type(error).__name__}: {error}{_place(function, error)}"
        return f"the reward function {function_name(function)!r} {what}"


def function_name(function: Callable) -> str:
    """A reward function's name in metrics."""
    return getattr(function, "__name__", type(function).__name__)


def ignore(*arguments: Any) -> None:
    """Replaces `log_extra` and `log_metric` where a function's reports are not wanted."""


def _call(function: Callable, arguments: Row, limit: float | None) -> Outcome:
    """Call a function, in a thread if it has a limit; a thread that takes longer is left behind."""
    outcome: Future = Future()
    # A new thread begins with the first device.
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def work() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            outcome.set_result((function(**arguments), None))
        except Exception as error:
            outcome.set_result((None, error))
        except BaseException as error:
            outcome.set_exception(error)

    if limit is None:
        work()
    else:
        # Not an executor's thread: one that hangs would keep the program from ending.
        threading.Thread(target=work, daemon=True).start()
        wait([outcome], timeout=limit)
    return outcome.result() if outcome.done() else (None, TimedOut())


async def _await(function: Callable, arguments: Row, limit: float | None) -> Outcome:
    """Await a function, for as long as its limit allows."""
    clock = asyncio.timeout(limit)
    try:
        async with clock:
            return await function(**arguments), None
    except Exception as error:
        return None, TimedOut() if clock.expired() else error


def _rows(arguments: Row) -> list[Row]:
    """Split the arguments of a call into those for each row, which do not report to the trainer again."""
    count = len(arguments["prompts"])
    lists = {name: value for name, value in arguments.items() if isinstance(value, list) and len(value) == count}
    shared = arguments | {name: ignore for name in ("log_extra", "log_metric") if name in arguments}
    return [shared | {name: [value[index]] for name, value in lists.items()} for index in range(count)]


def _describe(row: Row) -> str:
    """Describe a row by its row_id if the dataset has one, otherwise by its prompt."""
    return f"row_id {row['row_id'][0]!r}" if "row_id" in row else f"the prompt {str(row['prompts'][0])[:120]!r}"


def _place(function: Callable, error: Exception) -> str:
    """The line of the function's own file that raised the error; empty if it is not known."""
    plain = inspect.unwrap(getattr(function, "reward", function))
    code = getattr(plain, "__code__", None)
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if code and at.filename == code.co_filename]
    return f" ({Path(code.co_filename).name}, line {lines[-1]})" if lines else ""
