"""Credentials in a configuration: kept in memory for the run, and left out of everything that the run writes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

# In lower case, with underscores for hyphens.
SECRET_NAMES = frozenset(
    ("token", "hub_token", "hf_token", "push_to_hub_token", "auth_token", "use_auth_token", "access_token")
    + ("api_token", "bearer_token", "api_key", "apikey", "x_api_key", "hf_api_key", "openai_api_key", "wandb_api_key")
    + ("judge_api_key", "vllm_api_key", "password", "passwd", "secret", "client_secret", "secret_key")
    + ("private_key", "access_key", "credentials", "authorization", "cookie")
)


def _is_secret(name: Any, value: Any = "") -> bool:
    # A number is no credential: a weight of a column called token, say, or `token=True` for the stored login.
    return str(name).replace("-", "_").lower() in SECRET_NAMES and not isinstance(value, (int, float, type(None)))


def without_secrets(value: Any) -> Any:
    """Remove the keys of `SECRET_NAMES` from dictionaries, at any depth of dictionaries and lists, but not numbers."""
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
        if name:
            hide = _is_secret(name.lstrip("-"))
        hidden = value and (hide or any(f'"{secret}"' in value.lower() for secret in SECRET_NAMES))
        shown.append(name + equals + ("***" if hidden else value))
    return shown


class KeepsSecrets:
    """Mixin before TRL's configurations, whose `hub_token` and `model_init_kwargs` may hold credentials.

    Credentials are left out of training_args.bin, which transformers pickles with every saved model, and out of the
    settings that it sends to trackers. Copies keep them.
    """

    def __getstate__(self) -> dict[str, Any]:
        return without_secrets(self.__dict__)

    def __copy__(self):
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]):
        made = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def to_dict(self) -> dict[str, Any]:
        # transformers hides its own tokens, but does not look into dictionaries.
        return {name: without_secrets(value) for name, value in super().to_dict().items()}
