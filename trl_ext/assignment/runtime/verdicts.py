"""Compare an outcome with the expected one, and explain in a sentence what is likely wrong. Plain Python."""

from __future__ import annotations

import math
import re
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


# Text around the description of a wrong value, and its replacement if values are hidden.
_VALUES = re.compile("\x02(.*?)\x03(.*?)\x04", re.DOTALL)


def verdict(outcome: dict[str, Any], case: dict[str, Any], *, values: bool = True) -> str | None:
    """None for a correct outcome, otherwise one or two sentences.

    Args:
        outcome: the outcome of the student's function; see `checks.call`.
        case: the case with the `expected` outcome and the outcomes of known `mistakes`, each with its `message`.
        values: False to omit expected and actual values, and say only where the outcome is wrong, and why.
    """
    found = _verdict(outcome, case)
    return None if found is None else _VALUES.sub(r"\1" if values else r"\2", found)


def _wrong(expected: str, got: str, place: str) -> str:
    return f"\x02expected {expected}{place}, got {got}\x03wrong value{place}\x04"


def _verdict(outcome: dict[str, Any], case: dict[str, Any]) -> str | None:
    expected = case["expected"]
    if "error" in outcome:
        return _error(outcome["error"])
    if case.get("unordered"):
        outcome, expected = _sorted(outcome), _sorted(expected)
    compared = case.get("compared")
    problem = _difference(outcome["output"], expected["output"], "", compared)
    if problem is None and outcome["changed"]:
        return f"it changes its argument {outcome['changed'][0]} in place: work on a new tensor"
    if problem is None:
        problem = _gradient_difference(outcome["gradients"], _known(expected, compared))
    if problem is None:
        return None
    # If NaN reaches the result, all mistakes look alike; they are told apart only if some number is wrong too.
    blind = case.get("special") == "nan" and _nans(outcome, compared) > _nans(expected, compared)
    reasons = []
    for mistake in case.get("mistakes", []):
        other = _sorted(mistake["outcome"]) if case.get("unordered") else mistake["outcome"]
        if _same(outcome, other, compared) and not (blind and _is_right_but_for_nan(other, expected)):
            reasons.append(mistake["message"])
    if not reasons and case.get("special") == "far apart" and re.search("'-?(nan|inf)'", str(outcome["output"])):
        reasons = [LOG_OF_SIGMOID]
    if reasons:
        return f"{problem}; this is what you get when {', or when '.join(reasons)}"
    return f"{problem}{_guess(outcome, expected, case)}"


