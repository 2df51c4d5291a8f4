"""Compare an outcome with the expected one, and explain in a sentence what is likely wrong. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

# Relative and absolute tolerances for float64, and for values computed in float32.
FINE, COARSE = (1e-6, 1e-8), (2e-4, 2e-5)
# Errors that do not come from the function, but from its file or its process.
OF_THE_RUN = ("ImportProblem", "Missing", "TimeLimit", "Ended")
NAN_REACHES = (
    "a NaN at a position that does not count has reached the result: take such positions out with masked_fill or "
    "torch.where, as 0 times NaN is NaN"
)
LOG_OF_SIGMOID = (
    "log(sigmoid(x)) or log(1 + exp(-x)) is computed step by step, which is infinite for x of -800: use "
    "torch.nn.functional.logsigmoid"
)
FLOATS = ("float64", "float32", "float16", "bfloat16")

# A difference: a sentence, or the place of a wrong value with the expected value and the function's.
Difference = str | tuple[str, str, str]


def verdict(outcome: dict[str, Any], case: dict[str, Any], *, values: bool = True) -> str | None:
    """None for a correct outcome, otherwise one or two sentences.

    Args:
        outcome: the outcome of the student's function; see `checks.call`.
        case: the case with the `expected` outcome and the outcomes of known `mistakes`, each with its `message`.
        values: False to omit expected and actual values, and say only where the outcome is wrong, and why.
    """
    if "error" in outcome:
        return _error(outcome["error"])
    expected, mistakes = case["expected"], case["mistakes"]
    if case["unordered"]:
        outcome, expected = _sorted(outcome), _sorted(expected)
        mistakes = [{**mistake, "outcome": _sorted(mistake["outcome"])} for mistake in mistakes]
    compared = case["compared"]
    problem = _problem(outcome, expected, compared)
    if problem is None:
        return None
    if isinstance(problem, tuple):
        place, wanted, found = problem
        problem = f"expected {wanted}{place}, got {found}" if values else f"wrong value{place}"
    # If NaN reaches the result, all mistakes look alike.
    if case["special"] == "nan" and _nans(outcome) > _nans(expected):
        return f"{problem}; {NAN_REACHES}"
    reasons = [each["message"] for each in mistakes if _problem(outcome, each["outcome"], compared) is None]
    if not reasons and case["special"] == "far apart" and (_nans(outcome) or "inf'" in str(outcome["output"])):
        reasons = [LOG_OF_SIGMOID]
    return problem + (f"; this is what you get when {', or when '.join(reasons)}" if reasons else "")


def _error(error: dict[str, str]) -> str:
    if error["kind"] == "NotImplementedError":
        return f"not implemented yet: {error['message']}"
    if error["kind"] in OF_THE_RUN:
        return str(error["message"])
    if error["kind"] == "SystemExit":
        return "it ends the program (sys.exit or exit): return a value or raise an error"
    return f"it raises {error['kind']}: {error['message']}"


def _sorted(outcome: dict[str, Any]) -> dict[str, Any]:
    """Sort the losses, if their order has no meaning."""
    output = outcome["output"]
    if not _is_tensor(output):
        return outcome
    return {**outcome, "output": {**output, "$tensor": sorted(output["$tensor"], key=float)}}


def _nans(outcome: dict[str, Any]) -> int:
    return str(outcome).count("'nan'")


def _problem(found: dict[str, Any], wanted: dict[str, Any], compared: list[int] | None) -> Difference | None:
    """The first difference between two outcomes; `compared`: the parts of a returned tuple to compare."""
    problem = _difference(found["output"], wanted["output"], "", compared)
    if problem is None and found["changed"] != wanted["changed"]:
        return f"it changes its argument {', '.join(found['changed'])} in place: work on a new tensor"
    # The gradient of a NaN may or may not be NaN.
    gradients = {} if "'nan'" in str(wanted["output"]) else wanted["gradients"]
    return problem or _first(_gradient(found["gradients"].get(path), own, path) for path, own in gradients.items())


def _first(problems: Iterable[Difference | None]) -> Difference | None:
    return next((problem for problem in problems if problem is not None), None)


def _difference(found: Any, wanted: Any, place: str, compared: list[int] | None = None) -> Difference | None:
    at = f" in the result's {place}" if place else ""
    if _is_tensor(wanted):
        return _tensor_difference(found, wanted, at)
    if isinstance(wanted, list):
        places = range(len(wanted)) if compared is None else compared
        fits = isinstance(found, list) and (len(found) == len(wanted) if compared is None else len(found) > places[-1])
        if not fits:
            return f"expected {len(wanted)} values{at}, got {_described(found)}"
        return _first(_difference(found[i], wanted[i], f"{place}[{i}]") for i in places)
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or _is_tensor(found):
            return f"expected a dict with {', '.join(wanted)}{at}, got {_described(found)}"
        missing = [name for name in wanted if name not in found]
        if missing:
            return f"the dict has no key {missing[0]!r}{at}: it has {', '.join(found) or 'none'}"
        return _first(_difference(found[name], wanted[name], f"{place}[{name!r}]") for name in wanted)
    if isinstance(wanted, float) and isinstance(found, (int, float)):
        same = _close(found, wanted, COARSE)
    else:
        same = found == wanted
    return None if same else (at, repr(wanted), _described(found))


def _tensor_difference(found: Any, wanted: dict[str, Any], at: str) -> Difference | None:
    if not _is_tensor(found):
        return f"expected a tensor{at}, got {_described(found)}"
    if found["shape"] != wanted["shape"]:
        return f"expected the shape {wanted['shape']}{at}, got {found['shape']}"
    if wanted["dtype"] in FLOATS:
        # float32 is accepted for float64. Half precision is not, nor float64 for float32 arguments.
        fits = found["dtype"] in (wanted["dtype"], "float32")
    else:
        # A mask may contain 0 and 1 of any type.
        fits = wanted["dtype"] == "bool" or found["dtype"] not in FLOATS
    if not fits:
        return f"expected the dtype {wanted['dtype']}{at}, got {found['dtype']}"
    tolerance = COARSE if "float32" in (found["dtype"], wanted["dtype"]) else FINE
    for index, (one, other) in enumerate(zip(found["$tensor"], wanted["$tensor"], strict=True)):
        if not _close(one, other, tolerance):
            return f"{_position(index, wanted['shape'])}{at}", _short(other), _short(one)
    return None


def _gradient(found: dict[str, Any] | None, wanted: dict[str, Any] | None, path: str) -> Difference | None:
    if _is_zero(wanted):
        return None if _is_zero(found) else f"the gradient with respect to {path} must be 0, and is not"
    if found is None:
        return (
            f"no gradient reaches {path}: is there a detach(), an item(), a torch.tensor(...) or a no_grad() on the "
            "way?"
        )
    return _tensor_difference(found, wanted, f" in the gradient with respect to {path}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "$tensor" in value


def _is_zero(gradient: dict[str, Any] | None) -> bool:
    return gradient is None or all(value == 0 for value in gradient["$tensor"])


def _close(one: Any, other: Any, tolerance: tuple[float, float]) -> bool:
    one, other = float(one), float(other)
    if math.isnan(other):
        return math.isnan(one)
    return math.isclose(one, other, rel_tol=tolerance[0], abs_tol=tolerance[1])


def _position(index: int, shape: list[int]) -> str:
    places = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        places.append(place)
    return f" at {places[::-1]}" if places else ""


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _described(value: Any) -> str:
    if value is None:
        return "None: is there a return?"
    if _is_tensor(value):
        return f"a tensor of shape {value['shape']}"
    if isinstance(value, dict):
        return value.get("$other", f"a dict with {', '.join(value) or 'nothing'}")
    return f"{len(value)} values" if isinstance(value, list) else repr(value)
