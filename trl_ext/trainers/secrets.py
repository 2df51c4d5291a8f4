"""Credentials of a configuration: in memory for as long as a run needs them, and in nothing that is written of it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

_CREDENTIAL = re.compile(
    r"^token$|(^|_)(hf|hub|auth|access)token$|(api|private|access)_?key|authorization|passw(or)?d|secret|credential"
    r"|cookie"
)
# Before `_token`: what stands for a part of a text, and not for an account.
_PARTS_OF_TEXT = frozenset(
    ("pad", "bos", "eos", "eot", "boi", "eoi", "unk", "sep", "cls", "mask", "special", "start", "end", "begin", "stop")
    + ("turn", "image", "img", "video", "audio", "vision", "per")
)
# The name and password of an address, up to its host.
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/?#@\s]+(?=@)")


def without_secrets(value: Any) -> Any:
    """Leave out keys of dictionaries that hold credentials, at any depth, and users of addresses.

    `pad_token` and the like are no credentials.
    """
    if isinstance(value, str):
        return _USER_OF_ADDRESS.sub("***", value)
    if isinstance(value, list):
        return [without_secrets(entry) for entry in value]
    if isinstance(value, tuple):
        entries = map(without_secrets, value)
        return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
    if not isinstance(value, dict):
        return value
    return {key: without_secrets(entry) for key, entry in value.items() if not _is_credential(str(key))}


def _is_credential(name: str) -> bool:
    # Headers have hyphens.
    name = name.replace("-", "_").lower()
    if name.endswith("_token"):
        return name.split("_")[-2] not in _PARTS_OF_TEXT
    return _CREDENTIAL.search(name) is not None


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with `***` for credentials, and lists and objects, of JSON or Python, without theirs."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if name:
            hide = _is_credential(name.lstrip("-"))
        shown.append(name + equals + ("***" if hide and value else _value_without_secrets(value)))
    return shown


def _value_without_secrets(text: str) -> str:
    if text.lstrip()[:1] in ("{", "[", "("):
        for parse, write in ((json.loads, json.dumps), (ast.literal_eval, repr)):
            try:
                value = parse(text.strip())
                clean = without_secrets(value)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
            return text if clean == value else write(clean)
    return without_secrets(text)


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