def differs(outcome: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether an outcome differs from the expected one."""
    return verdict(outcome, {**case, "mistakes": []}) is not None


def _sorted(outcome: dict[str, Any]) -> dict[str, Any]:
    """Sort the losses, if their order has no meaning."""
    output = outcome["output"]
    if not _is_tensor(output):
        return outcome
    return {**outcome, "output": {**output, "$tensor": sorted(output["$tensor"], key=float)}}


def _nans(outcome: dict[str, Any], compared: list[int] | None) -> int:
    """Number of NaNs in the compared parts of the output."""
    output = outcome["output"]
    if compared is not None and isinstance(output, list):
        output = [part for index, part in enumerate(output) if index in compared]
    return str(output).count("'nan'")


def _is_right_but_for_nan(outcome: dict[str, Any], expected: dict[str, Any]) -> bool:
    found, wanted = outcome["output"], expected["output"]
    if not (_is_tensor(found) and _is_tensor(wanted) and found["shape"] == wanted["shape"]):
        return False
    pairs = zip(found["$tensor"], wanted["$tensor"], strict=True)
    return all(one == "nan" or _close(one, other, COARSE) for one, other in pairs)


def _known(expected: dict[str, Any], compared: list[int] | None) -> dict[str, Any]:
    """The gradients to compare: none if the output has a NaN, whose gradient may or may not be NaN."""
    return {} if _nans(expected, compared) else expected["gradients"]


def _error(error: dict[str, str]) -> str:
    if error["kind"] == "NotImplementedError":
        return f"not implemented yet: {error['message']}"
    if error["kind"] in OF_THE_RUN:
        return error["message"]
    if error["kind"] == "SystemExit":
        return "it ends the program (sys.exit or exit): return a value or raise an error"
    return f"it raises {error['kind']}: {error['message']}"


def _same(outcome: dict[str, Any], other: dict[str, Any], compared: list[int] | None) -> bool:
    if "error" in other or outcome["changed"] != other["changed"]:
        return False
    if _difference(outcome["output"], other["output"], "", compared) is not None:
        return False
    return _gradient_difference(outcome["gradients"], _known(other, compared)) is None


def _guess(outcome: dict[str, Any], expected: dict[str, Any], case: dict[str, Any]) -> str:
    if case.get("special") == "nan" and "nan" in str(outcome):
        return f"; {NAN_REACHES}"
    found, wanted = outcome["output"], expected["output"]
    if _is_tensor(found) and _is_tensor(wanted) and found["shape"] == wanted["shape"]:
        ratio = _ratio(found["$tensor"], wanted["$tensor"])
        if ratio is not None:
            return f"; every value is \x02{ratio:.6g} times\x03a multiple of\x04 the expected one"
    return ""


def _ratio(found: list, wanted: list) -> float | None:
    """The factor between all values, if it is the same for all."""
    pairs = [(one, other) for one, other in zip(found, wanted, strict=True) if other not in (0, "nan")]
    if len(pairs) < 2 or any(isinstance(value, (str, bool)) for pair in pairs for value in pair):
        return None
    ratios = [one / other for one, other in pairs]
    if ratios[0] == 0 or math.isclose(ratios[0], 1, rel_tol=1e-4):
        return None
    return ratios[0] if all(math.isclose(r, ratios[0], rel_tol=1e-4) for r in ratios) else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "$tensor" in value


def _difference(found: Any, wanted: Any, place: str, compared: list[int] | None = None) -> str | None:
    """The first difference; None if there is none. `compared`: the parts of a tuple to compare."""
    at = f" in the result's {place}" if place else ""
    if _is_tensor(wanted):
        return _tensor_difference(found, wanted, at)
    if _is_tensor(found) and isinstance(wanted, (int, float)) and found["shape"] == []:
        found = found["$tensor"][0]
    if isinstance(wanted, list):
        fewest = len(wanted) if compared is None else max(compared) + 1
        if not isinstance(found, list) or len(found) < fewest or (compared is None and len(found) > fewest):
            return f"expected {len(wanted)} values{at}, got {_described(found)}{_if_none(found)}"
        places = range(len(wanted)) if compared is None else compared
        return _first(_difference(found[i], wanted[i], f"{place}[{i}]") for i in places)
    if isinstance(wanted, dict) and "$number" not in wanted:
        if not isinstance(found, dict) or _is_tensor(found):
            return f"expected a dict with {', '.join(wanted)}{at}, got {_described(found)}{_if_none(found)}"
        missing = [name for name in wanted if name not in found]
        if missing:
            return f"the dict has no key {missing[0]!r}{at}: it has {', '.join(found) or 'none'}"
        return _first(_difference(found[name], wanted[name], f"{place}[{name!r}]") for name in wanted)
    if isinstance(wanted, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        same = math.isclose(found, wanted, rel_tol=COARSE[0], abs_tol=COARSE[1])
    else:
        same = found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
    return None if same else _wrong(repr(wanted), _described(found), at)


def _first(problems) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _tensor_difference(found: Any, wanted: dict[str, Any], at: str) -> str | None:
    if found is None:
        return f"expected a tensor{at}, got None: is there a return?"
    if not _is_tensor(found):
        return f"expected a tensor{at}, got {_described(found)}"
    if found["shape"] != wanted["shape"]:
        return f"expected the shape {wanted['shape']}{at}, got {found['shape']}"
    # A mask may contain 0 and 1 of any type.
    if wanted["dtype"] != "bool" and _kind(found["dtype"]) != _kind(wanted["dtype"]):
        return f"expected the dtype {wanted['dtype']}{at}, got {found['dtype']}"
    coarse = found["dtype"] == "float32" or wanted["dtype"] == "float32"
    # float32 is accepted for float64. Half precision is not, nor float64 for float32 arguments.
    if wanted["dtype"] in FLOATS and found["dtype"] not in (wanted["dtype"], "float32"):
        return f"expected the dtype {wanted['dtype']}{at}, got {found['dtype']}"
    for index, (one, other) in enumerate(zip(found["$tensor"], wanted["$tensor"], strict=True)):
        if not _close(one, other, COARSE if coarse else FINE):
            where = f"{_position(index, wanted['shape'])}{at}"
            return _wrong(_short(other), _short(one), where)
    if wanted.get("grad") and not found.get("grad"):
        return (
            f"the value{at} is right and has no gradient: is there a detach(), an item(), a torch.tensor(...) or a "
            "no_grad() on the way?"
        )
    return None


def _gradient_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    for path, gradient in wanted.items():
        own = found.get(path)
        if _is_zero(own) and _is_zero(gradient):
            continue
        if _is_zero(gradient):
            return f"the gradient with respect to {path} must be 0, and is not"
        if own is None:
            return f"no gradient reaches {path}"
        problem = _tensor_difference({**own, "grad": True}, gradient, "")
        if problem is not None:
            return f"gradient with respect to {path}: {problem}"
    return None


def _is_zero(gradient: dict[str, Any] | None) -> bool:
    return gradient is None or all(value == 0 for value in gradient["$tensor"])


def _kind(dtype: str) -> str:
    if dtype in FLOATS:
        return "float"
    return "bool" if dtype == "bool" else "integer"


def _close(one: Any, other: Any, tolerance: tuple[float, float]) -> bool:
    one, other = float(one), float(other)
    if math.isnan(other) or math.isinf(other):
        return math.isnan(one) if math.isnan(other) else one == other
    return math.isclose(one, other, rel_tol=tolerance[0], abs_tol=tolerance[1])


def _position(index: int, shape: list[int]) -> str:
    places = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        places.append(place)
    return f" at [{', '.join(map(str, reversed(places)))}]" if places else ""


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _if_none(value: Any) -> str:
    return ": is there a return?" if value is None else ""


def _described(value: Any) -> str:
    if _is_tensor(value):
        return f"a tensor of shape {value['shape']}"
    if isinstance(value, dict):
        return value["$other"] if "$other" in value else f"a dict with {', '.join(value) or 'nothing'}"
    if isinstance(value, list):
        return f"{len(value)} values"
    return repr(value)
