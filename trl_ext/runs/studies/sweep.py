"""Runs a study: one recipe under a list or a grid of settings, one run after another or as a SLURM array.

A study is a YAML file:

    recipe: grpo_math                  # recipes/grpo_math.py
    common:                            # arguments of every run
      config: recipes/configs/toy/grpo_math.yaml
    grid:                              # every combination; or `runs`: a list of arguments, each with a `name`
      learning_rate: [1.0e-4, 5.0e-4]
      seed: [0, 1, 2]

Each run has its own folder in `runs/{name of the study}`. Finished runs are skipped, interrupted ones resume from
their checkpoint, and a failed run does not stop the others.
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import (
    CommandParser,
    format_interval,
    format_table,
    markdown_table,
    one_line_errors,
)
from trl_ext.evaluation.report import write_report
from trl_ext.files import brief, read_yaml, write_text
from trl_ext.registry import nearest
from trl_ext.runs import RECIPES, SCRIPTS
from trl_ext.runs.studies.processes import Run, check_runs, launcher_options, print_commands, run_all, say_finished

KEYS = ("recipe", "common", "runs", "grid")
# Columns of the study's table, taken from the report's rows; only those that some run has are shown.
FIGURES = {
    "score": ("score", "policy"),
    "gain": ("score_gain",),
    "win rate, ties as half": ("win_rate", "half"),
    "accuracy, sampled": ("accuracy", "sampled"),
    "accuracy, greedy": ("accuracy", "greedy"),
    # For a reward model.
    "accuracy": ("accuracy",),
}


@dataclass(frozen=True)
class Study:
    """A study read from its file: the runs in order, their folder, and whether the study names them."""

    runs: list[Run]
    folder: Path
    named: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study that the command line names, or print its commands."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--study", required=True, help="YAML file of the study")
    parser.add_argument("--output_dir", help="folder of the runs; default: runs/{name of the study}")
    parser.add_argument("--accelerate_config", help="for accelerate launch --config_file")
    parser.add_argument("--array_index", type=int, help="run only the one of this number, from 0")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--slurm", action="store_true", help="print an sbatch script for an array of the runs")
    with one_line_errors():
        given = parser.parse_args(arguments)
        study = read_study(given.study, given.output_dir, given.accelerate_config)
        chosen = study.runs if given.array_index is None else [run_at(study.runs, given.array_index)]
        check_runs(chosen)
    if given.slurm:
        print(slurm_script(study, given))
    elif given.dry_run:
        print_commands(chosen)
    else:
        failed = run_all(chosen)
        say_finished(len(chosen), failed, study.folder)
        if given.array_index is None:
            _report(study)
        if failed:
            raise SystemExit(1)


def run_at(runs: Sequence[Run], index: int) -> Run:
    """The run of a number; ValueError if there is none."""
    if not 0 <= index < len(runs):
        raise ValueError(f"--array_index {index}: there are {len(runs)} runs, numbered from 0")
    return runs[index]


# ---- The study ----


def read_study(path: str | Path, output_dir: str | None = None, accelerate_config: str | None = None) -> Study:
    """Read and check a study.

    Raises:
        FileNotFoundError: the file, recipe or configuration does not exist.
        ValueError: the file is not YAML or not a study; the message names the key.
    """
    path = Path(path)
    content = read_keys(path, KEYS)
    recipe = str(content.get("recipe"))
    if not (RECIPES / f"{recipe}.py").is_file():
        raise FileNotFoundError(f"{path}: no recipe {recipe!r}: {RECIPES}/{recipe}.py does not exist")
    common = read_arguments(path, "common", content.get("common") or {})
    folder, launcher = Path(output_dir or f"runs/{path.stem}"), launcher_options(accelerate_config)
    runs = []
    for own in _settings(path, content):
        name = own.get("name") or "-".join(f"{key}_{value}" for key, value in own.items())
        name = re.sub(r"[^A-Za-z0-9._+-]+", "_", str(name)).strip("._")
        if name in [run.name for run in runs]:
            raise ValueError(f"{path}: two runs are called {name!r}: give each its own name")
        arguments = {**common, **{key: value for key, value in own.items() if key != "name"}}
        runs.append(Run(recipe, folder / name, with_config_found(path, arguments), launcher))
    return Study(runs, folder, "runs" in content)


def read_keys(path: str | Path, keys: Sequence[str]) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it holds something else, or a key that is not among these.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines")
    for key in content:
        if key not in keys:
            raise ValueError(f"{path}: unknown key {brief(key)!r}{nearest(brief(key), keys)} Known: {', '.join(keys)}")
    return content


def _settings(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of each run, without the common ones."""
    if ("runs" in content) == ("grid" in content):
        raise ValueError(f"{path}: give either runs (a list of arguments) or grid (lists of values)")
    if "runs" in content:
        runs = content["runs"]
        if not isinstance(runs, list) or not runs:
            raise ValueError(f"{path}: runs must be a list of arguments, one entry per run")
        return [read_arguments(path, f"runs, entry {number}", own) for number, own in enumerate(runs, start=1)]
    return combinations(path, read_arguments(path, "grid", content["grid"]))


