"""`python -m trl_ext.algorithms --explain NAME`: a row of a table with its functions, formulas, settings and paper."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trl_ext
from trl_ext import losses
from trl_ext.advantages import ADVANTAGES, INPUTS, function_of, options_of
from trl_ext.algorithms import PolicyObjective, algorithms
from trl_ext.losses import aggregate, kl_estimate, sequence_log_ratio, token_log_ratio
from trl_ext.names import load_function, nearest
from trl_ext.registry import Algorithm, PreferenceLoss, preference_losses
from trl_ext.settings import ADVANTAGE_SETTINGS, LOSS_SETTINGS, Setting

RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}
# Functions of trainers that have no table.
_OTHERS = ("kto",)
OTHERS = {name: getattr(losses, name) for name in _OTHERS}


def explain(name: str) -> str:
    """Describe an algorithm, a preference loss or an advantage on one screen.

    Args:
        name: a name from one of the tables, or `file.py:function`.

    Raises:
        ValueError: there is no such name, file or function.
    """
    if ":" not in name:
        known = [*algorithms, *preference_losses, *ADVANTAGES, *OTHERS]
        if name not in known:
            raise ValueError(f"no algorithm, preference loss or advantage is called {name!r}{nearest(name, known)}")
        if name in OTHERS:
            return _function(OTHERS[name])
        if name in ADVANTAGES:
            return _advantage(ADVANTAGES[name])
        return _algorithm(algorithms[name]) if name in algorithms else _loss(preference_losses[name])
    for table, describe in ((algorithms, _algorithm), (preference_losses, _loss)):
        with contextlib.suppress(ValueError):
            entry = table.find(name)
            return describe(entry)
    function = load_function(name, "algorithm, preference loss or advantage")
    if list(inspect.signature(function).parameters)[:2] == ["rewards", "group_size"]:
        return _advantage(function)
    raise ValueError(
        f"{name} is neither an algorithm nor a preference loss nor an advantage f(rewards, group_size, ...): "
        "decorate it with @trl_ext.policy_algorithm or @trl_ext.preference_loss"
    )


def _algorithm(row: Algorithm) -> str:
    own = row.surrogate == "own"
    # Options of your own function may have no default, so its settings are not resolved.
    values = vars(row) if own else PolicyObjective(row).to_dict()
    advantage = function_of(row.advantage)
    clip = f"--advantage_clip {_shown(row.advantage_clip)}"
    paper = textwrap.wrap(f"paper: {_paper(row.paper, row.title)}", 110, subsequent_indent="  ")
    lines = [f"{row.name}: {row.summary}", *paper, ""]
    lines += _part(f"--advantage {advantage.__name__}", advantage)
    lines += _settings(values, ADVANTAGE_SETTINGS, {**_defaults(advantage), **row.advantage_options}, clip)
    lines += _part(f"--ratio {row.ratio}", RATIOS.get(row.ratio))
    lines += _part("a surrogate of its own" if own else f"--surrogate {row.surrogate}", row.function)
    lines += _settings(values, {} if own else LOSS_SETTINGS, _defaults(row.function))
    lines += _part(f"--aggregation {row.aggregation}", aggregate, row.aggregation)
    if row.aggregation == "constant":
        lines += ["  --loss_constant max_completion_length"]
    if row.takes_beta:
        lines += [f"--beta {row.beta:g}: of the reference, in the surrogate; no KL term"]
    elif row.beta:
        kl = f"--beta {row.beta:g} --kl_estimator {row.kl_estimator} --kl_in {row.kl_in}"
        correction = f"--kl_ratio_correction {_shown(row.kl_ratio_correction)}"
        lines += [*_part(kl, kl_estimate, row.kl_estimator), "  d = log_probs - ref_log_probs at a sampled token"]
        lines += [f"  --kl_aggregation {row.kl_aggregation or 'inside'}  {correction}"]
    else:
        lines += ["--beta 0: no KL term and no reference model"]
    rollout = [f"--{name} {_shown(value)}" for name, value in row.rollout.items()]
    lines += [
        "  ".join([f"--num_generations {row.group_size}", *rollout]),
        "",
        "fixed by the name:" + ("" if row.fixed else " nothing"),
    ]
    lines += [f"  --{flag} {' or '.join(values)}: {reason}" for flag, (values, reason) in row.fixed.items()]
    return "\n".join(lines)


def _loss(entry: PreferenceLoss) -> str:
    about = inspect.getdoc(sys.modules.get(entry.function.__module__)) or ""
    notation = re.search(r"^Notation: .*?(?=\n\n|\Z)", about, re.M | re.S)
    beta = "not read"
    if entry.takes_beta:
        beta = f"{entry.default_beta or 0.1:g}" + ("" if entry.default_beta else ", the library's default")
    rows = {
        "function": f"{entry.function.__name__}, {_where(entry.function)}",
        "paper": _paper(entry.paper, entry.title),
        "recommended beta": beta,
        "options": ", ".join(_options(entry.options)) or "none",
        "needs_reference": "yes" if entry.needs_reference else "no",
        "batch_coupled": "yes" if entry.batch_coupled else "no",
        "columns": ", ".join(entry.columns) or "none",
    }
    lines = [f"{entry.name}: a preference loss, f(scores, *, beta, ...) -> [B]", "", *_doc(entry.function), ""]
    lines += [*notation[0].splitlines(), ""] if notation else []
    return "\n".join([*lines, *(f"{name + ':':17} {value}" for name, value in rows.items())])


def _advantage(function: Callable) -> str:
    own = _defaults(function)
    flags = {s.option: f"--{name} " for name, s in ADVANTAGE_SETTINGS.items()}
    rows = {
        "function": f"{function.__name__}, {_where(function)}",
        "options": ", ".join(f"{flags.get(name, name + ' ')}{_shown(value)}" for name, value in own.items()) or "none",
        "algorithms": ", ".join(n for n in algorithms if algorithms[n].advantage in (function.__name__, function))
        or "none",
    }
    lines = [f"{function.__name__}: an advantage, f(rewards, group_size, ...) -> [N]", "", *_doc(function), ""]
    return "\n".join([*lines, *(f"{name + ':':11} {value}" for name, value in rows.items())])


def _function(function: Callable) -> str:
    options = ", ".join(_options(_defaults(function))) or "none"
    return "\n".join(
        [*_doc(function), "", f"function: {function.__name__}, {_where(function)}", f"options: {options}"]
    )


def _part(head: str, function: Callable | None, kind: str | None = None) -> list[str]:
    """A setting with its function and formula: the docstring's first paragraph, or its list item for `kind`."""
    if function is None:
        return [head]
    text = inspect.getdoc(function) or "no docstring"
    if kind is not None:
        item = re.search(rf"^- (`{kind}\b.*?)(?=^- |\n\n|\Z)", text, re.M | re.S)
        text = item[1] if item else text
    formula = " ".join(text.partition("\n\n")[0].split()).rstrip(";")
    wrapped = textwrap.wrap(formula, 110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return [head, f"  {function.__name__}, {_where(function)}", *wrapped]


def _settings(values: Mapping[str, Any], settings: Mapping[str, Setting], options: dict, *more: str) -> list[str]:
    """A line of flags that set options of a function, and of options that no flag sets."""
    shown = []
    for name, setting in settings.items():
        if setting.option in options:
            default = options.pop(setting.option)
            shown.append(f"--{name} {_shown(default if values[name] is None else values[name])}")
    shown += [*more, *_options(options)]
    return [f"  {'  '.join(shown)}"] if shown else []


def _defaults(function: Callable) -> dict[str, Any]:
    """Options with their defaults: an advantage's parameters after rewards and groups, or a loss's keywords."""
    parameters = inspect.signature(function).parameters
    if list(parameters)[:1] == ["rewards"]:
        parameters = options_of(function)
        return {p.name: p.default for p in parameters.values() if p.name not in INPUTS}
    return {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}


def _options(options: dict[str, Any]) -> list[str]:
    return [f"{name} {_shown(value)}" for name, value in options.items()]


def _shown(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "(required)"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _doc(function: Callable) -> list[str]:
    """A docstring up to the list of its arguments."""
    return re.split(r"\n\n(?:Args|Raises):", inspect.getdoc(function) or "no docstring")[0].splitlines()


def _where(function: Callable) -> str:
    code = inspect.unwrap(function).__code__
    path, root = Path(code.co_filename), Path(trl_ext.__file__).parent.parent
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{code.co_firstlineno}"


def _paper(paper: str, title: str) -> str:
    source = f"arXiv {paper}" if re.match(r"\d{4}\.\d{5}", paper) else paper
    return ", ".join(part for part in (title, source) if part) or "none"
