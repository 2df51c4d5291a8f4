"""Names for objectives: a table from a name to a pure function and to what that function needs.

A course or a notebook adds its own with `@preference_loss("name")` or `@policy_algorithm("name")`; the command line
takes `file.py:function` as well.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from trl_ext.files import brief


def nearest(name: str, valid: list[str]) -> str:
    """The end of an error message: `; did you mean 'aot'?`, or a full stop where nothing is near."""
    matches = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else "."


@dataclass(frozen=True)
class Entry:
    """A registered function. Its keyword-only parameters are its options, and their defaults the paper's."""

    name: str
    function: Callable

    @property
    def options(self) -> dict[str, Any]:
        """Keyword-only parameters except `beta`, with their defaults (`Parameter.empty` where there is none)."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "beta"}

    @property
    def default_beta(self) -> float | None:
        """The function's default for `beta`, None where it has none."""
        parameter = inspect.signature(self.function).parameters.get("beta")
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    @property
    def takes_beta(self) -> bool:
        return "beta" in inspect.signature(self.function).parameters

    def check_options(self, options: dict[str, Any]) -> None:
        """Refuse an option that the function does not have, or one without a default that is missing.

        Raises:
            ValueError: names the option, the function and the nearest valid option.
        """
        for name in options:
            if name not in self.options:
                valid = sorted(self.options)
                takes = f"it takes {', '.join(valid)}" if valid else "it takes none"
                raise ValueError(f"{self.name!r} has no option {name!r}: {takes}{nearest(name, valid)}")
        missing = [n for n, default in self.options.items() if default is inspect.Parameter.empty and n not in options]
        if missing:
            raise ValueError(f"{self.name!r} needs the option {missing[0]!r}, which has no default")


@dataclass(frozen=True)
class PreferenceLoss(Entry):
    """A loss on `PreferenceScores`.

    Attributes:
        needs_reference: whether it reads `ref_chosen` and `ref_rejected`.
        batch_coupled: whether the loss of a pair depends on the other pairs of the batch, as AOT's sorting does.
        columns: dataset columns that it reads from `scores.columns`.
    """

    needs_reference: bool = True
    batch_coupled: bool = False
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Algorithm(Entry):
    """An online algorithm as data; the function is its surrogate loss. `trl_ext.algorithms` holds the table.

    Attributes:
        summary: one line for the table.
        paper: where it comes from.
        advantage: a name of `trl_ext.algorithms.ADVANTAGES`, or a function `f(rewards, group_size, ...) -> [N]`.
        std_ddof, advantage_eps: `std_ddof` and `eps` of that function; None for its own defaults.
        advantage_options: its other options.
        advantage_clip: advantages are clipped to plus and minus this; None for no clip.
        ratio: importance ratio per `token` or per `sequence`, or `none`.
        surrogate: `clip`, `no_clip`, `cispo`, `reinforce`, `quadratic_ratio`, or `own` for a function of
            `PolicyScores`.
        epsilon, epsilon_high, dual_clip: for `clip`; an `epsilon_high` of None is `epsilon`.
        ratio_cap: for `cispo`.
        aggregation: `sequence_mean`, `token_mean`, `constant` or `sum`.
        beta: coefficient of the KL divergence to the reference; 0 for none.
        kl_estimator: `k1`, `k2` or `k3`.
        kl_in: whether the divergence is a term of the `loss` or taken off the `reward`.
        kl_ratio_correction: whether it is multiplied by the importance ratio.
        kl_aggregation: None for a term of each token's loss; `token_mean` for a mean of its own beside it.
        group_size: responses per prompt.
        fixed: what makes the name: a setting, its permitted values, and why no other.
    """

    summary: str = ""
    paper: str = ""
    advantage: str | Callable = "group_normalized"
    std_ddof: int | None = None
    advantage_eps: float | None = None
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    advantage_clip: float | None = None
    ratio: str = "token"
    surrogate: str = "own"
    epsilon: float | None = None
    epsilon_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    aggregation: str = "sequence_mean"
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    kl_ratio_correction: bool = False
    kl_aggregation: str | None = None
    group_size: int = 8
    fixed: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)


EntryType = TypeVar("EntryType", bound=Entry)


class Registry(Generic[EntryType]):
    """A table from names to entries in which a name is given once."""

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
            raise ValueError(
                f"the {self.kind} {entry.name!r} is already defined by {'.'.join(_origin(known.function))}; "
                "give yours another name"
            )
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
        """The entry called `name`, or the one that `file.py:function` or `module:function` defines.

        Raises:
            ValueError: no such name, file, module or function; the message lists what there is.
        """
        if ":" not in name:
            return self[name]
        source, _, function_name = name.rpartition(":")
        module = _load_module(source)
        for entry in self._entries.values():
            if entry.function.__module__ == module.__name__ and function_name in (entry.name, entry.function.__name__):
                return entry
        function = getattr(module, function_name, None)
        if callable(function):
            raise ValueError(
                f"{source} defines {function_name!r}, but not as a {self.kind}: "
                f"decorate it with @trl_ext.{self.kind.replace(' ', '_')}({function_name!r})"
            )
        own = [e.name for e in self._entries.values() if e.function.__module__ == module.__name__]
        others = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        defined = f"it defines {', '.join(sorted({*own, *others}))}" if own or others else "it defines no function"
        raise ValueError(
            f"{source} has no {self.kind} {function_name!r}: {defined}{nearest(function_name, [*own, *others])}"
        )


