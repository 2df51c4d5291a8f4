"""Reading of a run's JSON, of which no shape is promised: what is not as it should be is not there."""

from __future__ import annotations

import math
from typing import Any


def pick(value: Any, *keys: str) -> Any:
    """What lies under the keys, one below the other; None where a key is missing or has nothing below it."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number(value: Any, *keys: str) -> float | None:
    """The finite number under the keys; None for anything else."""
    value = pick(value, *keys)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond what a float can hold
        return None


def text(value: Any, *keys: str) -> str:
    """The string under the keys, or an empty one."""
    value = pick(value, *keys)
    return value if isinstance(value, str) else ""
