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
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg
from trl import ModelConfig, TrlParser

from trl_ext.files import brief
from trl_ext.names import check_choice, nearest
from trl_ext.processes import is_main_process, quiet_when_closed
from trl_ext.resilience.faults import TrainingFault
from trl_ext.runs import RECIPES, recipes_can_be_imported
from trl_ext.runs.configs import read_config

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


@dataclasses.dataclass
class LaunchArguments:
    """How a run is launched, which is no part of its settings."""

    doctor: str = HfArg(
        default="on", help="Examine data, model and configuration before training, without a step; off to leave it."
    )

    def __post_init__(self):
        check_choice("doctor", self.doctor, ("on", "off"))


def parse_arguments(
    dataclass_types: Sequence[type], *, default_config: Path | None = None, description: str | None = None
) -> tuple[Any, ...]:
    """Instances of the dataclasses from `--config FILE.yaml` and from the flags, which override the file.

    Without `--config`, the embedded model uses `default_config`, whatever the data.
    """
    parser, arguments = _Parser(dataclass_types, description), sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        print(_short_help(parser, dataclass_types, default_config))
        raise SystemExit(0)
    given = parser.known(arguments)
    path = given.config
    if path is None and default_config is not None:
        embedded = given.model_name_or_path == "toy"
        path = default_config if embedded else None
        if is_main_process():
            print(f"configuration: {os.path.relpath(default_config) if embedded else 'none but defaults and flags'}")
    words = [] if path is None else parser.words_of(path)
    instances = parser.parse_args_into_dataclasses(args=[*words, *arguments])
    # The last is the namespace that holds --config.
    return tuple(instance for instance in instances if dataclasses.is_dataclass(instance))


def check_arguments(dataclass_types: Sequence[type], arguments: Sequence[str]) -> None:
    """Reject what `parse_arguments` rejects, without an instance, which might occupy the machine's devices."""
    parser = _Parser(dataclass_types)
    given = parser.known(arguments)
    parser.parse_args([*([] if given.config is None else parser.words_of(given.config)), *arguments])


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

    def known(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The values of the flags; raises ValueError for an unknown one, and suggests the nearest."""
        given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        for name in sorted({flag[2:].replace("-", "_") for flag in given} - self.flags.keys()):
            raise ValueError(f"unknown flag --{name}{nearest(name, list(self.flags))}")
        return self.parse_known_args(arguments)[0]

    def words_of(self, path: str | Path) -> list[str]:
        """The values of a YAML file as words of a command line; what has no words becomes a default."""
        words: list[str] = []
        for key, value in read_config(path).items():
            action = self.flags.get(key)
            if action is None or key != action.dest:
                raise ValueError(f"{path}: unknown key {brief(key, 80)!r}{nearest(brief(key, 80), list(self.flags))}")
            # transformers declares `report_to` as one value, and takes several.
            if value is None or value == [] or (key == "report_to" and isinstance(value, list)):
                self.set_defaults(**{key: value})
            else:
                words += as_flag(key, value)
        try:
            self.parse_args(words)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return words


# Flags of transformers and TRL that most runs set.
_USUAL = ("model_name_or_path", "use_peft", "output_dir", "learning_rate", "max_steps", "num_train_epochs", "seed")
_USUAL += ("per_device_train_batch_size", "gradient_accumulation_steps", "report_to", "resume_from_checkpoint")


def _short_help(parser: _Parser, dataclass_types: Sequence[type], default_config: Path | None) -> str:
    """The flags that this library adds, the usual ones and those of the default configuration, with its values."""
    own, *others = dataclass_types
    of_file = read_config(default_config) if default_config else {}
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
            value = of_file.get(name, parser.flags[name].default)
            words = " ".join(as_flag(name, value)[1:]) if value != argparse.SUPPRESS else ""
            text = parser.flags[name].help
            formatter.add_argument(argparse.Action([f"--{name}"], name, help=text, metavar=words or "VALUE"))
        formatter.end_section()
    of_model = " for the embedded model" if of_file else ""
    formatter.add_text(
        f"Values are those without flags{of_model}; --help_all lists every flag of TRL and transformers."
    )
    return formatter.format_help()


def as_flag(name: str, value: Any) -> list[str]:
    """A value as words of a command line; none for None."""
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *(json.dumps(one) if isinstance(one, (dict, bool)) else str(one) for one in values)]


def argument_types(recipe: str) -> tuple[type, ...] | None:
    """The dataclasses that a training recipe reads, in order; None for any other recipe.

    Its own are the ones of the module that holds its `main`, the trainer's the ones that it imports.
    """
    if not (RECIPES / f"{recipe}.py").is_file():
        return None
    recipes_can_be_imported()
    script = vars(importlib.import_module(recipe))
    home = script["main"].__module__
    kinds = [kind for kind in vars(sys.modules[home]).values() if dataclasses.is_dataclass(kind)]
    own = [kind for kind in kinds if kind.__module__ == home]
    configs = [kind for kind in script.values() if isinstance(kind, type) and issubclass(kind, TrainingArguments)]
    return (own[0], ModelArguments, configs[0], LaunchArguments) if own and configs else None
