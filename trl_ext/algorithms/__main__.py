"""`python -m trl_ext.algorithms` prints the table of online algorithms, `--explain NAME` a row and its source."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl_ext
from trl_ext import losses
from trl_ext.algorithms import SETTINGS, Algorithm, algorithms
from trl_ext.names import nearest
from trl_ext.processes import quiet_when_closed
from trl_ext.registry import preference_losses

HEAD = ("algorithm", "advantage", "ratio", "surrogate", "aggregation", "KL", "paper")
RATIOS = {"token": [losses.token_log_ratio], "sequence": [losses.sequence_log_ratio], "none": []}


def explain(name: str) -> str:
    """The settings of an algorithm or a preference loss, and the source of its functions.

    Args:
        name: a name from one of the tables, or `file.py:function`.

    Raises:
        ValueError: there is no such name, file or function.
    """
    if ":" not in name and name not in algorithms and name not in preference_losses:
        known = nearest(name, [*algorithms, *preference_losses])
        raise ValueError(f"no algorithm and no preference loss is called {name!r}{known}")
    try:
        entry = algorithms.find(name)
    except ValueError:
        entry = preference_losses.find(name)
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


@quiet_when_closed()
def main(arguments: list[str] | None = None) -> None:
    """Print the table, or explain one name."""
    parser = argparse.ArgumentParser(prog="python -m trl_ext.algorithms", description="List the online algorithms.")
    about = "settings and source of an algorithm or a preference loss, or of your own as file.py:function"
    parser.add_argument("--explain", metavar="NAME", help=about)
    given = parser.parse_args(arguments)
    if given.explain:
        try:
            print(explain(given.explain))
        except ValueError as error:
            parser.error(str(error))
        return
    lines = [HEAD, *map(_cells, algorithms.values())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
