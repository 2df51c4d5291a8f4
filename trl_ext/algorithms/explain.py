"""`python -m trl_ext.algorithms --explain NAME`: a row of a table, and the source of the functions that it names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trl_ext
from trl_ext import losses
from trl_ext.advantages import ADVANTAGES
from trl_ext.algorithms import SETTINGS, Algorithm, algorithms
from trl_ext.losses import aggregate, kl_estimate, sequence_log_ratio, token_log_ratio
from trl_ext.names import load_function, nearest
from trl_ext.registry import PreferenceLoss, preference_losses

RATIOS = {"token": [token_log_ratio], "sequence": [sequence_log_ratio], "none": []}
# The losses of trainers that have no table.
OTHERS = {"kto": losses.kto}


def explain(name: str) -> str:
    """Describe an algorithm, a preference loss or an advantage.

    Args:
        name: a name from one of the tables, or `file.py:function`.

    Raises:
        ValueError: there is no such name, file or function.
    """
    if ":" not in name:
        known = [*algorithms, *preference_losses, *ADVANTAGES, *OTHERS]
        if name not in known:
            raise ValueError(f"no algorithm, preference loss or advantage is called {name!r}{nearest(name, known)}")
        if name in algorithms:
            return _algorithm(algorithms[name])
        return _loss(preference_losses[name]) if name in preference_losses else _source({**ADVANTAGES, **OTHERS}[name])
    for table, describe in ((algorithms, _algorithm), (preference_losses, _loss)):
        with contextlib.suppress(ValueError):
            entry = table.find(name)
            return describe(entry)
    function = load_function(name, "algorithm, preference loss or advantage")
    if list(inspect.signature(function).parameters)[:2] == ["rewards", "group_size"]:
        return _source(function)
    raise ValueError(
        f"{name} is neither an algorithm nor a preference loss nor an advantage f(rewards, group_size, ...): "
        "decorate it with @trl_ext.policy_algorithm or @trl_ext.preference_loss"
    )


def _algorithm(row: Algorithm) -> str:
    settings = {name: getattr(row, name) for name in SETTINGS}
    settings |= {"num_generations": row.group_size, **row.rollout}
    about = {"paper": row.paper, **_options(row.advantage_options)}
    fixed = [f"defined by --{flag} {getattr(row, flag)}" for flag in row.defined_by]
    functions = [row.advantage_function, *RATIOS[row.ratio], row.function, aggregate]
    if row.beta and not row.takes_beta:
        functions.append(kl_estimate)
    lines = [f"{row.name}: {row.summary}", *_lines(about), *_lines(settings, "--"), *fixed]
    return "\n".join([*lines, *map(_source, functions)])


def _loss(entry: PreferenceLoss) -> str:
    row = {name: value for name, value in vars(entry).items() if name not in ("name", "function")}
    row |= {"beta": entry.default_beta, **_options(entry.options)}
    return "\n".join([f"{entry.name}: a preference loss", *_lines(row), _source(entry.function)])


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {f"option {name}": value for name, value in options.items()}


def _lines(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A line for each value that is set."""
    return [f"{prefix}{name} {_shown(value)}" for name, value in values.items() if value not in (None, "", ())]


def _shown(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "(required)"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else getattr(value, "__name__", str(value))


def _source(function: Callable) -> str:
    source, line = inspect.getsourcelines(inspect.unwrap(function))
    path, root = Path(inspect.getsourcefile(function)), Path(trl_ext.__file__).parent.parent
    return f"\n# {path.relative_to(root) if path.is_relative_to(root) else path}:{line}\n{''.join(source).rstrip()}"
