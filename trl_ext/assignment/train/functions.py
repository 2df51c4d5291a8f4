"""Load the functions of an assignment and register them with the library's trainers.

They are registered like any user function: as a preference loss, or as a policy algorithm that names an advantage.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import HfArgumentParser

from trl_ext.assignment.catalog.catalog import task
from trl_ext.registry import policy_algorithm, preference_loss, preference_losses

LIBRARY = "library"
Config = TypeVar("Config")


@dataclass
class Functions:
    """The functions of an assignment: the student's if the implementation has them, otherwise the library's.

    Attributes:
        by_name: functions by name in the assignment.
        library: the catalogue name of each function.
        own: names of the student's functions.
    """

    by_name: dict[str, Callable]
    library: dict[str, str]
    own: set[str] = field(default_factory=set)

    def of(self, library: str) -> Callable:
        """The assignment's function for a catalogue name, or the library's own."""
        names = [name for name, known in self.library.items() if known == library]
        return self.by_name[names[0]] if names else task(library).function

    def yours(self, names: list[str]) -> list[str]:
        """The student's functions among those that a run used, in order."""
        return sorted(self.own & set(names))

    def describe(self, names: list[str]) -> str:
        """Describe which functions are the student's."""
        whose = {True: "yours", False: "the library's"}
        return ", ".join(f"{name}: {whose[name in self.own]}" for name in names)


def load_functions(assignment: dict[str, Any], implementation: str) -> Functions:
    """Load the functions of an implementation.

    Args:
        assignment: the contents of assignment.yaml.
        implementation: the package, one of its modules, any other module, or `library` for none.

    Raises:
        ImportError: the module does not exist.
        ValueError: it has none of the functions.
    """
    library = {name: entry["library"] for name, entry in assignment["functions"].items()}
    found = Functions({name: task(known).function for name, known in library.items()}, library)
    if implementation == LIBRARY:
        return found
    for name, entry in assignment["functions"].items():
        whole = implementation == assignment["package"]
        module = importlib.import_module(f"{implementation}.{entry['module']}" if whole else implementation)
        function = vars(module).get(name)
        # Names imported from another module are not the module's own.
        if callable(function) and (whole or function.__module__ == module.__name__):
            found.by_name[name] = function
            found.own.add(name)
        elif whole:
            raise ValueError(f"{module.__file__} has no function {name!r}")
    if not found.own:
        raise ValueError(f"{implementation} has none of the assignment's functions: {', '.join(library)}")
    return found


def register_preference_loss(functions: Functions, name: str) -> str:
    """Register a preference loss under its module's name, with the library loss's requirements; return that name."""
    function = functions.by_name[name]
    entry = preference_losses[functions.library[name].removeprefix("losses.")]
    registered = f"{function.__module__}.{name}"
    needs = {"needs_reference": entry.needs_reference, "batch_coupled": entry.batch_coupled}
    preference_loss(registered, **needs, columns=entry.columns)(function)
    return registered


def register_policy_loss(functions: Functions, loss: str, advantage: str | None, options: dict[str, Any]) -> str:
    """Register a whole policy loss and an advantage as an algorithm without a KL term; return its name.

    The loss is a scalar, but an algorithm returns one loss per response: every response gets the scalar, which is also
    their mean. `options` are further arguments of the loss, read at each call.
    """
    function = functions.by_name[loss]

    def whole(scores):
        given = (scores.log_probs, scores.old_log_probs, scores.old_log_probs, scores.mask)
        scalar = function(*given, scores.advantages[:, 0], **options, kl_coef=0.0)
        return scalar.reshape(1, 1).expand(len(scores.mask), 1)

    registered = f"{function.__module__}.{loss}"
    settings = {"advantage": functions.by_name[advantage]} if advantage else {}
    # An earlier run in this process may have registered the same name.
    policy_algorithm(registered, ratio="token", aggregation="sequence_mean", beta=0.0, **settings)(whole)
    return registered


class _Parser(HfArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def read_config(config_class: type[Config], settings: dict[str, Any], flags: list[str]) -> Config:
    """Build a configuration from settings and from flags, which take precedence.

    Raises:
        ValueError: the configuration does not have a setting, or does not accept a value.
    """
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    parser = _Parser(config_class, allow_abbrev=False)
    config, unknown = parser.parse_args_into_dataclasses([*given, *flags], return_remaining_strings=True)
    if unknown:
        raise ValueError(f"{config_class.__name__} has no setting {unknown[0]}")
    return config
