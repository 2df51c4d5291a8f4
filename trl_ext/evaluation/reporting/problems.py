"""What of a run's files is damaged: every field that the report would show and cannot, by file and field."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trl_ext.evaluation.reporting.curves import HELD_OUT_COLUMNS, TRAINING_TITLES
from trl_ext.evaluation.reporting.generations import OUTCOMES
from trl_ext.evaluation.reporting.runs import RESULTS_NAME, Problem, Run
from trl_ext.evaluation.reporting.values import number, pick

Fault = tuple[str, str]
Check = Callable[[Any, str], Iterable[Fault]]
# Rounding may put the end of an interval on the other side of its figure.
TOLERANCE = 1e-9
MAX_SHOWN = 40


def find_problems(run: Run) -> list[Problem]:
    """The damage in a run's files: lines that cannot be read, then fields; what is missing as a whole is no damage."""
    names = (*TRAINING_TITLES, *HELD_OUT_COLUMNS)
    metrics = {*names, *(f"eval_{name}" for name in names), "seconds"}
    return [
        *run.problems,
        *(Problem(RESULTS_NAME, field, fault) for field, fault in RESULTS(run.results, "")),
        *_of_rows("metrics.jsonl", run.metrics, "step", lambda name: _number if name in metrics else _finite),
        *_of_rows("generations.jsonl", run.generations, "row_id", _of_generation),
        *_of_rows("reward_mistakes.jsonl", run.mistakes, "row_id", _of_mistake),
    ]


def _fields(checks: Mapping[str, Check], required: Sequence[str] = ()) -> Check:
    """A dictionary with checks of its fields, of which only the `required` must be there."""

    def check(value: Any, path: str) -> Iterator[Fault]:
        if not isinstance(value, dict):
            yield path, f"{_shown(value)}, not an object"
            return
        for name, check_field in checks.items():
            where = f"{path}.{name}" if path else name
            if name in value:
                yield from check_field(value[name], where)
            elif name in required:
                yield where, "missing"

    return check


def _each(check: Check) -> Check:
    """A dictionary or a list of which every entry is checked."""

    def check_all(value: Any, path: str) -> Iterator[Fault]:
        if not isinstance(value, (dict, list)):
            yield path, f"{_shown(value)}, neither an object nor a list"
            return
        for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from check(entry, f"{path}.{name}")

    return check_all


def _number(value: Any, path: str) -> Iterator[Fault]:
    if number(value) is None:
        yield path, f"{_shown(value)}, not a finite number"


def _finite(value: Any, path: str) -> Iterator[Fault]:
    """Of a metric that the report does not know: it may be anything but what a NaN becomes."""
    if value is None or isinstance(value, float):
        yield from _number(value, path)


def _optional(check: Check) -> Check:
    return lambda value, path: () if value is None else check(value, path)


def _text(value: Any, path: str) -> Iterator[Fault]:
    if not isinstance(value, str):
        yield path, f"{_shown(value)}, not text"


def _estimate(name: str, **more: Check) -> Check:
    """A figure called `name`, its interval, and the number of rows that it is over."""
    names = (name, "low", "high", "n")
    check_fields = _fields({**dict.fromkeys(names, _number), **more}, required=(name,))

    def check(value: Any, path: str) -> Iterator[Fault]:
        yield from check_fields(value, path)
        figure, low, high = (number(value, key) for key in (name, "low", "high"))
        if None not in (figure, low, high) and not low - TOLERANCE <= figure <= high + TOLERANCE:
            yield path, f"{figure:g} is not in its interval, {low:g} to {high:g}"

    return check


def _of_pairs(check: Check) -> Check:
    """Shares of no pairs at all are null."""
    return lambda value, path: () if pick(value, "n") == 0 else check(value, path)


