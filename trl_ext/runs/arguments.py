"""The arguments of a recipe, read from its flags and a YAML file, and one-line errors."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg
from trl import ModelConfig, TrlParser

from trl_ext.files import brief, read_yaml
from trl_ext.names import nearest
from trl_ext.processes import is_main_process, quiet_when_closed
from trl_ext.resilience.faults import TrainingFault
from trl_ext.runs import RECIPES

# Errors that a user can fix: in arguments and data before training, and in training itself.
MENDABLE = (ValueError, OSError, ImportError, TypeError, SyntaxError)
MENDABLE_IN_TRAINING = (TrainingFault, FloatingPointError)


@contextmanager
def one_line_errors(kinds: tuple[type[Exception], ...] = MENDABLE) -> Iterator[None]:
    """Exit with a one-line message on errors that a user can fix; TRL_EXT_TRACEBACK=1 shows the traceback."""
    try:
        with quiet_when_closed():
            yield
    except kinds as error:
        if os.environ.get("TRL_EXT_TRACEBACK"):
            raise
        # Argument errors occur in every process; a reward function may fail in only one.
        if is_main_process() or kinds is MENDABLE_IN_TRAINING:
            # Print above a progress bar, not into it. A library's message may quote a whole file.
            tqdm.write(f"error: {brief(' '.join(str(error).split()), 2000)}", file=sys.stderr)
        raise SystemExit(2) from None


@dataclasses.dataclass
class ModelArguments(ModelConfig):
    """TRL's model arguments, with the embedded model as the default."""

    model_name_or_path: str | None = HfArg(
        default="toy",
        help="toy, smollm2, a folder, a GGUF file, or a hub model such as Qwen/Qwen2.5-1.5B-Instruct.",
    )


def toy_config(name: str) -> Path:
    """The configuration of a recipe for the embedded benchmark."""
    return RECIPES / "configs" / "toy" / f"{name}.yaml"


def parse_arguments(
    dataclass_types: Sequence[type], *, default_config: Path | None = None, description: str | None = None
) -> tuple[Any, ...]:
    """Instances of the dataclasses from `--config FILE.yaml` and from the flags, which override the file.

    Without `--config`, the embedded model uses `default_config`, whatever the data.
    """
    parser, arguments = _Parser(dataclass_types, description), sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        if default_config is not None:
            parser.take_defaults(default_config)
        print(_short_help(parser, dataclass_types, default_config))
        raise SystemExit(0)
    parser.refuse_unknown(arguments)
    given, _ = parser.parse_known_args(arguments)
    config_path, config = given.config, {}
    if config_path is None and default_config is not None:
        embedded = given.model_name_or_path == "toy"
        config_path = default_config if embedded else None
        if is_main_process():
            print(f"configuration: {os.path.relpath(default_config) if embedded else 'none but defaults and flags'}")
    if config_path is not None:
        config = parser.take_defaults(Path(config_path))
    try:
        *instances, rest = parser.parse_args_into_dataclasses(args=arguments, return_remaining_strings=True)
    except TypeError as error:
        # Some keys may be empty. The others fail where their value is first used.
        empty = [name for name, value in config.items() if value is None]
        what = f"{config_path}: no value for {', '.join(empty)}: " if empty else ""
        raise ValueError(f"{what}{error}") from error
    if rest:
        raise ValueError(f"unexpected {rest[0]!r} on the command line: values follow a --flag")
    # The last is the namespace that holds --config.
    return tuple(instance for instance in instances if dataclasses.is_dataclass(instance))


def check_arguments(dataclass_types: Sequence[type], arguments: Sequence[str]) -> None:
    """Reject what `parse_arguments` rejects, without an instance, which might occupy the machine's devices."""
    parser = _Parser(dataclass_types)
    parser.refuse_unknown(arguments)
    given, _ = parser.parse_known_args(arguments)
    if given.config is not None:
        parser.take_defaults(Path(given.config))
    parser.parse_args(arguments)


