"""What stands between a trainer and its reward functions: errors get a row, and only finite numbers pass."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from trl_ext.trainers.faults import TrainingFault
from trl_ext.trainers.stalls import Stalled, time_limit

logger = logging.getLogger(__name__)

# Arguments by which a function reports to the trainer; a second call for the same rows must not report twice.
_REPORTS = ("log_extra", "log_metric")
# Rows in the message of a call without an end.
_MOST_NAMED = 20


class RewardError(TrainingFault):
    """A reward function failed or did not come back; the message names the function and the rows."""


class RewardGuard:
    """Wraps the reward functions of one trainer and counts what went wrong in the latest rollout.

    A function may return None for a response that it cannot score. A number that is not finite is a fault: it is
    reported with its row, passed on as None, and its row is remembered in `not_finite`. Rows that a function failed on
    are in `failed`. Neither has a reward, whatever other functions say.

    A function that raises is called again with each row by itself, to find those at fault; one with a true attribute
    `scores_groups`, whose rows mean nothing by themselves, has failed on all rows of the call.

    Args:
        on_error: what to do when a function raises: "raise" a `RewardError` that names the rows, or "skip" the rows
            that it fails on, which then have no reward.
        limit: seconds that a call may take (`time_limit` says what can be interrupted); None or 0 for no limit. An
            asynchronous function is cancelled where it awaits. A call without an end fails on all of its rows.
    """

    def __init__(self, on_error: str, limit: float | None = None):
        self.on_error = on_error
        self.limit = limit or None
        self.failed: set[int] = set()
        self.not_finite: set[int] = set()

    def begin(self) -> None:
        """Forget the previous rollout's faults."""
        self.failed = set()
        self.not_finite = set()

    def wrap(self, function: Callable) -> Callable:
        """The function with faults handled; asynchronous where it is."""
        name = function_name(function)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

            async def guarded(**arguments: Any) -> list[float | None]:
                try:
                    rewards = await self._await_within_limit(function, arguments)
                except Stalled:
                    return self._stalled(name, dict(enumerate(self._rows(arguments))))
                except Exception as error:
                    if getattr(function, "scores_groups", False):
                        return self._failed_together(name, arguments, error)
                    rewards = [await self._one_async(function, i, row) for i, row in enumerate(self._rows(arguments))]
                    self._check_joint_failure(name, rewards, arguments, error)
                return self._finite(name, rewards, arguments)
        else:

            def guarded(**arguments: Any) -> list[float | None]:
                try:
                    rewards = self._call_within_limit(function, arguments)
                except Stalled:
                    return self._stalled(name, dict(enumerate(self._rows(arguments))))
                except Exception as error:
                    if getattr(function, "scores_groups", False):
                        return self._failed_together(name, arguments, error)
                    rewards = [self._one(function, i, row) for i, row in enumerate(self._rows(arguments))]
                    self._check_joint_failure(name, rewards, arguments, error)
                return self._finite(name, rewards, arguments)

        guarded.__name__ = name
        return guarded

    def _rows(self, arguments: dict[str, Any]):
        """The arguments of a call for each row by itself."""
        count = len(arguments["prompts"])
        for index in range(count):
            row = {
                name: [value[index]] if isinstance(value, list) and len(value) == count else value
                for name, value in arguments.items()
            }
            yield {**row, **{name: ignore for name in _REPORTS if name in row}}

    def _one(self, function: Callable, index: int, row: dict[str, Any]) -> float | None:
        try:
            return self._call_within_limit(function, row)[0]
        except Stalled:
            return self._stalled(function_name(function), {index: row})[0]
        except Exception as error:
            return self._failed(function_name(function), index, row, error)

    async def _one_async(self, function: Callable, index: int, row: dict[str, Any]) -> float | None:
        try:
            return (await self._await_within_limit(function, row))[0]
        except Stalled:
            return self._stalled(function_name(function), {index: row})[0]
        except Exception as error:
            return self._failed(function_name(function), index, row, error)

    def _call_within_limit(self, function: Callable, arguments: dict[str, Any]):
        with time_limit(self.limit, f"the reward function {function_name(function)!r}"):
            return function(**arguments)

    async def _await_within_limit(self, function: Callable, arguments: dict[str, Any]):
        # One that never awaits holds up the loop, which the time limit can only report.
        with time_limit(self.limit, f"the asynchronous reward function {function_name(function)!r}"):
            try:
                async with asyncio.timeout(self.limit) as clock:
                    return await function(**arguments)
            except TimeoutError:
                if clock.expired():
                    raise Stalled from None
                raise

    def _stalled(self, name: str, rows: dict[int, dict[str, Any]]) -> list[None]:
        """What a call without an end leaves: no reward for its rows, by their indices."""
        message = (
            f"the reward function {name!r} did not come back within {self.limit:g} seconds (reward_timeout), given "
            f"{_list(rows.values())}"
        )
        if self.on_error == "raise":
            raise RewardError(f"{message} (--reward_errors skip trains on without these rewards)")
        logger.warning(message)
        self.failed.update(rows)
        return [None] * len(rows)

    def _failed_together(self, name: str, arguments: dict[str, Any], error: Exception) -> list[None]:
        rows = list(self._rows(arguments))
        message = f"the reward function {name!r} failed on {_list(rows)}: {type(error).__name__}: {error}"
        if self.on_error == "raise":
            raise RewardError(f"{message} (--reward_errors skip trains on without these rewards)") from error
        logger.warning(message)
        self.failed.update(range(len(rows)))
        return [None] * len(rows)

    def _failed(self, name: str, index: int, row: dict[str, Any], error: Exception) -> None:
        message = f"the reward function {name!r} failed on {_describe(row)}: {type(error).__name__}: {error}"
        if self.on_error == "raise":
            raise RewardError(f"{message} (--reward_errors skip trains on without such rows)") from error
        logger.warning(message)
        self.failed.add(index)

    def _check_joint_failure(self, name: str, rewards: list, arguments: dict[str, Any], error: Exception) -> None:
        """An error that no row shows by itself is of the whole call."""
        if self.on_error == "raise":
            count = len(arguments["prompts"])
            raise RewardError(
                f"the reward function {name!r} failed on {count} responses together, though on none of them alone "
                f"(the first is {_describe(next(self._rows(arguments)))}): {type(error).__name__}: {error}"
            ) from error

    def _finite(self, name: str, rewards: list[float | None], arguments: dict[str, Any]) -> list[float | None]:
        values = _numbers(name, rewards, len(arguments["prompts"]))
        for index, row in enumerate(self._rows(arguments)):
            if values[index] is not None and not math.isfinite(values[index]):
                logger.warning(f"the reward function {name!r} gave {values[index]} for {_describe(row)}")
                values[index] = None
                self.not_finite.add(index)
        return values


def _numbers(name: str, rewards: Any, count: int) -> list[float | None]:
    """What a function returned, checked to be a number or None for each response."""
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


def function_name(function: Callable) -> str:
    """What a reward function is called in metrics."""
    return getattr(function, "__name__", type(function).__name__)


def ignore(*arguments: Any) -> None:
    """Stands in for `log_extra` and `log_metric` where what a function reports is not wanted."""


def _list(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as text, each once, and a number for what would be too many."""
    named = list(dict.fromkeys(map(_describe, rows)))
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return f"{', '.join(named[:_MOST_NAMED])}{more}"


def _describe(row: dict[str, Any]) -> str:
    """A row by its row_id where the dataset has one, else by its prompt."""
    if "row_id" in row:
        return f"row_id {row['row_id'][0]!r}"
    return f"the prompt {str(row['prompts'][0])[:120]!r}"
