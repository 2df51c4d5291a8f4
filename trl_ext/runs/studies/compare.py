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
answers (sft, expert_iteration, grpo_math) are compared by accuracy, and only with one another.

With --sweep, settings are first chosen on the validation split, by runs on other seeds:

    seeds: [100]
    grid: {learning_rate: [1.0e-4, 3.0e-4]}             # of every method
    methods: {dpo: {beta: [0.05, 0.1]}}                 # and of one

If any run of a method has no value for a prompt, that prompt is left out for all settings of the method.

Finished runs are skipped and interrupted ones are resumed. The results are compare.json, compare.md and compare.png in
--output_dir.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import CommandParser, at_least_one, format_table, one_line_errors
from trl_ext.evaluation.methods.report import compare_runs, difference_table, method_table, sentence, write_comparison
from trl_ext.evaluation.methods.runs import MethodRun, choose_metric, metric_values, read_method_run
from trl_ext.evaluation.report import write_report
from trl_ext.runs import RECIPES
from trl_ext.runs.studies.compare_plan import ONLINE_RECIPES, Method, Plan, check_metric, read_plan
from trl_ext.runs.studies.processes import Countdown, Run, check_runs, print_commands, run_all, say_finished
from trl_ext.runs.studies.sweep import run_at

# Stages that SLURM runs as one array each, in this order.
STAGES = ("reward_models", "sweep", "runs")
FLAGS = ("methods", "seeds", "config", "sweep", "baseline", "metric", "max_steps", "accelerate_config")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages that the command line requests, and report."""
    with one_line_errors():
        given = _parse(arguments)
        plan = read_plan(given)
        if given.runs:
            report(plan, Path(given.runs), required=True)
        elif given.slurm:
            check_metric(plan)
            print(slurm_script(plan, given))
        elif given.dry_run:
            _print_commands(plan)
        elif given.stage:
            if run_stage(plan, given.stage, given.array_index):
                raise SystemExit(1)
        else:
            check_metric(plan)
            countdown = Countdown([run for stage in STAGES for run in stage_runs(plan, stage)])
            failed = [name for stage in _stages(plan) for name in run_stage(plan, stage, countdown=countdown)]
            say_finished(countdown.total, failed, plan.folder)
            report(plan, plan.folder)
            if failed:
                raise SystemExit(1)


def _parse(arguments: Sequence[str] | None):
    parser = CommandParser(description=__doc__)
    parser.add_argument("--methods", help="names, with commas; default: all of --config")
    parser.add_argument("--seeds", default="0-4", help="such as 0-4 or 0,2,7 (%(default)s)")
    parser.add_argument("--config", help="YAML file of methods and their arguments")
    parser.add_argument("--sweep", help="YAML file of settings to choose from on the validation split")
    parser.add_argument("--baseline", help="the method to compare with; default: the file's, or the first")
    parser.add_argument("--metric", help="score, win_rate, or a number in generations.jsonl; default: the first found")
    parser.add_argument("--max_steps", type=at_least_one, help="the same number of optimizer steps for every method")
    parser.add_argument("--output_dir", default="runs/compare", help="folder of the runs and the report (%(default)s)")
    parser.add_argument("--runs", help="compare finished runs {method}-{seed} of a folder; run nothing")
    parser.add_argument("--accelerate_config", help="for accelerate launch --config_file")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--slurm", action="store_true", help="print a script that submits all as arrays of jobs")
    parser.add_argument("--stage", choices=STAGES, help="run this stage only, without a report")
    parser.add_argument("--array_index", type=int, help="with --stage: only its run of this number, from 0")
    given = parser.parse_args(arguments)
    if given.array_index is not None and not given.stage:
        raise ValueError("--array_index needs --stage: each stage numbers its runs")
    return given


# ---- Running ----


def stage_runs(plan: Plan, stage: str, chosen: dict[str, dict[str, Any]] | None = None) -> list[Run]:
    """The runs of a stage in order; `chosen` maps methods to settings."""
    if stage == "reward_models":
        if not any(method.needs_reward_model for method in plan.methods):
            return []
        seeds = [*plan.seeds, *(plan.tuning.seeds if plan.tuning else [])]
        return [
            Run(
                "reward_model",
                plan.folder / f"reward_model-{seed}",
                {**plan.reward_model, "seed": seed},
                plan.launcher,
            )
            for seed in seeds
        ]
    if stage == "sweep":
        return [run for method in plan.methods for own in _tuning_runs(plan, method).values() for run in own]
    return [
        _run(plan, method, plan.folder / f"{method.name}-{seed}", seed, (chosen or {}).get(method.name, {}))
        for method in plan.methods
        for seed in plan.seeds
    ]


def _tuning_runs(plan: Plan, method: Method) -> dict[int, list[Run]]:
    """The runs of each setting to choose from, by the setting's number; a single setting needs no choice."""
    settings = plan.tuning.settings[method.name] if plan.tuning else []
    if len(settings) < 2:
        return {}
    splits = {**plan.tuning.validation}
    if method.recipe in ONLINE_RECIPES:
        splits.pop("eval_split")
    folder = plan.folder / "sweep"
    return {
        index: [
            _run(plan, method, folder / f"{method.name}-{index}-{seed}", seed, {**one, **splits})
            for seed in plan.tuning.seeds
        ]
        for index, one in enumerate(settings)
    }