_NUMBERS_OF_RUN = ("optimizer_steps", "seed", "processes", "training_seconds", "total_seconds")
_OF_TEXTS = (
    "mean_tokens",
    "distinct_1",
    "distinct_2",
    "unique_token_ratio",
    "dominant_token_fraction",
    "repetition",
    "compression_ratio",
    "empty_fraction",
    "truncated_fraction",
)
_TEXTS_OF_RUN = ("objective", "model", "dataset", "weights", "device", "settings_digest")
# Null where there is nothing to measure, as the repetition of responses that are all empty.
_OF_RESPONSES = _fields(dict.fromkeys(_OF_TEXTS, _optional(_number)))
_BIN = _of_pairs(_fields(dict.fromkeys(("low", "high", "n", "confidence", "accuracy"), _number)))
_RANKINGS = _fields({"n": _number, "reference_corrected": _estimate("accuracy", ties=_number)})
_CALIBRATION = {**dict.fromkeys(("ties", "margin", "nll", "brier", "ece"), _number), "calibration": _each(_BIN)}
_ACCURACY = _fields({"accuracy": _estimate("mean")})
_SCORES = _fields({"policy": _number, "base": _number})
# Everything of results.json that the report shows.
RESULTS = _fields(
    {
        "run": _fields(
            {**dict.fromkeys(_NUMBERS_OF_RUN, _optional(_number)), **dict.fromkeys(_TEXTS_OF_RUN, _optional(_text))}
        ),
        "win_rate": _optional(
            _fields({"half": _estimate("rate"), "agreed": _estimate("rate"), "n_errors": _number}, ("half", "agreed"))
        ),
        "score": _optional(
            _fields({"policy": _number, "base": _number, "gain": _estimate("mean"), "by_kind": _each(_SCORES)})
        ),
        "rewards": _optional(_each(_fields({"gain": _estimate("mean")}))),
        "kl": _optional(_estimate("mean")),
        "preferences": _optional(_fields({"after": _optional(_RANKINGS)})),
        "generations": _optional(_each(_OF_RESPONSES)),
        "reasoning": _optional(_fields({"accuracy": _estimate("mean"), "after": _each(_ACCURACY)})),
        "pairs": _optional(_estimate("accuracy", **_CALIBRATION)),
        "true_order": _optional(_of_pairs(_estimate("accuracy", label_agreement=_number))),
    }
)


def _of_generation(name: str) -> Check | None:
    if name in ("score", "generated_num_tokens", "base_score", "base_generated_num_tokens"):
        return _optional(_number)
    if name.startswith(("reward/", "base_reward/")):
        return _optional(_number)
    return {"outcome": _optional(_outcome), "finished": _optional(_flag), "base_finished": _optional(_flag)}.get(name)


def _of_mistake(name: str) -> Check | None:
    return _number if name in ("chosen_score", "rejected_score") else None


def _outcome(value: Any, path: str) -> Iterator[Fault]:
    if not isinstance(value, str) or value not in OUTCOMES:
        yield path, f"{_shown(value)}, none of {', '.join(OUTCOMES)}"


def _flag(value: Any, path: str) -> Iterator[Fault]:
    if not isinstance(value, bool):
        yield path, f"{_shown(value)}, neither true nor false"


def _of_rows(
    file: str, rows: Iterable[Mapping[str, Any]], key: str, check_of: Callable[[str], Check | None]
) -> Iterator[Problem]:
    """Each damaged field of the rows once, with how often it is damaged and the first place, by the rows' `key`."""
    found: dict[str, list[tuple[Any, str]]] = {}
    check_of = functools.cache(check_of)
    for row in rows:
        for name, value in row.items():
            check = check_of(name)
            for field, fault in check(value, name) if check else ():
                found.setdefault(field, []).append((row.get(key), fault))
    for field, faults in found.items():
        (place, fault), times = faults[0], len(faults)
        where = f"{key} {place:g}" if number(place) is not None else f"{key} {_shown(place)}"
        yield Problem(file, field, f"{fault}; at {where}" if times == 1 else f"{fault}; first of {times} at {where}")


def _shown(value: Any) -> str:
    """A value as JSON has it, a long one cut; for what holds others, what it is."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
