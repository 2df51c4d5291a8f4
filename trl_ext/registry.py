"""Names for objectives: tables from a name to a pure function and its requirements.

A course or a notebook adds its own with `@preference_loss("name")` or `@policy_algorithm("name")`; the command line
also accepts `file.py:function`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from trl_ext.files import brief
from trl_ext.names import load_function, load_module, nearest


@dataclass
class Entry:
    """A registered function. Its keyword-only parameters are its options, and their defaults are the paper's.

    Attributes:
        paper: the arXiv number of its paper, or another source.
    """

    name: str
    function: Callable
    paper: str = ""

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def inputs(self) -> list[str]:
        """Positional parameters."""
        return [p.name for p in self._parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword-only parameters except `beta`, with their defaults (`Parameter.empty` if there is none)."""
        return {p.name: p.default for p in self._parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != "beta"}

    @property
    def default_beta(self) -> float | None:
        """The function's default for `beta`; None if it has none."""
        parameter = self._parameters.get("beta")
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    @property
    def takes_beta(self) -> bool:
        return "beta" in self._parameters

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise ValueError for an option that the function does not have, or a missing one without a default."""
        for name in options:
            if name not in self.options:
                valid = sorted(self.options)
                takes = f"it takes {', '.join(valid)}" if valid else "it takes none"
                raise ValueError(f"{self.name!r} has no option {name!r}: {takes}{nearest(name, valid)}")
        missing = [n for n, default in self.options.items() if default is inspect.Parameter.empty and n not in options]
        if missing:
            raise ValueError(f"{self.name!r} needs the option {missing[0]!r}, which has no default")


@dataclass
class PreferenceLoss(Entry):
    """A loss on `PreferenceScores`; its fields are the arguments of `preference_loss`."""

    needs_reference: bool = True
    batch_coupled: bool = False
    columns: tuple[str, ...] = ()


@dataclass
class PreferenceWeighting(Entry):
    """A weight per pair, multiplied with any preference loss.

    Attributes:
        normalize: whether weights are divided by their mean over the optimizer batch; they may then read
            `scores.columns` only.
        needs_policy_weights: whether it reads `chosen_policy_weight` and `rejected_policy_weight`.
        column_option: the option that names the dataset column it reads, if any.
    """

    normalize: bool = False
    needs_policy_weights: bool = False
    column_option: str | None = None


EntryType = TypeVar("EntryType", bound=Entry)


class Registry(Generic[EntryType]):
    """A table from names to entries in which each name occurs once."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, EntryType] = {}

    def add(self, entry: EntryType) -> None:
        """Add an entry.

        Raises:
            ValueError: the name is taken by another function. (The same function defined again, as when a notebook
                cell is run twice, replaces the earlier one.)
        """
        known = self._entries.get(entry.name)
        if known is not None and not _same(known.function, entry.function):
            name = getattr(known.function, "__qualname__", type(known.function).__qualname__)
            place = f"{known.function.__module__}.{name}"
            raise ValueError(f"the {self.kind} {entry.name!r} is already defined by {place}; give yours another name")
        self._entries[entry.name] = entry

    def __getitem__(self, name: str) -> EntryType:
        if name.endswith(".py"):
            raise ValueError(f"{name!r} is a file: name the {self.kind} in it, as {name}:function")
        if name not in self._entries:
            given = brief(name)
            raise ValueError(
                f"unknown {self.kind} {given!r}{nearest(given, list(self))} Known: {', '.join(sorted(self))}; "
                "or give your own as file.py:function"
            )
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def find(self, name: str) -> EntryType:
        """The entry with this name, or the one that `file.py:function` or `module:function` defines.

        Raises:
            ValueError: no such name, file, module or function; the message lists what is available.
        """
        if ":" not in name:
            return self[name]
        source, _, function_name = name.rpartition(":")
        module = load_module(source)
        for entry in self._entries.values():
            names = (entry.name, getattr(entry.function, "__name__", None))
            if entry.function.__module__ == module.__name__ and function_name in names:
                return entry
        load_function(name, self.kind)
        raise ValueError(
            f"{source} defines {function_name!r}, but not as a {self.kind}: "
            f"decorate it with @trl_ext.{self.kind.replace(' ', '_')}({function_name!r})"
        )


def _same(one: Callable, other: Callable) -> bool:
    """Whether two functions have the same definition, executed again or loaded under a second module name."""
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return one is other
    file, other_file = (Path(f.__code__.co_filename).resolve() for f in (one, other))
    return one.__qualname__ == other.__qualname__ and (one.__module__ == other.__module__ or file == other_file)


preference_losses: Registry[PreferenceLoss] = Registry("preference loss")
preference_weightings: Registry[PreferenceWeighting] = Registry("preference weighting")


def preference_loss(
    name: str,
    *,
    needs_reference: bool = True,
    batch_coupled: bool = False,
    columns: tuple[str, ...] = (),
    paper: str = "",
) -> Callable[[Callable], Callable]:
    """Register a preference loss `f(scores, *, beta, ...) -> [B]` under `name`.

    Args:
        name: its name in `--loss` and `PreferenceConfig(loss=...)`.
        needs_reference: set to False for a loss that does not read reference log-probabilities; none are computed.
        batch_coupled: set to True if a pair's loss depends on the other pairs; the trainer then evaluates it on the
            whole optimizer batch, over all ranks and accumulated micro-batches.
        columns: names of dataset columns to pass in `scores.columns`, each a tensor of shape [B].
        paper: the arXiv number of its paper, or another source.

    Raises:
        ValueError: the name is taken.
    """

    def register(function: Callable) -> Callable:
        needs = {"needs_reference": needs_reference, "batch_coupled": batch_coupled, "columns": tuple(columns)}
        preference_losses.add(PreferenceLoss(name, function, paper, **needs))
        return function

    return register


def preference_weighting(
    name: str, *, normalize: bool = False, needs_policy_weights: bool = False, column_option: str | None = None
) -> Callable[[Callable], Callable]:
    """Register a weighting `f(scores, ...) -> [B]` under `name`; see `PreferenceWeighting` for what the flags mean.

    Raises:
        ValueError: the name is taken, or a weighting that reads policy weights requests normalisation: its mean over
            the optimizer batch is unknown before training on that batch.
    """
    if normalize and needs_policy_weights:
        raise ValueError(f"the weighting {name!r} cannot both read policy weights and be normalised")

    def register(function: Callable) -> Callable:
        needs = {"normalize": normalize, "needs_policy_weights": needs_policy_weights, "column_option": column_option}
        preference_weightings.add(PreferenceWeighting(name, function, **needs))
        return function

    return register
