"""Tables from names to pure functions with their requirements: losses of pairs, weightings, and online algorithms.

A course or a notebook adds its own with `@preference_loss("name")` or `@policy_algorithm("name")`; the command line
also accepts `file.py:function`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    def options(self) -> dict[str, Any]:
        """Keyword-only parameters except `beta`, with their defaults (`Parameter.empty` if there is none)."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "beta"}

    @property
    def takes_beta(self) -> bool:
        return "beta" in inspect.signature(self.function).parameters

    @property
    def default_beta(self) -> float | None:
        """The function's default for `beta`; None if it has none."""
        parameter = inspect.signature(self.function).parameters.get("beta")
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise ValueError for an option that the function does not have, or a missing one without a default."""
        known = self.options
        for name in options:
            if name not in known:
                takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
                raise ValueError(f"{self.name!r} has no option {name!r}: {takes}{nearest(name, sorted(known))}")
        for name, default in known.items():
            if default is inspect.Parameter.empty and name not in options:
                raise ValueError(f"{self.name!r} needs the option {name!r}, which has no default")


@dataclass
class PreferenceLoss(Entry):
    """A loss `f(scores, *, beta, ...) -> [B]` of `PreferenceScores`, registered with `@preference_loss(name)`.

    Attributes:
        needs_reference: False if it does not read reference log-probabilities; none are computed.
        batch_coupled: True if a pair's loss depends on the other pairs; the trainer then evaluates it on the whole
            optimizer batch, over all ranks and accumulated micro-batches.
        columns: names of dataset columns to pass in `scores.columns`, each a tensor of shape [B].
    """

    needs_reference: bool = True
    batch_coupled: bool = False
    columns: tuple[str, ...] = ()


@dataclass
class PreferenceWeighting(Entry):
    """A weight per pair, `f(scores, ...) -> [B]`, multiplied with any preference loss.

    Its option `column`, if it has one, names the dataset column that it reads.

    Attributes:
        normalize: whether weights are divided by their mean over the optimizer batch; they may then read
            `scores.columns` only.
        needs_policy_weights: whether it reads `chosen_policy_weight` and `rejected_policy_weight`.
    """

    normalize: bool = False
    needs_policy_weights: bool = False

    def __post_init__(self):
        # Their mean over the optimizer batch is unknown before training on that batch.
        if self.normalize and self.needs_policy_weights:
            raise ValueError(f"the weighting {self.name!r} cannot both read policy weights and be normalised")


EntryType = TypeVar("EntryType", bound=Entry)


class Registry(dict[str, EntryType], Generic[EntryType]):
    """A table from names to entries of one class; `kind` is what an entry is called in messages."""

    def __init__(self, kind: str, entry_class: type[EntryType]):
        super().__init__()
        self.kind, self.entry_class = kind, entry_class

    def register(self, name: str, **attributes: Any) -> Callable[[Callable], Callable]:
        """Decorator that adds a function under `name`, with the other attributes of an entry."""

        def register(function: Callable) -> Callable:
            self.add(self.entry_class(name, function, **attributes))
            return function

        return register

    def add(self, entry: EntryType) -> None:
        """Add an entry; ValueError if the name is taken by another function.

        The same function defined again, as when a notebook cell is run twice, replaces the earlier one.
        """
        known = self.get(entry.name)
        if known is not None and not _same(known.function, entry.function):
            name = getattr(known.function, "__qualname__", type(known.function).__qualname__)
            place = f"{known.function.__module__}.{name}"
            raise ValueError(f"the {self.kind} {entry.name!r} is already defined by {place}; give yours another name")
        self[entry.name] = entry

    def __missing__(self, name: str) -> EntryType:
        if name.endswith(".py"):
            raise ValueError(f"{name!r} is a file: name the {self.kind} in it, as {name}:function")
        given = brief(name)
        raise ValueError(
            f"unknown {self.kind} {given!r}{nearest(given, list(self))} Known: {', '.join(sorted(self))}; "
            "or give your own as file.py:function"
        )

    def find(self, name: str) -> EntryType:
        """The entry with this name, or the one that `file.py:function` or `module:function` defines.

        Raises:
            ValueError: no such name, file, module or function; the message lists what is available.
        """
        if ":" not in name:
            return self[name]
        source, _, function_name = name.rpartition(":")
        module = load_module(source)
        for entry in self.values():
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


preference_losses = Registry("preference loss", PreferenceLoss)
preference_weightings = Registry("preference weighting", PreferenceWeighting)
preference_loss = preference_losses.register
preference_weighting = preference_weightings.register
