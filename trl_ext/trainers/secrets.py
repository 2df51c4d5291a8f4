"""Credentials of a configuration: in memory for as long as a run needs them, and in nothing that is written of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_CREDENTIAL = re.compile(
    r"^token$|(^|_)(hf|hub|auth|access)_?token$|api_?key|authorization|password|secret", re.IGNORECASE
)


def without_secrets(value: Any) -> Any:
    """Leave out keys of dictionaries that hold credentials, at any depth; `pad_token` and the like are none."""
    if isinstance(value, list):
        return [without_secrets(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: without_secrets(entry) for key, entry in value.items() if not _CREDENTIAL.search(str(key))}


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with `***` for credentials, and JSON objects without theirs."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if name:
            hide = _CREDENTIAL.search(name.lstrip("-").replace("-", "_")) is not None
        shown.append(name + equals + ("***" if hide and value else _object_without_secrets(value)))
    return shown


def _object_without_secrets(text: str) -> str:
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else None
    except json.JSONDecodeError:
        return text
    return text if value is None else json.dumps(without_secrets(value))


class KeepsSecrets:
    """Mixed in before a configuration of TRL's, whose `hub_token` and `model_init_kwargs` may hold credentials.

    They are left out of what transformers pickles beside every saved model, training_args.bin, and of what it sends to
    trackers as the run's settings. A copy of the configuration has none either.
    """

    def __getstate__(self) -> dict[str, Any]:
        return without_secrets(self.__dict__)

    def to_dict(self) -> dict[str, Any]:
        # transformers blanks its own tokens, and looks into no dictionary.
        return {name: without_secrets(value) for name, value in super().to_dict().items()}
