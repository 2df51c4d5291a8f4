"""Test cases with the outcomes of the correct function and of its known mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from trl_ext.assignment.catalog.catalog import mistakes_of
from trl_ext.assignment.catalog.drawing import Draw
from trl_ext.assignment.catalog.task import Task
from trl_ext.assignment.runtime.checks import call, encode
from trl_ext.assignment.runtime.verdicts import verdict

# The module with the classes of arguments.
CLASSES = "trl_ext.losses"
ABOUT = {
    "": "at random",
    "nan": "NaN at positions that do not count",
    "empty row": "a row without a token that counts",
    "equal": "a group of equal rewards in float32",
    "far apart": "margins of 800 and more in either direction",
    "float32": "float32",
}
# Text arguments that select a function's behaviour. All others are its input.
OPTIONS = ("kind", "loss_type")


def build_cases(given: Task, seed: int, count: int, *, others: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Build the cases of a function: `count` ordinary ones, the special ones, and one in float32.

    The arguments of each case differ from those of all others, and from those of `others`, which students know.

    Raises:
        ValueError: the library's own function fails on a case, or there are fewer than `count` different cases.
    """
    wanted = [(index, "") for index in range(count)]
    wanted += [(100 + index, special) for special in given.special for index in range(min(given.variants, 3))]
    wanted += [(200, "float32")] if given.in_float32 else []
    known = [case["arguments"] for case in others]
    cases = []
    for index, special in wanted:
        attempts = (_case(given, Draw(seed, index, special, attempt)) for attempt in range(100))
        case = next((case for case in attempts if case["arguments"] not in known), None)
        if case is None:
            raise ValueError(f"{given.name}: no more than {len(known)} different cases; ask for fewer")
        known.append(case["arguments"])
        cases.append(_with_outcomes(given, case))
    return cases


def uncaught(given: Task, cases: list[dict[str, Any]]) -> list[str]:
    """Messages of the mistakes whose outcome is correct on every case."""
    caught = {mistake["message"] for case in cases for mistake in case["mistakes"]}
    return [message for message in mistakes_of(given.name) if message not in caught]


def _case(given: Task, draw: Draw) -> dict[str, Any]:
    arguments = given.arguments(draw)
    # The grader prints this: students must not see the texts of hidden cases.
    options = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if isinstance(value, (bool, int, float)) or name in OPTIONS
    ]
    return {
        "about": ", ".join([ABOUT[draw.special], *options[:4]]),
        "arguments": encode(arguments),
        "special": draw.special,
        "compared": given.compared,
        "unordered": given.unordered,
        "own_backward": given.own_backward,
    }


def _with_outcomes(given: Task, case: dict[str, Any]) -> dict[str, Any]:
    expected = call(given.function, case, CLASSES)
    if "error" in expected:
        raise ValueError(f"{given.name} fails on its own case: {expected['error']['message']}")
    case = {**case, "expected": expected, "mistakes": []}
    mistakes = []
    for message, wrong in mistakes_of(given.name).items():
        outcome = call(partial(wrong, given.function), case, CLASSES)
        # Omit mistakes that raise an error, which has its own message, and mistakes whose outcome is correct.
        if "error" not in outcome and verdict(outcome, case) is not None:
            mistakes.append({"message": message, "outcome": outcome})
    return {**case, "mistakes": mistakes}
