"""Test cases with the outcomes of the correct function and of its known mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from trl_ext.assignment.catalog.catalog import mistakes_of
from trl_ext.assignment.catalog.drawing import Draw
from trl_ext.assignment.catalog.task import Task
from trl_ext.assignment.runtime.checks import call, encode
from trl_ext.assignment.runtime.verdicts import verdict

# The module with the classes of arguments.
CLASSES = "trl_ext.losses"
ABOUT = {
    "nan": "NaN at positions that do not count",
    "empty row": "a row without a token that counts",
    "equal": "a group of equal rewards in float32",
    "far apart": "margins of 800 and more in either direction",
}
# Text arguments that select a function's behaviour. All others are its input.
OPTIONS = ("kind", "loss_type")


def build_cases(given: Task, seed: int, count: int, *, others: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Build the cases of a function: `count` ordinary ones, the special ones, and one in float32.

    The arguments of each case differ from those of all others, and from those of `others`, which students know.

    Raises:
        ValueError: the library's own function fails on a case, or there are fewer than `count` different cases.
    """
    wanted = [("at random", index, "") for index in range(count)]
    for special in given.special:
        wanted += [(ABOUT[special], 100 + index, special) for index in range(min(given.variants, 3))]
    wanted += [("float32", 200, "")] if given.in_float32 else []
    known = [case["arguments"] for case in others]
    cases = []
    for about, index, special in wanted:
        case = _new_case(given, about, (seed, index, special), known)
        known.append(case["arguments"])
        cases.append(_with_outcomes(given, case))
    return cases


def uncaught(given: Task, cases: list[dict[str, Any]]) -> list[str]:
    """Messages of the mistakes whose outcome is correct on every case."""
    caught = {mistake["message"] for case in cases for mistake in case["mistakes"]}
    return [message for message in mistakes_of(given.name) if message not in caught]


def _new_case(given: Task, about: str, drawn: tuple[int, int, str], known: list[dict[str, Any]]) -> dict[str, Any]:
    """The first case whose arguments are new."""
    for attempt in range(100):
        case = _case(given, about, Draw(*drawn, attempt))
        if case["arguments"] not in known:
            return case
    raise ValueError(f"{given.name}: no more than {len(known)} different cases; ask for fewer")


def _case(given: Task, about: str, draw: Draw) -> dict[str, Any]:
    arguments = given.arguments(draw)
    plain = {name: value for name, value in arguments.items() if isinstance(value, (bool, int, float, str))}
    texts = [name for name, value in plain.items() if isinstance(value, str) and name not in OPTIONS]
    options = [f"{name}={value!r}" for name, value in plain.items() if name not in texts]
    encoded = encode(arguments)
    case: dict[str, Any] = {
        "about": ", ".join([about, *options[:4]]),
        "arguments": _in_float32(encoded) if about == "float32" else encoded,
    }
    if texts:
        # Separate from `about`, which the grader prints: students must not see the texts of hidden cases.
        case["texts"] = ", ".join(f"{name}={plain[name]!r}" for name in texts)
    settings = {
        "special": draw.special,
        "compared": given.compared,
        "unordered": given.unordered,
        "own_backward": given.own_backward,
    }
    return case | {name: value for name, value in settings.items() if value}


def _with_outcomes(given: Task, case: dict[str, Any]) -> dict[str, Any]:
    expected = _call(given.function, case)
    if "error" in expected:
        raise ValueError(f"{given.name} fails on its own case: {expected['error']['message']}")
    case = {**case, "expected": expected, "mistakes": []}
    mistakes = []
    for message, wrong in mistakes_of(given.name).items():
        outcome = _call(partial(wrong, given.function), case)
        # Omit mistakes that raise an error, which has its own message, and mistakes whose outcome is correct.
        if "error" not in outcome and verdict(outcome, case) is not None:
            mistakes.append({"message": message, "outcome": outcome})
    return {**case, "mistakes": mistakes}


def _call(function: Callable, case: dict[str, Any]) -> dict[str, Any]:
    threads = torch.get_num_threads()
    # Several threads add in a different order, which changes the last bits of sums.
    torch.set_num_threads(1)
    try:
        return call(function, case, CLASSES)
    finally:
        torch.set_num_threads(threads)


def _in_float32(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_float32(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("dtype") == "float64":
        return {**value, "dtype": "float32"}
    return {name: _in_float32(item) for name, item in value.items()}
