"""Credentials in a configuration: kept in memory for the run, and left out of everything that the run writes."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

SECRET_NAMES = re.compile(
    r"(?:(?:(?:push_to_)?hub|hf|(?:use_)?auth|access|api|bearer)_)?token|(?:\w+_)?api_?key|passw(?:or)?d"
    r"|(?:client_)?secret|(?:secret|private|access)_key|credentials|authorization|cookie",
    re.IGNORECASE,
)


def _is_secret(name: Any, value: Any = "") -> bool:
    # A number is no credential: a weight of a column called token, say, or `token=True` for the stored login.
    is_number = isinstance(value, (int, float, type(None)))
    return not is_number and SECRET_NAMES.fullmatch(str(name).replace("-", "_")) is not None


def without_secrets(value: Any) -> Any:
    """Remove keys that match `SECRET_NAMES`, at any depth of dictionaries and lists, unless the value is a number."""
    if isinstance(value, list):
        return [without_secrets(entry) for entry in value]
    if isinstance(value, dict):
        return {name: without_secrets(entry) for name, entry in value.items() if not _is_secret(name, entry)}
    return value


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with `***` for credentials, and for JSON that names one."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        hide = _is_secret(name.lstrip("-")) if name else hide
        hidden = value and (hide or any(map(_is_secret, re.findall('"([^"]+)"', value))))
        shown.append(name + equals + ("***" if hidden else value))
    return shown


class KeepsSecrets:
    """Mixin before TRL's configurations, whose `hub_token` and `model_init_kwargs` may hold credentials.

    They are left out of training_args.bin, which transformers pickles with every saved model, and of the settings
    that it sends to trackers. A deep copy keeps them, to load a private model.
    """

    def __getstate__(self) -> dict[str, Any]:
        return without_secrets(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]):
        made = object.__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def to_dict(self) -> dict[str, Any]:
        # transformers hides its own tokens, but does not look into dictionaries.
        return {name: without_secrets(value) for name, value in super().to_dict().items()}
