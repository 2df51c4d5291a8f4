"""What every recipe shares: reading its arguments, and saying what went wrong in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The libraries read these once, when they are imported. No telemetry unless the user asks for it.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Bars disappear from a terminal when they are full. Without a terminal there are none.
os.environ.setdefault("TQDM_LEAVE", "")
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")

from tqdm.auto import tqdm
from trl import TrlParser

from trl_ext.files import brief, read_yaml
from trl_ext.registry import nearest
from trl_ext.trainers.defaults import is_main_process
from trl_ext.trainers.faults import TrainingFault

RECIPES = Path(__file__).resolve().parent

# What a user can mend: in the arguments and data, before training; and of what happens in training.
MENDABLE = (ValueError, OSError, ImportError, TypeError, SyntaxError)
MENDABLE_IN_TRAINING = (TrainingFault, FloatingPointError)
# Characters of a message; a library's may quote a whole file.
LONGEST_MESSAGE = 2000
SHOW_ALL = "TRL_EXT_TRACEBACK=1 shows all"


@contextmanager
def one_line_errors(kinds: tuple[type[Exception], ...] = MENDABLE) -> Iterator[None]:
    """End the program with one line for what a user can mend; the traceback shows with TRL_EXT_TRACEBACK=1."""
    try:
        yield
    except kinds as error:
        if os.environ.get("TRL_EXT_TRACEBACK"):
            raise
        # Arguments fail alike on every process; a reward function may fail on one of them.
        if is_main_process() or kinds is MENDABLE_IN_TRAINING:
            # Above a progress bar, not into it.
            tqdm.write(f"error: {_one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _one_line(error: Exception) -> str:
    """The message without line breaks; of a long one its beginning, and how much there is of the rest."""
    message = " ".join(str(error).split())
    cut = len(message) - LONGEST_MESSAGE
    return message if cut <= 0 else f"{message[:LONGEST_MESSAGE]}... ({cut:,} characters more; {SHOW_ALL})"


def parse_arguments(
    dataclass_types: Sequence[type], *, default_config: Path | None = None, description: str | None = None
) -> tuple[Any, ...]:
    """Instances of the dataclasses from `--config FILE.yaml` and from the flags, which override it.

    Args:
        dataclass_types: their fields become flags and keys.
        default_config: used without `--config` for the embedded model, whatever it is trained on.
        description: for `--help`.

    Raises:
        ValueError: an unknown flag or key (with the nearest valid one), or a value of the wrong type.
        FileNotFoundError: no such configuration file.
    """
    parser, flags = _parser(dataclass_types, description)
    arguments = [part for argument in sys.argv[1:] for part in _split_flag(argument)]
    config_path, config = _config_path(arguments), {}
    if config_path is None and default_config is not None:
        embedded = _value_of("model_name_or_path", arguments, default="toy") == "toy"
        config_path = default_config if embedded else None
        if is_main_process():
            print(f"configuration: {os.path.relpath(default_config) if embedded else 'none but defaults and flags'}")
    if config_path is not None:
        config = _read_config(config_path, flags)
        parser.set_defaults_with_config(**config)
    _refuse_unknown(arguments, flags)
    try:
        *instances, rest = parser.parse_args_into_dataclasses(args=sys.argv[1:], return_remaining_strings=True)
    except TypeError as error:
        # Some keys may hold nothing, and those that may not fail wherever their value is first used.
        empty = [name for name, value in config.items() if value is None]
        if not empty:
            raise
        raise ValueError(f"{config_path}: no value for {', '.join(empty)}: {error}") from error
    if rest:
        raise ValueError(f"unexpected {rest[0]!r} on the command line: values follow a --flag")
    # The last is the namespace that holds --config.
    return tuple(instance for instance in instances if dataclasses.is_dataclass(instance))


def check_arguments(dataclass_types: Sequence[type], arguments: Sequence[str]) -> None:
    """Refuse names that the dataclasses do not have and values that are of no type of theirs; makes no instance.

    Instances look for the machine's devices, and may occupy them.

    Args:
        dataclass_types: as for `parse_arguments`.
        arguments: of a command line, which may name a `--config`.

    Raises:
        ValueError, FileNotFoundError: as `parse_arguments`.
    """
    parser, flags = _parser(dataclass_types)
    arguments = [part for argument in arguments for part in _split_flag(argument)]
    config_path = _config_path(arguments)
    if config_path is not None:
        parser.set_defaults_with_config(**_read_config(config_path, flags))
    _refuse_unknown(arguments, flags)
    parser.parse_args(list(arguments))


def _parser(dataclass_types: Sequence[type], description: str | None = None) -> tuple[_Parser, dict[str, Any]]:
    """The parser, and its action of each flag by the flag's name."""
    parser = _Parser(dataclass_types, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of arguments; flags override it.")
    flags = {name[2:]: action for name, action in parser._option_string_actions.items() if name[:2] == "--"}
    flags = {name: action for name, action in flags.items() if "-" not in name}
    # A bare --resume_from_checkpoint means the last one.
    if "resume_from_checkpoint" in flags:
        resume = flags["resume_from_checkpoint"]
        resume.nargs, resume.const = "?", "last"
    return parser, flags


def _refuse_unknown(arguments: Sequence[str], flags: dict[str, Any]) -> None:
    given = {argument[2:].replace("-", "_") for argument in arguments if argument.startswith("--")}
    unknown = sorted(name for name in given if name not in flags)
    if unknown:
        raise ValueError(f"unknown flag --{unknown[0]}{nearest(unknown[0], list(flags))}")


class _Parser(TrlParser):
    """Raises what argparse would print below hundreds of lines of usage, and takes -1e-3 for the number it is."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def error(self, message: str):
        raise ValueError(message)


def _split_flag(argument: str) -> list[str]:
    """`--flag=value` as its two parts."""
    if argument.startswith("--") and "=" in argument:
        return argument.split("=", 1)
    return [argument]


def _value_of(name: str, arguments: list[str], *, default: str) -> str:
    """What the last `--name` on the command line is given, or the default."""
    flags = [argument.replace("-", "_") for argument in arguments]
    positions = [index for index, flag in enumerate(flags[:-1]) if flag == f"__{name}"]
    return arguments[positions[-1] + 1] if positions else default


def _config_path(arguments: list[str]) -> Path | None:
    if "--config" not in arguments:
        return None
    index = arguments.index("--config")
    if index + 1 == len(arguments):
        raise ValueError("--config needs the path of a YAML file")
    return Path(arguments[index + 1])


def _read_config(path: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """Values of a YAML file as defaults for the parser, as text where the parser will convert and check text."""
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {str(path)!r}")
    config = read_yaml(path)
    if not isinstance(config, dict):
        found = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise ValueError(f"{path} must hold `key: value` lines, and {found}")
    values = {}
    for key, value in config.items():
        if key not in flags or key != flags[key].dest or key in ("config", "help"):
            name = brief(key, 80)
            raise ValueError(f"{path}: unknown key {name!r}{nearest(name, list(flags))}")
        values[flags[key].dest] = _as_default(path, key, value, flags[key])
    return values


def _as_default(path: Path, key: str, value: Any, action: Any) -> Any:
    takes_list = action.nargs in ("+", "*")
    if value is None:
        return None
    if isinstance(value, dict):
        return json.dumps(value)
    # `report_to` is one value to the parser, and takes several.
    if key == "report_to" and isinstance(value, list):
        return value
    if takes_list and not isinstance(value, list):
        value = [value]
    if isinstance(value, list) and not takes_list:
        raise ValueError(f"{path}: {key} takes one value, got {brief(repr(value), 100)}")
    try:
        if takes_list:
            return [action.type(str(item)) if action.type else item for item in value]
        return action.type(str(value)) if action.type else value
    except Exception as error:
        raise ValueError(f"{path}: {key} does not take {brief(repr(value), 100)}: {brief(error, 200)}") from error
