"""Compares methods fairly: same data and held-out prompts, several seeds each, and tests of the differences.

    python recipes/compare.py --methods dpo,ipo,aot --seeds 0-4 --baseline dpo

Each method is a recipe with its configuration for the embedded benchmark, or is defined in a file (--config):

    baseline: dpo
    common: {num_eval_prompts: 200}    # arguments of every run
    reward_model: {config: recipes/configs/toy/reward_model.yaml}
    methods:
      dpo: {config: recipes/configs/toy/dpo.yaml}
      dpo_low: {recipe: dpo, config: recipes/configs/toy/dpo.yaml, beta: 0.05}

Methods that need a reward model get one trained for each seed. Methods that are evaluated on problems with known
answers (sft_math, expert_iteration, grpo_math) are compared by accuracy, and only with one another.

Finished runs are skipped and interrupted ones are resumed. The results are compare.json and compare.md in
--output_dir.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.data.benchmark import EMBEDDED
from trl_ext.evaluation.command_line import CommandParser, format_table, one_line_errors
from trl_ext.evaluation.comparing.runs import (
    compare_runs,
    difference_table,
    method_table,
    read_method_run,
    write_comparison,
)
from trl_ext.evaluation.report import write_report
from trl_ext.files import brief
from trl_ext.names import nearest
from trl_ext.runs import SCRIPTS
from trl_ext.runs.configs import read_config
from trl_ext.studies.processes import Run, check_runs, launcher_options, print_commands, run_all, settings_of

PAIR_RECIPES = ("aot", "dpo", "ipo", "kto", "preference")
# Methods that need a reward model.
ONLINE_RECIPES = ("dr_grpo", "grpo", "gspo", "online", "online_preference", "ppo", "remax", "rloo")
# Methods that are evaluated on problems with known answers.
REASONING_RECIPES = ("expert_iteration", "grpo_math", "sft_math")
# Keys of a file of methods.
KEYS = ("baseline", "common", "reward_model", "methods")
METHODS = (*PAIR_RECIPES, "sft", *ONLINE_RECIPES, *REASONING_RECIPES)


@dataclass(frozen=True)
class Study:
    """A grid of methods and seeds, whose runs share one folder.

    Attributes:
        methods: recipe and arguments of each method, by its name.
        baseline: the method with which the others are compared.
        reward_model: arguments of the reward models.
        launcher: options of `accelerate launch`.
        metric: what is compared; None for the first that the runs have.
    """

    methods: dict[str, tuple[str, dict[str, Any]]]
    baseline: str
    seeds: list[int]
    folder: Path
    reward_model: dict[str, Any] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)
    metric: str | None = None

    def runs(self) -> list[Run]:
        """The runs of all methods and seeds, reward models first."""
        reward_models, runs = {}, []
        for name, (recipe, arguments) in self.methods.items():
            own_rewards = {"reward_model", "reward_function"} & settings_of(arguments).keys()
            for seed in self.seeds:
                given, after = {**arguments, "seed": seed}, ()
                if recipe in ONLINE_RECIPES and not own_rewards:
                    folder = self.folder / f"reward_model-{seed}"
                    given["reward_model"] = str(folder)
                    settings = {**self.reward_model, "seed": seed}
                    after = (reward_models.setdefault(seed, Run("reward_model", folder, settings, self.launcher)),)
                runs.append(Run(recipe, self.folder / f"{name}-{seed}", given, self.launcher, after))
        return [*reward_models.values(), *runs]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line requests and is not finished, and report."""
    with one_line_errors():
        given = parse(arguments)
        study = read_study(given)
        if given.runs:
            report(study, Path(given.runs), required=True)
        elif given.dry_run:
            print_commands(study.runs())
        else:
            run_study(study, with_report=not given.no_report)