def combinations(path: Path, grid: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values that a grid lists for its arguments.

    Raises:
        ValueError: an argument has no list of values.
    """
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: grid: {name} must be a list of values, got {brief(repr(values), 100)}")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def read_arguments(path: Path, what: str, value: Any) -> dict[str, Any]:
    """A mapping of a recipe's arguments, without those that a sweep sets itself.

    Raises:
        ValueError: the value is not a mapping; the message names `path` and `what`.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {what} must hold `argument: value` lines, got {brief(repr(value), 100)}")
    for name in value:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{path}: {what}: {brief(repr(name))} is no argument")
        if name in ("output_dir", "overwrite_output_dir", "resume_from_checkpoint"):
            raise ValueError(f"{path}: {what}: {name} is set by the sweep: leave it out")
    return value


def with_config_found(path: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the path of their configuration resolved by `find_shipped`."""
    if "config" not in arguments:
        return arguments
    what = f"{path}: no configuration file {str(arguments['config'])!r}"
    return {**arguments, "config": str(find_shipped(arguments["config"], what))}


def find_shipped(name: str | Path, missing: str) -> Path:
    """Find a file relative to the working directory, or to the parent of the recipes' folder.

    Raises:
        FileNotFoundError: the file is in neither; `missing` is the message.
    """
    found = next((place for place in (Path(name), SCRIPTS / name) if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(missing)
    return found


# ---- The report ----


def _report(study: Study) -> None:
    out = study.folder / "report.html"
    try:
        summary = write_report(study.folder, out)
    except ValueError as error:
        print(f"no report: {error}")
        return
    header, rows = table(study, summary)
    write_text(study.folder / "sweep.md", markdown_table(header, rows))
    print(f"\n{format_table(header, rows)}\n\ncomparison: {out}; this table: {study.folder / 'sweep.md'}")


def table(study: Study, summary: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: a column for each setting that varies, and the figures that any run has.

    If the study names its runs, the first column has their names.
    """
    found = {Path(row["folder"]).name: row for row in (*summary["policies"], *summary["reward_models"])}
    runs = [run for run in study.runs if run.name in found]
    names = list(dict.fromkeys(name for run in study.runs for name in run.arguments))
    varied = [name for name in names if any(run.arguments.get(name) != runs[0].arguments.get(name) for run in runs)]
    figures = {title: [_figure(found[run.name], *keys) for run in runs] for title, keys in FIGURES.items()}
    figures = {title: cells for title, cells in figures.items() if any(cells)}
    rows = [
        [
            *([run.name] if study.named else []),
            *(_setting(run.arguments.get(name)) for name in varied),
            *(cells[number] or None for cells in figures.values()),
        ]
        for number, run in enumerate(runs)
    ]
    return [*(["run"] if study.named else []), *varied, *figures], rows


def _setting(value: Any) -> str:
    # A learning rate needs more decimals than other figures.
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _figure(row: dict[str, Any], *keys: str) -> str:
    """A figure with its interval, if it has one; empty if the run has no such figure."""
    value: Any = row
    for key in keys:
        value = (value or {}).get(key)
    value = value if isinstance(value, dict) else {"value": value}
    if value.get("value") is None:
        return ""
    known = value.get("low") is not None
    return format_interval(value["value"], value["low"], value["high"]) if known else f"{value['value']:.3f}"


def slurm_script(study: Study, given) -> str:
    """An sbatch script that runs each run of the study as an array task, from the working directory."""
    command = [sys.executable, str(RECIPES / "sweep.py"), "--study", str(Path(given.study).resolve())]
    command += ["--output_dir", str(study.folder.resolve())]
    if given.accelerate_config:
        command += ["--accelerate_config", str(Path(given.accelerate_config).resolve())]
    name, last = Path(given.study).stem, len(study.runs) - 1
    return f"""\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --output={name}-%A-%a.log
#SBATCH --gres=gpu:1
#SBATCH --time=24:00:00
set -euo pipefail
cd {shlex.quote(str(Path.cwd()))}
{shlex.join(command)} --array_index "$SLURM_ARRAY_TASK_ID\""""
