"""What every recipe shares: reading its arguments, its run folder, and saying what went wrong in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from trl_ext.registry import nearest
from trl_ext.trainers.defaults import is_main_process
from trl_ext.trainers.reward_guard import RewardError

RECIPES = Path(__file__).resolve().parent
# What a run writes into its folder, beside checkpoints.
RESULT_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "generations.jsonl",
    "scores.jsonl",
    "reward_mistakes.jsonl",
    "results.json",
    "report.png",
)


# What a user can mend: in the arguments and data, before training; and of what happens in training.
MENDABLE = (ValueError, OSError, ImportError, TypeError, SyntaxError)
MENDABLE_IN_TRAINING = (RewardError, FloatingPointError)


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
            # In training, a progress bar stands at the start of the line.
            start = "\n" if kinds is MENDABLE_IN_TRAINING else ""
            print(f"{start}error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


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
    parser = _Parser(dataclass_types, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of arguments; flags override it.")
    flags = {name[2:]: action for name, action in parser._option_string_actions.items() if name[:2] == "--"}
    flags = {name: action for name, action in flags.items() if "-" not in name}
    # A bare --resume_from_checkpoint means the last one.
    if "resume_from_checkpoint" in flags:
        resume = flags["resume_from_checkpoint"]
        resume.nargs, resume.const = "?", "last"
    arguments = [part for argument in sys.argv[1:] for part in _split_flag(argument)]
    given = {argument[2:].replace("-", "_") for argument in arguments if argument.startswith("--")}
    config_path = _config_path(arguments)
    if config_path is None and default_config is not None:
        embedded = _value_of("model_name_or_path", arguments, default="toy") == "toy"
        config_path = default_config if embedded else None
        if is_main_process():
            print(f"configuration: {os.path.relpath(default_config) if embedded else 'none but defaults and flags'}")
    if config_path is not None:
        parser.set_defaults_with_config(**_read_config(config_path, flags))
    unknown = sorted(name for name in given if name not in flags)
    if unknown:
        raise ValueError(f"unknown flag --{unknown[0]}{nearest(unknown[0], list(flags))}")
    *instances, rest = parser.parse_args_into_dataclasses(args=sys.argv[1:], return_remaining_strings=True)
    if rest:
        raise ValueError(f"unexpected {rest[0]!r} on the command line: values follow a --flag")
    # The last is the namespace that holds --config.
    return tuple(instance for instance in instances if dataclasses.is_dataclass(instance))


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
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        found = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise ValueError(f"{path} must hold `key: value` lines, and {found}")
    values = {}
    for key, value in config.items():
        if key not in flags or key != flags[key].dest or key in ("config", "help"):
            raise ValueError(f"{path}: unknown key {key!r}{nearest(str(key), list(flags))}")
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
        raise ValueError(f"{path}: {key} takes one value, got {value!r}")
    try:
        if takes_list:
            return [action.type(str(item)) if action.type else item for item in value]
        return action.type(str(value)) if action.type else value
    except Exception as error:
        raise ValueError(f"{path}: {key} does not take {value!r}: {error}") from error


# What is of one call and not of the run, and what other arguments and the device settle anew.
_NOT_OF_THE_RUN = ("resume_from_checkpoint", "overwrite_output_dir", "loss_type", "use_cpu", "steps_per_generation")


def config_text(*instances: Any) -> str:
    """The resolved arguments as YAML that `--config` reads back, without secrets and without what is empty."""
    values: dict[str, Any] = {}
    for instance in instances:
        for field in dataclasses.fields(instance):
            value = getattr(instance, field.name)
            # An empty value says something where it is not the default.
            told = value is not None or field.default not in (None, dataclasses.MISSING)
            if field.init and told and field.name not in _NOT_OF_THE_RUN:
                values[field.name] = value
    if "report_to" in values:
        values["report_to"] = values["report_to"] or "none"
    plain = _without_secrets(json.loads(json.dumps(values, default=_plain)))
    return yaml.safe_dump(plain, sort_keys=True, allow_unicode=True)


# What runs of one method over several seeds differ in.
_OF_THE_SEED = ("seed", "data_seed", "output_dir", "run_name", "reward_model")


def settings_digest(resolved: str) -> str:
    """A short digest of resolved arguments, the same for runs that differ in their seed alone."""
    values = {name: value for name, value in yaml.safe_load(resolved).items() if name not in _OF_THE_SEED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """What JSON cannot hold as it is: configurations within the configuration, and types by their names."""
    return value.to_dict() if hasattr(value, "to_dict") else str(value)


def _without_secrets(value: Any) -> Any:
    """Leave out keys that hold credentials, at any depth; `pad_token` and the like are none."""
    if isinstance(value, list):
        return [_without_secrets(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    credential = r"^token$|(^|_)(hf|hub|auth|access)_?token$|api_?key|authorization|password|secret"
    secret = re.compile(credential, re.IGNORECASE)
    return {key: _without_secrets(entry) for key, entry in value.items() if not secret.search(key)}


def open_run_folder(output_dir: str, *, overwrite: bool, resume_from_checkpoint: str | None) -> str | None:
    """Check that a run may write into its folder; returns the checkpoint to resume from, if any.

    Raises:
        FileExistsError: the folder holds an earlier run, and neither flag says what to do with it.
        OSError: the folder cannot be made or written to.
        FileNotFoundError: there is no checkpoint to resume from.
        ValueError: both flags are given.
    """
    folder = Path(output_dir)
    if overwrite and resume_from_checkpoint:
        raise ValueError("give --overwrite_output_dir or --resume_from_checkpoint, not both")
    if resume_from_checkpoint and resume_from_checkpoint.lower() != "false":
        if resume_from_checkpoint.lower() not in ("last", "true"):
            if not (Path(resume_from_checkpoint) / "trainer_state.json").is_file():
                raise FileNotFoundError(f"{resume_from_checkpoint!r} is no checkpoint: it has no trainer_state.json")
            return resume_from_checkpoint
        # The state is written last: a checkpoint without it was interrupted.
        complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
        complete = [path for path in complete if path.name.rpartition("-")[2].isdigit()]
        if not complete:
            raise FileNotFoundError(f"{output_dir} has no checkpoint to resume: leave out --resume_from_checkpoint")
        last = str(max(complete, key=lambda path: int(path.name.rpartition("-")[2])))
        if is_main_process():
            print(f"going on from {last}")
        return last
    _check_writable(folder)
    # Arguments alone are of a run that failed before its first step.
    files = [folder / name for name in RESULT_FILES if name != "config.yaml"]
    earlier = [path.name for path in files if path.exists() and path.stat().st_size]
    earlier += [path.name for path in sorted(folder.glob("checkpoint-*"))]
    if earlier and not overwrite:
        raise FileExistsError(
            f"{output_dir} holds an earlier run ({', '.join(earlier[:3])}): choose another --output_dir, resume it "
            "with --resume_from_checkpoint, or give --overwrite_output_dir"
        )
    return None


def check_trackers(report_to: Sequence[str]) -> None:
    """Fail before the model loads, rather than after, where a tracker cannot be used.

    Raises:
        ValueError: its package is missing, or wandb would ask for a login.
    """
    for tracker in report_to:
        if tracker in ("wandb", "trackio", "tensorboard") and importlib.util.find_spec(tracker) is None:
            raise ValueError(f"--report_to {tracker} needs its package: pip install {tracker}")
    if "wandb" in report_to and not os.environ.get("WANDB_API_KEY") and is_main_process():
        import wandb

        online = wandb.setup().settings.mode not in ("offline", "disabled", "dryrun")
        if online and not wandb.login(prompt=False):
            raise ValueError("--report_to wandb has no login: run `wandb login`, or set WANDB_MODE=offline")


def _check_writable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--output_dir {folder} is a file: name a folder")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"--output_dir {folder} cannot be written to: no permission in {parent}")


def clear_run_folder(output_dir: str) -> None:
    """Remove what an earlier run left, so that no file of it passes for the new one's."""
    folder = Path(output_dir)
    model_files = ("adapter_*", "model*.safetensors*", "*config.json", "training_args.bin", "reward_model.json")
    for path in [*(folder / name for name in RESULT_FILES), *(p for name in model_files for p in folder.glob(name))]:
        path.unlink(missing_ok=True)
    for path in [*folder.glob("checkpoint-*"), *(folder / name for name in ("samples", "best", "best.partial"))]:
        shutil.rmtree(path, ignore_errors=True)
