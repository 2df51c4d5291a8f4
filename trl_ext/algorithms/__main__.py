"""`python -m trl_ext.algorithms` prints the table of online algorithms, `--explain NAME` a row and its source."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl_ext
from trl_ext import losses
from trl_ext.advantages import ADVANTAGES
from trl_ext.algorithms import SETTINGS, Algorithm, algorithms
from trl_ext.names import load_function, nearest
from trl_ext.processes import quiet_when_closed
from trl_ext.registry import PreferenceLoss, preference_losses

HEAD = ("algorithm", "advantage", "ratio", "surrogate", "aggregation", "KL", "paper")
RATIOS = {"token": [losses.token_log_ratio], "sequence": [losses.sequence_log_ratio], "none": []}
# Functions that have no other settings than their parameters.
FUNCTIONS = {**ADVANTAGES, "kto": losses.kto}


def explain(name: str) -> str:
    """The settings of an algorithm or a preference loss, and the source of its functions; or that of an advantage.

    Args:
        name: a name from one of the tables, or `file.py:function`.

    Raises:
        ValueError: there is no such name, file or function.
    """
    known = [*algorithms, *preference_losses, *FUNCTIONS]
    if ":" not in name and name not in known:
        raise ValueError(f"no algorithm, preference loss or advantage is called {name!r}{nearest(name, known)}")
    if name in FUNCTIONS:
        return _source(FUNCTIONS[name])
    for table in (algorithms, preference_losses):
        with contextlib.suppress(ValueError):
            return _entry(table.find(name))
    function = load_function(name, "algorithm, preference loss or advantage")
    if list(inspect.signature(function).parameters)[:2] == ["rewards", "group_size"]:
        return _source(function)
    raise ValueError(
        f"{name} is neither an algorithm nor a preference loss nor an advantage f(rewards, group_size, ...): "
        "decorate it with @trl_ext.policy_algorithm or @trl_ext.preference_loss"
    )


def _entry(entry: Algorithm | PreferenceLoss) -> str:
    functions = [entry.function]
    if isinstance(entry, Algorithm):
        about, options = entry.summary, entry.advantage_options
        row = {f"--{name}": getattr(entry, name) for name in SETTINGS}
        row |= {"--num_generations": entry.group_size, **{f"--{name}": value for name, value in entry.rollout.items()}}
        row |= {f"defined by --{name}": getattr(entry, name) for name in entry.defined_by}
        functions = [entry.advantage_function, *RATIOS[entry.ratio], entry.function, losses.aggregate]
        functions += [losses.kl_estimate] * (entry.needs_reference and not entry.takes_beta)
    else:
        about, options = "a preference loss", entry.options
        row = {name: value for name, value in vars(entry).items() if name not in ("name", "function", "paper")}
        row["beta"] = entry.default_beta
    row = {"paper": entry.paper, **{f"option {name}": value for name, value in options.items()}, **row}
    lines = [f"{name} {_shown(value)}" for name, value in row.items() if value not in (None, "", ())]
    return "\n".join([f"{entry.name}: {about}", *lines, *map(_source, functions)])


def _shown(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "(required)"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _source(function: Callable) -> str:
    source, line = inspect.getsourcelines(inspect.unwrap(function))
    path, root = Path(inspect.getsourcefile(function)), Path(trl_ext.__file__).parent.parent
    return f"\n# {path.relative_to(root) if path.is_relative_to(root) else path}:{line}\n{''.join(source).rstrip()}"


def _cells(row: Algorithm) -> list[str]:
    clip = f"{row.epsilon:g}/{row.epsilon_high:g}" if row.epsilon is not None else row.ratio_cap or ""
    place = "in the surrogate" if row.takes_beta else f"{row.kl_estimator} in {row.kl_in}"
    divergence = f"{row.beta:g} {place}" if row.needs_reference else "none"
    surrogate = f"{row.surrogate} {clip}".strip()
    return [row.name, row.advantage, row.ratio, surrogate, row.aggregation, divergence, row.paper]


def _settings(row: Algorithm) -> dict[str, Any]:
    about = {"group_size": row.group_size, **row.rollout, "paper": row.paper, "summary": row.summary}
    return {**row.to_dict(), **about}


@quiet_when_closed()
def main(arguments: list[str] | None = None) -> None:
    """Print the table, aligned or as JSON, or explain one name."""
    parser = argparse.ArgumentParser(prog="python -m trl_ext.algorithms", description="List the online algorithms.")
    parser.add_argument("--json", action="store_true", help="print every setting as JSON")
    parser.add_argument(
        "--explain",
        metavar="NAME",
        help="settings and source of an algorithm, a preference loss or an advantage, or of your own as "
        "file.py:function",
    )
    given = parser.parse_args(arguments)
    rows = [algorithms[name] for name in algorithms]
    if given.explain:
        try:
            print(explain(given.explain))
        except ValueError as error:
            parser.error(str(error))
    elif given.json:
        print(json.dumps([_settings(row) for row in rows], indent=2))
    else:
        lines = [HEAD, *map(_cells, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