def parse(arguments: Sequence[str] | None):
    """The command line's arguments."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--methods", help="names, with commas; default: all of --config")
    parser.add_argument("--seeds", default="0-4", help="such as 0-4 or 0,2,7 (%(default)s)")
    parser.add_argument("--config", help="YAML file of methods and their arguments")
    parser.add_argument("--baseline", help="the method to compare with; default: the file's, or the first")
    parser.add_argument("--metric", help="score, win_rate, or a number in generations.jsonl; default: the first found")
    parser.add_argument("--output_dir", default="runs/compare", help="folder of the runs and the report (%(default)s)")
    parser.add_argument("--runs", help="compare finished runs {method}-{seed} of a folder; run nothing")
    parser.add_argument("--accelerate_config", help="for accelerate launch --config_file")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--no_report", action="store_true", help="run without the report, as in a job for one seed")
    return parser.parse_args(arguments)


# ---- What is asked for ----


def read_study(given) -> Study:
    """The study that the command line and its files describe, checked before anything runs."""
    content = read_config(given.config) if given.config else {}
    for key in map(str, content):
        if key not in KEYS:
            what = f"{given.config}: unknown key {brief(key)!r}{nearest(brief(key), KEYS)}"
            raise ValueError(f"{what} Known: {', '.join(KEYS)}")
    known, where = content.get("methods") or {}, given.config or "--methods"
    common = read_arguments(f"{where}: common", content.get("common") or {})
    names = [name.strip() for name in given.methods.split(",")] if given.methods else list(known)
    if not names or len(set(names)) < len(names):
        what = f"--methods {given.methods}: a method is named twice" if names else "no methods"
        raise ValueError(f"{what}: name some with --methods dpo,ipo, or in a file with --config")
    methods = {name: _method(name, known, common, where, to_run=not given.runs) for name in names}
    # Finished runs are checked by the prompts that they answered.
    if len({recipe in REASONING_RECIPES for recipe, _ in methods.values()}) > 1 and not given.runs:
        raise ValueError("problems with known answers and prompts are compared apart: name methods of one kind")
    baseline = given.baseline or content.get("baseline") or names[0]
    # A file's baseline may be none of those that --methods chose.
    if baseline not in names and (given.baseline or baseline not in known):
        raise ValueError(f"the baseline {baseline!r} is not among the methods: {', '.join(names)}")
    return Study(
        methods,
        baseline if baseline in names else names[0],
        read_seeds(given.seeds),
        Path(given.output_dir),
        reward_model=read_arguments(f"{where}: reward_model", content.get("reward_model") or {}),
        launcher=launcher_options(given.accelerate_config),
        metric=given.metric,
    )


def _method(name: str, known: dict, common: dict, where: str, *, to_run: bool) -> tuple[str, dict[str, Any]]:
    """The recipe of a method and its arguments."""
    arguments = {**common, **read_arguments(f"{where}: {name}", known.get(name) or {})}
    recipe = str(arguments.pop("recipe", name))
    if to_run and recipe not in METHODS:
        choices = list(dict.fromkeys([*known, *METHODS]))
        raise ValueError(f"no method {recipe!r}{nearest(recipe, choices)} Known: {', '.join(choices)}")
    return recipe, arguments


def read_seeds(text: str) -> list[int]:
    """Read `0-4` or `0,2,7` as numbers."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or dash and not last.isdecimal():
            raise ValueError(f"--seeds {text}: give numbers from 0, such as 0-4 or 0,2,7")
        seeds += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(seeds))


def read_arguments(where: str, value: Any) -> dict[str, Any]:
    """A mapping of a recipe's arguments, whose configuration file is found by `find_shipped`."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold `argument: value` lines")
    for name in ("output_dir", "overwrite_output_dir", "resume_from_checkpoint"):
        if name in value:
            raise ValueError(f"{where}: {name} is set by the study: leave it out")
    if "config" not in value:
        return value
    found = find_shipped(value["config"], f"{where}: no configuration file {str(value['config'])!r}")
    return {**value, "config": str(found)}


def find_shipped(name: str | Path, missing: str) -> Path:
    """Find a file relative to the working directory, or to the parent of the recipes' folder."""
    for place in (Path(name), SCRIPTS / name):
        if place.is_file():
            return place
    raise FileNotFoundError(missing)


# ---- Running and reporting ----


def run_study(study: Study, *, with_report: bool = True) -> None:
    """Run what is not finished, and report on all runs."""
    # Runs on other prompts than the embedded ones leave no score.
    for recipe, arguments in study.methods.values() if with_report else ():
        named = settings_of(arguments).get("dataset_name", "toy")
        if study.metric is None and recipe not in REASONING_RECIPES and named not in EMBEDDED:
            raise ValueError(
                f"{named} comes with no judge: name a number in generations.jsonl with --metric, or give --no_report "
                "and judge the responses with python -m public_eval.judge"
            )
    runs = study.runs()
    check_runs(runs)
    failed = run_all(runs)
    print(f"\n{len(runs) - len(failed)} of {len(runs)} runs are finished, in {study.folder}")
    if with_report:
        report(study, study.folder)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries them again")
        raise SystemExit(1)


def report(study: Study, folder: Path, *, required: bool = False) -> None:
    """Compare the finished runs, write the files, and print the tables; if `required`, none may be missing."""
    places = [(folder / f"{method}-{seed}", method, seed) for method in study.methods for seed in study.seeds]
    finished = [place for place in places if (place[0] / "results.json").is_file()]
    missing = ", ".join(place[0].name for place in places if place not in finished)
    if missing and required:
        raise ValueError(f"no finished run {missing} in {folder}: change --methods or --seeds, or leave out --runs")
    runs = [read_method_run(*place) for place in finished]
    notes = [f"Not finished, and left out: {missing}."] if missing else []
    summary = compare_runs(runs, study.baseline, metric=study.metric, notes=notes)
    written = write_comparison(summary, study.folder)
    if folder == study.folder:
        write_report([run.folder for run in runs], study.folder / "report.html")
        written.append("report.html")
    print(f"\n{format_table(*method_table(summary))}\n")
    if summary["comparisons"]:
        print(f"{format_table(*difference_table(summary))}\n")
    print("\n".join([*summary["notes"], f"\nin {study.folder}: {', '.join(written)}"]))
