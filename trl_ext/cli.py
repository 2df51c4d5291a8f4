"""The `trl-ext` command: the recipes, the evaluation and the report, wherever the package is installed."""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from trl_ext import __version__
from trl_ext.names import nearest
from trl_ext.processes import quiet_when_closed
from trl_ext.runs import RECIPES, SCRIPTS, recipes_can_be_imported

CONFIGS = RECIPES / "configs"

MODULES = {
    "generate": ("public_eval.generate", "sample responses to the evaluation's prompts"),
    "judge": ("public_eval.judge", "win rates of responses against the base's"),
    "score": ("public_eval.score", "scores of preference pairs by a reward model"),
    "pack": ("public_eval.pack", "make a submission"),
    "grade": ("public_eval.grade", "grade a submission against the thresholds"),
    "tournament": ("public_eval.tournament", "rank several submissions by their matches"),
    "report": ("trl_ext.evaluation.report", "one page about any number of runs"),
    "evaluate": ("trl_ext.evaluation.tasks", "a model on a task: GSM8K, SVAMP, your own row of YAML"),
    "doctor": ("trl_ext.doctor.cli", "why nothing is learned, from a configuration or a run's folder"),
    "algorithms": ("trl_ext.algorithms", "the table of online algorithms"),
    "assignment": ("trl_ext.assignment", "write a course's assignment from a solved package"),
}
# Recipes that run other recipes. They are not launched themselves.
STUDIES = {"compare": "train methods over seeds and compare them with a baseline"}
# Flags of scripts that take a YAML file.
FILE_FLAGS = ("--config", "--accelerate_config")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; the default is the process's own arguments."""
    try:
        with quiet_when_closed():
            _run(list(sys.argv[1:] if arguments is None else arguments))
    except UsageError as error:
        # All processes of a launcher fail in the same way.
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class UsageError(ValueError):
    """A command line that names something that does not exist; its message is one line."""


def _run(arguments: list[str]) -> None:
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help", "help"):
        print(_help())
    elif command == "--version":
        print(f"trl_ext {__version__}")
    elif command == "train":
        _train(rest)
    elif command == "configs":
        _configs(rest)
    elif command in STUDIES:
        run_script(command, rest)
    elif command in MODULES:
        run_module(command, rest)
    else:
        known = ["train", "configs", *STUDIES, *MODULES]
        raise UsageError(f"no command {command!r}{nearest(command, known)} Known: {', '.join(known)}")


def _help() -> str:
    described = {
        "train RECIPE": "train by a recipe, with its flags; --list names the recipes",
        "configs [NAME]": "list the configurations that come along, or print the path of one",
        **STUDIES,
        **{name: text for name, (_, text) in MODULES.items()},
    }
    lines = "\n".join(f"  {name:22}  {text}" for name, text in described.items())
    several = "On several processes: accelerate launch --multi_gpu -m trl_ext train RECIPE ..."
    return f"usage: trl-ext COMMAND ... (every command has --help)\n\n{lines}\n\n{several}"


def recipes() -> dict[str, str]:
    """Names of the recipes, each with the first sentence of its docstring."""
    found = {}
    for path in sorted(RECIPES.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' in text and path.stem not in STUDIES:
            described = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
            found[path.stem] = described.partition(". ")[0].rstrip(".")
    return found


def _train(arguments: list[str]) -> None:
    known = recipes()
    if not arguments or arguments[0] in ("-h", "--help", "--list"):
        print("usage: trl-ext train RECIPE [--config FILE] [flags of the recipe; --help lists them]\n")
        width = max(map(len, known))
        for name, described in known.items():
            print(f"  {name:{width}}  {described}")
            configs = [config for config in shipped_configs() if Path(config).stem == name]
            if configs:
                print(f"  {'':{width}}  --config {', '.join(configs)}")
        return
    name, *rest = arguments
    if name not in known:
        raise UsageError(f"no recipe {name!r}{nearest(name, list(known))} Known: {', '.join(known)}")
    run_script(name, rest)


def run_script(name: str, arguments: Sequence[str]) -> None:
    """Run `recipes/{name}.py` in this process, as Python runs a script."""
    script = str(RECIPES / f"{name}.py")
    sys.argv = _with_files([script, *arguments])
    recipes_can_be_imported()
    runpy.run_path(script, run_name="__main__")


def _with_files(arguments: Sequence[str]) -> list[str]:
    """The arguments with the paths of the files that they name, which may be shipped with the package."""
    found: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if equals and flag in FILE_FLAGS:
            argument = f"{flag}={find_file(value)}"
        elif found and found[-1] in FILE_FLAGS:
            argument = find_file(argument)
        found.append(argument)
    return found


def shipped_configs() -> list[str]:
    """The recipes' configurations that are shipped with the package, such as `toy/aot.yaml`, without mere bases."""
    return sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("[!_]*.yaml"))


def _launcher_configs() -> list[str]:
    return sorted(path.relative_to(SCRIPTS).as_posix() for path in (SCRIPTS / "accelerate_configs").glob("*.yaml"))


def find_file(name: str) -> str:
    """The path of a file as given, or else of the shipped file with this name; UsageError if there is neither."""
    for place in (Path(name), CONFIGS / name, SCRIPTS / name):
        if place.is_file():
            return str(place)
    known = [*shipped_configs(), *_launcher_configs()]
    raise UsageError(
        f"no file {name!r}, neither here nor among those that come along{nearest(name, known)} "
        "`trl-ext configs` lists them"
    )


def _configs(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        print(find_file(arguments[0]))
        return
    print(f"in {CONFIGS}, for trl-ext train RECIPE --config NAME:")
    print("\n".join(f"  {name}" for name in shipped_configs()))
    print(f"in {SCRIPTS}, for accelerate launch --config_file $(trl-ext configs NAME) -m trl_ext train RECIPE:")
    print("\n".join(f"  {name}" for name in _launcher_configs()))


def run_module(command: str, arguments: Sequence[str]) -> None:
    """Run the module behind a command, as `python -m` does."""
    module, _ = MODULES[command]
    if module.startswith("public_eval."):
        sys.path.insert(0, str(SCRIPTS))
    sys.argv = [f"trl-ext {command}", *(_with_files(arguments) if command == "doctor" else arguments)]
    runpy.run_module(module, run_name="__main__")
