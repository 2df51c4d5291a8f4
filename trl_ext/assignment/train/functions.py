"""Load the functions of an assignment and register them with the library's trainers.

They are registered like any user function: as a preference loss, or as a policy algorithm that names an advantage.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trl_ext.assignment.catalog.catalog import task
from trl_ext.registry import policy_algorithm, preference_loss, preference_losses

LIBRARY = "library"


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
        ValueError: the module does not exist, or has none of the functions.
    """
    listed = assignment["functions"]
    found = Functions(
        {name: task(entry["library"]).function for name, entry in listed.items()},
        {name: entry["library"] for name, entry in listed.items()},
    )
    if implementation == LIBRARY:
        return found
    for name, entry in listed.items():
        whole = implementation == assignment["package"]
        module = _import(f"{implementation}.{entry['module']}" if whole else implementation)
        function = vars(module).get(name)
        # Names imported from another module are not the module's own.
        if callable(function) and (whole or function.__module__ == module.__name__):
            found.by_name[name] = function
            found.own.add(name)
        elif whole:
            raise ValueError(f"{module.__file__} has no function {name!r}")
    if not found.own:
        raise ValueError(f"{implementation} has none of the assignment's functions: {', '.join(listed)}")
    return found


def _import(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"no module {name!r}: run this in the assignment's folder, or name another one") from None
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}") from None


def register_preference_loss(functions: Functions, name: str) -> str:
    """Register a preference loss under its module's name, with the library loss's requirements; return that name."""
    function = functions.by_name[name]
    entry = preference_losses[functions.library[name].removeprefix("losses.")]
    registered = f"{function.__module__}.{name}"
    if registered not in preference_losses:
        needs = {"needs_reference": entry.needs_reference, "batch_coupled": entry.batch_coupled}
        preference_loss(registered, **needs, columns=entry.columns)(function)
    return registered


def register_policy_loss(functions: Functions, loss: str, advantage: str | None, max_new_tokens: int) -> str:
    """Register a whole policy loss and an advantage as an algorithm without a KL term; return its name.

    The loss is a scalar, but an algorithm returns one loss per response: every response gets the scalar, which is also
    their mean.
    """
    function = functions.by_name[loss]
    options = {"max_new_tokens": max_new_tokens} if functions.library[loss].endswith("dr_grpo_loss") else {}

    def whole(scores):
        given = (scores.log_probs, scores.old_log_probs, scores.old_log_probs, scores.mask)
        scalar = function(*given, scores.advantages[:, 0], **options, kl_coef=0.0)
        return scalar.reshape(1, 1).expand(len(scores.mask), 1)

    whole.__name__ = whole.__qualname__ = f"{loss}_{max_new_tokens}"
    registered = f"{function.__module__}.{whole.__name__}"
    settings = {"advantage": functions.by_name[advantage]} if advantage else {}
    # An earlier run in this process may have registered the same name.
    policy_algorithm(registered, ratio="token", aggregation="sequence_mean", beta=0.0, **settings)(whole)
    return registered
