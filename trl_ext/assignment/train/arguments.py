"""The settings of a run, from a specification and from flags, which take precedence."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import HfArgumentParser

Config = TypeVar("Config")


class _Parser(HfArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def read_config(config_class: type[Config], settings: dict[str, Any], flags: list[str]) -> Config:
    """Build a configuration from settings and flags.

    Raises:
        ValueError: the configuration does not have a setting, or does not accept a value.
    """
    parser = _Parser(config_class, allow_abbrev=False)
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    config, *unknown = parser.parse_args_into_dataclasses([*given, *flags], return_remaining_strings=True)
    if unknown[-1]:
        raise ValueError(f"{config_class.__name__} has no setting {unknown[-1][0]}")
    return config
