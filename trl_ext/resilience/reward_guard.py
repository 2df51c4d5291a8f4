"""Guards calls of reward functions: names the rows of errors and timeouts, and passes only finite numbers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from trl_ext.files import brief
from trl_ext.resilience.faults import TrainingFault

logger = logging.getLogger(__name__)


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
        on_error: what to do when a function raises or does not return in time. "raise": a `RewardError` that names the
            rows of the call. "skip": no row of the call has a reward.
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
        name = getattr(function, "__name__", type(function).__name__)

        def scored(**arguments: Any) -> list[float | None]:
            try:
                rewards = _call(function, arguments, self.limit)
            except Exception as error:
                return self._failed(function, name, arguments, error)
            return self._checked(name, arguments, rewards)

        async def scored_later(**arguments: Any) -> list[float | None]:
            clock = asyncio.timeout(self.limit)
            try:
                async with clock:
                    rewards = await function(**arguments)
            except Exception as error:
                return self._failed(function, name, arguments, TimedOut() if clock.expired() else error)
            return self._checked(name, arguments, rewards)

        is_coroutine = inspect.iscoroutinefunction
        guarded = scored_later if is_coroutine(function) or is_coroutine(type(function).__call__) else scored
        guarded.__name__ = name
        return guarded

    def _failed(self, function: Callable, name: str, arguments: dict[str, Any], error: Exception) -> list[None]:
        rows = _described(arguments)
        told = brief(", ".join(dict.fromkeys(rows)), 300)
        if isinstance(error, TimedOut):
            what = f"did not come back within {self.limit:g} seconds (reward_timeout), given {told}"
        else:
            what = f"failed on {told}: {type(error).__name__}: {error}{_place(function, error)}"
        message = f"the reward function {name!r} {what}"
        if self.on_error == "raise":
            raise RewardError(f"{message} (--reward_errors skip trains on without these rewards)") from error
        logger.warning(f"{message}; all {len(rows)} responses of the call are without a reward")
        self.failed.update(range(len(rows)))
        return [None] * len(rows)

    def _checked(self, name: str, arguments: dict[str, Any], rewards: Sequence) -> list[float | None]:
        """The rewards of a call, one finite number or None for each row."""
        rows = _described(arguments)
        try:
            values = [None if reward is None else float(reward) for reward in rewards]
        except (TypeError, ValueError):
            values = []
        if len(values) != len(rows):
            raise RewardError(
                f"the reward function {name!r} must return one number or None for each of {len(rows)} responses, and "
                f"returned {f'{len(values)} rewards' if values else brief(rewards, 100)}"
            )
        for index, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                logger.warning(f"the reward function {name!r} gave {value} for {rows[index]}")
                values[index] = None
                self.not_finite.add(index)
        return values


def _call(function: Callable, arguments: dict[str, Any], limit: float | None) -> Any:
    """Call a function, in a thread if it has a limit; a thread that takes longer is left behind."""
    if limit is None:
        return function(**arguments)
    outcome: Future = Future()
    # A new thread begins with the first device.
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def work() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            outcome.set_result(function(**arguments))
        except BaseException as error:
            outcome.set_exception(error)

    # Not an executor's thread: one that hangs would keep the program from ending.
    threading.Thread(target=work, daemon=True).start()
    wait([outcome], timeout=limit)
    if not outcome.done():
        raise TimedOut
    return outcome.result()


def _described(arguments: dict[str, Any]) -> list[str]:
    """Each row of a call by its row_id if the dataset has one, otherwise by its prompt."""
    if "row_id" in arguments:
        return [f"row_id {row_id!r}" for row_id in arguments["row_id"]]
    return [f"the prompt {str(prompt)[:120]!r}" for prompt in arguments["prompts"]]


def _place(function: Callable, error: Exception) -> str:
    """The line of the function's own file that raised the error; empty if it is not known."""
    code = getattr(inspect.unwrap(getattr(function, "reward", function)), "__code__", None)
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if code and at.filename == code.co_filename]
    return f" ({Path(code.co_filename).name}, line {lines[-1]})" if lines else ""
