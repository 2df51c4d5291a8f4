"""Configuration files: YAML of a recipe's arguments, perhaps over those of another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_ext.files import read_yaml
from trl_ext.runs import RECIPES


def toy_config(name: str) -> Path:
    """The configuration of a recipe for the embedded benchmark."""
    return RECIPES / "configs" / "toy" / f"{name}.yaml"


def read_config(path: str | Path) -> dict[str, Any]:
    """The values of a YAML file, over those of the file that its key `base` names, relative to it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {str(path)!r}")
    config = read_yaml(path)
    if not isinstance(config, dict):
        found = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise ValueError(f"{path} must hold `key: value` lines, and {found}")
    base = config.pop("base", None)
    if base is None:
        return config
    if not (path.parent / str(base)).is_file():
        raise FileNotFoundError(f"{path}: there is no base {str(base)!r} in {path.parent}")
    return {**read_config(path.parent / base), **config}