class _Parser(TrlParser):
    """A parser that raises errors instead of printing all usage, and reads -1e-3 as a number.

    `flags` has the action of each flag by its name.
    """

    def __init__(self, dataclass_types: Sequence[type], description: str | None = None):
        super().__init__(dataclass_types, description=description, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
        self.add_argument("--config", help="YAML file of arguments; flags override it.")
        self.add_argument("--help_all", action="help", help="Every flag, TRL's and transformers' too.")
        flags = {name[2:]: action for name, action in self._option_string_actions.items() if name[:2] == "--"}
        self.flags = {name: action for name, action in flags.items() if "-" not in name}
        # A bare --resume_from_checkpoint means the last one.
        if "resume_from_checkpoint" in self.flags:
            resume = self.flags["resume_from_checkpoint"]
            resume.nargs, resume.const = "?", "last"

    def error(self, message: str):
        raise ValueError(message)

    def refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Raise ValueError for an unknown flag, and suggest the nearest known one."""
        given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        names = {flag[2:].replace("-", "_") for flag in given}
        if "explain" in names - self.flags.keys():
            raise ValueError("no flag --explain here: python -m trl_ext.algorithms --explain NAME explains a method")
        for name in sorted(names - self.flags.keys()):
            raise ValueError(f"unknown flag --{name}{nearest(name, list(self.flags))}")

    def take_defaults(self, path: Path) -> dict[str, Any]:
        """Set the values of a YAML file as defaults and return them."""
        if not path.is_file():
            raise FileNotFoundError(f"no configuration file {str(path)!r}")
        config = read_yaml(path)
        if not isinstance(config, dict):
            found = "is empty" if config is None else f"holds a {type(config).__name__}"
            raise ValueError(f"{path} must hold `key: value` lines, and {found}")
        values = {}
        for key, value in config.items():
            if key not in self.flags or key != self.flags[key].dest or key in ("config", "help"):
                name = brief(key, 80)
                raise ValueError(f"{path}: unknown key {name!r}{nearest(name, list(self.flags))}")
            values[key] = _as_default(path, key, value, self.flags[key])
        self.set_defaults_with_config(**values)
        return values


# Flags of transformers and TRL that most runs set.
_USUAL = ("model_name_or_path", "use_peft", "output_dir", "learning_rate", "max_steps", "num_train_epochs", "seed")
_USUAL += ("per_device_train_batch_size", "gradient_accumulation_steps", "report_to", "resume_from_checkpoint")


def _short_help(parser: _Parser, dataclass_types: Sequence[type], default_config: Path | None) -> str:
    """The flags that this library adds, the usual ones and those of the default configuration, with its values."""
    own, *others = dataclass_types
    of_file = read_yaml(default_config) if default_config else {}
    names = {"the recipe": [field.name for field in dataclasses.fields(own)], "the method": [], "the run": []}
    for kind in others:
        inherited = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("trl", "transformers")]
        of_trl = {name for base in inherited for name in base.__dataclass_fields__} - {"beta"}
        title = "the run" if kind.__module__.startswith("trl_ext.runs") else "the method"
        names[title] += [field.name for field in dataclasses.fields(kind) if field.name not in of_trl]
    shown = {name for group in names.values() for name in group}
    usual = [name for name in dict.fromkeys((*_USUAL, *of_file)) if name in parser.flags.keys() - shown]
    names["the run"] = [*usual, *names["the run"], "config"]
    formatter = argparse.HelpFormatter(parser.prog, max_help_position=36)
    formatter.add_usage("%(prog)s [--config FILE.yaml] [--flag value ...]", [], [])
    formatter.add_text(parser.description)
    for title, group in names.items():
        formatter.start_section(f"flags of {title}")
        for name in group:
            default = parser.flags[name].default
            value = default if isinstance(default, (list, tuple)) else [default]
            text = " ".join(map(str, value)) if default not in (None, argparse.SUPPRESS) else "VALUE"
            formatter.add_argument(argparse.Action([f"--{name}"], name, help=parser.flags[name].help, metavar=text))
        formatter.end_section()
    of_model = " for the embedded model" if of_file else ""
    formatter.add_text(
        f"Values are those without flags{of_model}; --help_all lists every flag of TRL and transformers."
    )
    return formatter.format_help()


def _as_default(path: Path, key: str, value: Any, action: Any) -> Any:
    takes_list = action.nargs in ("+", "*")
    if value is None:
        return None
    if isinstance(value, dict):
        return json.dumps(value)
    # The parser reads `report_to` as one value, but it takes several.
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


def as_flag(name: str, value: Any) -> list[str]:
    """A value as words of a command line; none for None."""
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *(json.dumps(one) if isinstance(one, (dict, bool)) else str(one) for one in values)]


# ---- The arguments of a recipe, by the recipe's name ----

# Recipe -> its arguments in trl_ext.runs and its trainer's configuration. Names without a module are in trl_ext.
_OFFLINE, _ONLINE = "offline:OfflineArguments", "online:OnlineArguments"
_TYPES = {
    "aot": (_OFFLINE, "AOTConfig"),
    "dpo": (_OFFLINE, "DPOConfig"),
    "ipo": (_OFFLINE, "IPOConfig"),
    "preference": (_OFFLINE, "PreferenceConfig"),
    "kto": (_OFFLINE, "KTOConfig"),
    "reward_model": ("reward:RewardArguments", "RewardConfig"),
    "grpo": (_ONLINE, "GRPOConfig"),
    "dr_grpo": (_ONLINE, "DrGRPOConfig"),
    "gspo": (_ONLINE, "GSPOConfig"),
    "rloo": (_ONLINE, "RLOOConfig"),
    "remax": (_ONLINE, "ReMaxConfig"),
    "policy": (_ONLINE, "PolicyConfig"),
    "ppo": (_ONLINE, "PPOConfig"),
    "online_preference": (_ONLINE, "OnlinePreferenceConfig"),
    "sft": ("reasoning:SFTArguments", "SFTConfig"),
    "rlhf_sft": ("offline:DemonstrationArguments", "SFTConfig"),
    "expert_iteration": ("reasoning:ExpertIterationArguments", "ExpertIterationConfig"),
    "grpo_math": ("reasoning:GRPOMathArguments", "course_config:CourseConfig"),
}


def argument_types(recipe: str) -> tuple[type, ...] | None:
    """The dataclasses that a training recipe reads, in order; None for any other recipe."""
    if recipe not in _TYPES:
        return None
    own, config = (_find(name) for name in _TYPES[recipe])
    return own, ModelArguments, config, _find("engine:LaunchArguments")


def _find(name: str) -> type:
    module, _, attribute = name.rpartition(":")
    return getattr(importlib.import_module(f"trl_ext.runs.{module}" if module else "trl_ext"), attribute)