def _run(plan: Plan, method: Method, folder: Path, seed: int, settings: dict[str, Any]) -> Run:
    rewards = {"reward_model": str(plan.folder / f"reward_model-{seed}")} if method.needs_reward_model else {}
    return Run(method.recipe, folder, {**method.arguments, **settings, **rewards, "seed": seed}, plan.launcher)


def run_stage(plan: Plan, stage: str, index: int | None = None, countdown: Countdown | None = None) -> list[str]:
    """Run the unfinished runs of a stage, or one of its runs; return the names of those that failed.

    Args:
        plan: the comparison.
        stage: one of `STAGES`.
        index: index of the only run; None for all.
        countdown: countdown over all stages; None for this stage alone.

    Raises:
        ValueError: the run does not exist, a folder belongs to another run, or the settings have not been tried yet.
    """
    runs = stage_runs(plan, stage, _chosen(plan) if stage == "runs" else None)
    if index is not None:
        runs = [run_at(runs, index)]
    check_runs(runs)
    return run_all(runs, countdown)


def _chosen(plan: Plan) -> dict[str, dict[str, Any]]:
    return {name: one["chosen"] for name, one in choose_settings(plan).items()}


def choose_settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """For each method: the number of settings `tried`, the `chosen` one, its validation `value`, and `left_out`.

    The setting with the highest mean over prompts and seeds wins; on a tie, the earlier one. If any run of a method
    has no value for a prompt, the prompt is left out for all its settings. Otherwise a setting could win by failing on
    hard prompts. `left_out` counts these prompts. A setting with an unfinished run counts as tried but is not chosen.

    Raises:
        ValueError: no setting of a method has finished all runs, or no prompt has a value in every run.
    """
    if plan.tuning is None:
        return {}
    runs = {method.name: _tried(plan, method) for method in plan.methods}
    flat = [run for tried in runs.values() for own in tried.values() for run in own]
    metric = choose_metric(flat, plan.metric) if flat else None
    chosen = {}
    for name, settings in plan.tuning.settings.items():
        if len(settings) < 2:
            chosen[name] = {"tried": 1, "chosen": settings[0], "value": None, "left_out": 0}
            continue
        if not runs[name]:
            raise ValueError(f"no setting of {name} was tried to its end in {plan.folder / 'sweep'}: see its runs")
        means, left_out = _means(name, runs[name], metric)
        best = max(means, key=means.__getitem__)
        found = {"chosen": settings[best], "value": means[best], "left_out": left_out}
        chosen[name] = {"tried": len(settings), **found}
    return chosen


def _tried(plan: Plan, method: Method) -> dict[int, list[MethodRun]]:
    """The finished settings of a method, by number."""
    return {
        index: [read_method_run(run.folder, str(index), run.arguments["seed"]) for run in runs]
        for index, runs in _tuning_runs(plan, method).items()
        if all(run.finished for run in runs)
    }


def _means(name: str, tried: dict[int, list[MethodRun]], metric: str) -> tuple[dict[int, float], int]:
    """The mean of each setting over the prompts with values in all runs, and how many prompts were left out."""
    try:
        values, left_out = metric_values([run for own in tried.values() for run in own], metric)
    except ValueError as error:
        raise ValueError(f"the settings of {name} cannot be compared: {error}") from None
    means = {index: [values[run.method, run.seed].mean() for run in own] for index, own in tried.items()}
    return {index: math.fsum(own) / len(own) for index, own in means.items()}, left_out


