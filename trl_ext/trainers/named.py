"""Pairs of a configuration and a trainer made from table rows: `DPOConfig` and `DPOTrainer` from `dpo`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import field, make_dataclass
from typing import get_args, get_type_hints

from trl_ext.registry import Entry, PreferenceLoss, Registry


def named_pairs(
    table: Registry, prefixes: Iterable[str], config: type, trainer: type, module: str, chooses: str
) -> dict[str, type]:
    """Make a configuration and a trainer for each prefix, and return them by name.

    Args:
        table: holds the row of a prefix under the prefix in lower case, with or without underscores.
        prefixes: the beginnings of the names of each pair.
        config, trainer: the base classes.
        module: the module that holds the new classes.
        chooses: the configuration field that names a row.
    """
    rows = {name.replace("_", ""): table[name] for name in table}
    pairs = {}
    for prefix in prefixes:
        entry = rows[prefix.lower()]
        own = make_dataclass(
            f"{prefix}Config",
            [(chooses, str, field(default=entry.name)), *_option_fields(entry, config)],
            bases=(config,),
            namespace={"__doc__": _summary(entry, prefix), "_method": entry.name},
        )
        attributes = {
            "__doc__": f"`{trainer.__name__}` with {chooses} `{entry.name}`. {_summary(entry, prefix)}",
            "_config_class": own,
            "_name": prefix,
        }
        pairs |= {own.__name__: own, f"{prefix}Trainer": type(f"{prefix}Trainer", (trainer,), attributes)}
    for pair in pairs.values():
        pair.__module__ = module
    return pairs


def _option_fields(entry: Entry, config: type) -> list:
    """A field, None by default, for each loss option that the base class lacks."""
    if not isinstance(entry, PreferenceLoss):
        return []
    hints = get_type_hints(entry.function)
    own = [name for name in entry.options if not hasattr(config, name)]
    # The command line uses the first type of a union such as `float | str`.
    types = {name: (get_args(hints[name]) or (hints[name],))[0] for name in own}
    return [(name, types[name] | None, field(default=None)) for name in own]


def _summary(entry: Entry, name: str) -> str:
    """Describe a row: an algorithm by its summary, a loss by the first paragraph of its docstring and its options."""
    if not isinstance(entry, PreferenceLoss):
        return f"{name}: {entry.summary}."
    text = " ".join((inspect.getdoc(entry.function) or name).partition("\n\n")[0].split())
    options = ", ".join(f"`{option}`" for option in entry.options)
    return f"{text} Options: {options}." if options else text