def _origin(function: Callable) -> tuple[str, str]:
    # A function made by `exec` may have no module.
    return str(function.__module__), function.__qualname__


def _same(one: Callable, other: Callable) -> bool:
    """Whether two functions are one definition, run again or loaded under a second module name."""
    file, other_file = (Path(f.__code__.co_filename).resolve() for f in (one, other))
    return one.__qualname__ == other.__qualname__ and (one.__module__ == other.__module__ or file == other_file)


def _load_module(source: str) -> ModuleType:
    """Import `source`, a path to a .py file (the ending may be left out) or a module name."""
    path = Path(source if source.endswith(".py") else f"{source}.py")
    if not path.is_file():
        if source.endswith(".py"):
            # Of a run's config.yaml it may be as seen from another folder.
            seen = "" if path.is_absolute() else f" in {Path.cwd().name or '/'}, the folder that this runs in"
            raise ValueError(f"no file {source!r} to take a function from{seen}")
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if not f"{source}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"no file {str(path)!r} and no module {source!r} to take a function from") from error
    # The name carries the path, so that two files called losses.py do not stand in for each other.
    module_name = f"trl_ext_user_{zlib.crc32(str(path.resolve()).encode())}_{path.stem}"
    modified = path.stat().st_mtime_ns
    loaded = sys.modules.get(module_name)
    # An edited file is run again, so that a notebook trains what the file says now.
    if loaded is not None and loaded.__modified__ == modified:
        return loaded
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    module.__modified__ = modified
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def load_function(name: str, kind: str) -> Callable:
    """The function that `file.py:function` or `module:function` names.

    Args:
        name: where it is.
        kind: what error messages call it, such as "reward function".

    Raises:
        ValueError: no such file, module or function.
    """
    source, separator, function_name = name.rpartition(":")
    if not separator:
        raise ValueError(f"the {kind} {name!r} must be given as file.py:function or module:function")
    module = _load_module(source)
    function = getattr(module, function_name, None)
    if not callable(function):
        defined = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        raise ValueError(f"{source} has no {kind} {function_name!r}{nearest(function_name, defined)}")
    return function


preference_losses: Registry[PreferenceLoss] = Registry("preference loss")
preference_weightings: Registry[PreferenceWeighting] = Registry("preference weighting")
policy_algorithms: Registry[Algorithm] = Registry("policy algorithm")


def preference_loss(
    name: str, *, needs_reference: bool = True, batch_coupled: bool = False, columns: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """Register a preference loss `f(scores, *, beta, ...) -> [B]` under `name`.

    Args:
        name: what `--loss` and `PreferenceConfig(loss=...)` call it.
        needs_reference: set to False for a loss that reads no reference log-probabilities: none are then computed.
        batch_coupled: set to True if a pair's loss depends on the other pairs; the trainer then evaluates it on the
            whole optimizer batch, over all ranks and accumulated micro-batches.
        columns: names of dataset columns to pass in `scores.columns`, each a tensor of shape [B].

    Raises:
        ValueError: the name is taken.
    """

    def register(function: Callable) -> Callable:
        preference_losses.add(PreferenceLoss(name, function, needs_reference, batch_coupled, tuple(columns)))
        return function

    return register


def preference_weighting(
    name: str, *, normalize: bool = False, needs_policy_weights: bool = False, column_option: str | None = None
) -> Callable[[Callable], Callable]:
    """Register a weighting `f(scores, ...) -> [B]` under `name`; see `PreferenceWeighting` for what the flags mean.

    Raises:
        ValueError: the name is taken, or a weighting that reads policy weights asks to be normalised: its mean over
            the optimizer batch is not known before the batch has been trained on.
    """
    if normalize and needs_policy_weights:
        raise ValueError(f"the weighting {name!r} cannot both read policy weights and be normalised")

    def register(function: Callable) -> Callable:
        preference_weightings.add(PreferenceWeighting(name, function, normalize, needs_policy_weights, column_option))
        return function

    return register


# Settings of a built-in surrogate; a function of one's own has keyword options for such things.
_OF_BUILT_IN_SURROGATES = ("surrogate", "epsilon", "epsilon_high", "dual_clip", "ratio_cap", "fixed")


def policy_algorithm(name: str, **settings: Any) -> Callable[[Callable], Callable]:
    """Register a policy loss `f(scores, *, option=default) -> [B, T] or [B, 1]` as the algorithm `name`.

    The function takes `trl_ext.losses.PolicyScores` and returns one loss per token, or one per response.

    Args:
        name: what `--algorithm` and `PolicyConfig(algorithm=...)` call it.
        settings: `advantage` (a name, or a function), `ratio`, `aggregation`, `beta`, `group_size` and the other
            attributes of `Algorithm` that are not of a built-in surrogate.

    Raises:
        ValueError: the name is taken, or there is no such setting.
    """
    known = [f.name for f in fields(Algorithm) if f.name not in ("name", "function", *_OF_BUILT_IN_SURROGATES)]
    for setting in settings:
        if setting not in known:
            raise ValueError(
                f"the policy algorithm {name!r} has no setting {setting!r}: it takes {', '.join(known)}"
                f"{nearest(setting, known)}"
            )

    def register(function: Callable) -> Callable:
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        policy_algorithms.add(Algorithm(name, function, **{"summary": summary, **settings}))
        return function

    return register