# ---- The report ----


def report(plan: Plan, folder: Path, *, required: bool = False) -> None:
    """Compare the finished runs, write the files, and print the tables.

    Raises:
        ValueError: the runs cannot be compared, or `required` is set and a run is missing.
    """
    runs, missing = [], []
    for method in plan.methods:
        for seed in plan.seeds:
            place = folder / f"{method.name}-{seed}"
            if (place / "results.json").is_file():
                runs.append(read_method_run(place, method.name, seed))
            else:
                missing.append(place.name)
    names = ", ".join(missing)
    if missing and required:
        raise ValueError(f"no finished run {names} in {folder}: change --methods or --seeds, or leave out --runs")
    notes = [f"Not finished, and left out: {names}."] if missing else []
    tuning = choose_settings(plan) if folder == plan.folder else {}
    if tuning:
        notes += _check_tuning(plan, tuning, runs)
    summary = compare_runs(runs, plan.baseline, metric=plan.metric, tuning=tuning or None, notes=notes)
    written = write_comparison(summary, plan.folder)
    if folder == plan.folder:
        write_report([run.folder for run in runs], plan.folder / "report.html")
        written.append("report.html")
    print(f"\n{format_table(*method_table(summary))}\n")
    if summary["comparisons"]:
        print(f"{format_table(*difference_table(summary))}\n")
    for one in summary["comparisons"]:
        print(sentence(one, summary).replace("*", ""))
    for note in summary["notes"]:
        print(note)
    print(f"\nin {plan.folder}: {', '.join(written)}")


def _check_tuning(plan: Plan, tuning: dict[str, dict[str, Any]], runs: Sequence[MethodRun]) -> list[str]:
    """Reject settings that were chosen on the comparison's prompts; return sentences on other irregularities."""
    tried = [run for method in plan.methods for own in _tried(plan, method).values() for run in own]
    if any(run.rows.keys() & one.rows.keys() for run in runs[:1] for one in tried):
        raise ValueError(f"the settings in {plan.folder / 'sweep'} were tried on prompts of the comparison itself")
    notes = [
        f"{one['left_out']} prompts of the validation split lack a value in some setting of {name}: its settings were "
        "compared without them."
        for name, one in tuning.items()
        if one["left_out"]
    ]
    counts = {name: one["tried"] for name, one in tuning.items()}
    if len(set(counts.values())) > 1:
        tried = ", ".join(f"{count} ({name})" for name, count in counts.items())
        notes.append(f"Unequal tuning, settings tried: {tried}.")
    return notes


def _stages(plan: Plan) -> list[str]:
    """The stages that have runs."""
    return [stage for stage in STAGES if stage_runs(plan, stage)]


def _print_commands(plan: Plan) -> None:
    for stage in _stages(plan):
        chosen: dict[str, Any] = {}
        if stage == "runs" and plan.tuning is not None:
            try:
                chosen = _chosen(plan)
            except ValueError:
                print("# the settings that the sweep will choose are added to the following")
        print_commands(stage_runs(plan, stage, chosen), f"{stage}, ")


def slurm_script(plan: Plan, given) -> str:
    """A shell script that submits each stage as an array of jobs, after the previous one, and a report at the end."""
    command = [sys.executable, str(RECIPES / "compare.py"), "--output_dir", str(plan.folder.resolve())]
    for flag in FLAGS:
        value = getattr(given, flag)
        if value is not None:
            is_path = flag in ("config", "sweep", "accelerate_config")
            command += [f"--{flag}", str(Path(value).resolve() if is_path else value)]
    lines = [
        "#!/bin/bash",
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        "options=(--gres=gpu:1 --time=24:00:00)",
        f"command={shlex.quote(shlex.join(command))}",
    ]
    after = ""
    for stage in _stages(plan):
        array = f"--array=0-{len(stage_runs(plan, stage)) - 1} --job-name=compare-{stage}"
        wrapped = f'"$command --stage {stage} --array_index \\$SLURM_ARRAY_TASK_ID"'
        lines.append(f'{stage}=$(sbatch --parsable {after}{array} "${{options[@]}}" --wrap {wrapped})')
        # A failed run does not stop the others; the last job lists the unfinished runs.
        after = f'--dependency="afterany:${{{stage}%%;*}}" '
    lines.append(f'sbatch {after}--job-name=compare-report "${{options[@]}}" --wrap "$command"')
    return "\n".join(lines)
