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

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trl_ext.evaluation.command_line import CommandParser, at_least_one, format_table, one_line_errors
from trl_ext.evaluation.comparing.report import compare_runs, difference_table, method_table, write_comparison
from trl_ext.evaluation.comparing.runs import read_method_run
from trl_ext.evaluation.report import write_report
from trl_ext.runs import RECIPES
from trl_ext.runs.studies.compare_plan import Plan, check_metric, read_plan
from trl_ext.runs.studies.processes import Run, check_runs, print_commands, run_all

# Flags that each job of an array has, too.
FLAGS = ("methods", "seeds", "config", "baseline", "metric", "max_steps", "accelerate_config")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the methods that the command line requests, and report."""
    with one_line_errors():
        given = _parse(arguments)
        plan = read_plan(given)
        if given.runs:
            report(plan, Path(given.runs), required=True)
        elif given.slurm:
            print(slurm_script(plan, given))
        elif given.dry_run:
            print_commands(planned_runs(plan))
        else:
            alone = given.array_index is not None
            if not alone:
                check_metric(plan)
            if alone and not 0 <= given.array_index < len(plan.seeds):
                raise ValueError(
                    f"--array_index {given.array_index}: there are {len(plan.seeds)} seeds, numbered from 0"
                )
            runs = planned_runs(plan, [plan.seeds[given.array_index]] if alone else plan.seeds)
            check_runs(runs)
            failed = run_all(runs)
            print(f"\n{len(runs) - len(failed)} of {len(runs)} runs are finished, in {plan.folder}")
            if not alone:
                report(plan, plan.folder)
            if failed:
                print(f"failed: {', '.join(failed)}; the same command tries them again")
                raise SystemExit(1)


def _parse(arguments: Sequence[str] | None):
    parser = CommandParser(description=__doc__)
    parser.add_argument("--methods", help="names, with commas; default: all of --config")
    parser.add_argument("--seeds", default="0-4", help="such as 0-4 or 0,2,7 (%(default)s)")
    parser.add_argument("--config", help="YAML file of methods and their arguments")
    parser.add_argument("--baseline", help="the method to compare with; default: the file's, or the first")
    parser.add_argument("--metric", help="score, win_rate, or a number in generations.jsonl; default: the first found")
    parser.add_argument("--max_steps", type=at_least_one, help="the same number of optimizer steps for every method")
    parser.add_argument("--output_dir", default="runs/compare", help="folder of the runs and the report (%(default)s)")
    parser.add_argument("--runs", help="compare finished runs {method}-{seed} of a folder; run nothing")
    parser.add_argument("--accelerate_config", help="for accelerate launch --config_file")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--slurm", action="store_true", help="print an sbatch script for an array with a job per seed")
    parser.add_argument("--array_index", type=int, help="run only the seed of this number, from 0, without a report")
    return parser.parse_args(arguments)


# ---- Running ----


def planned_runs(plan: Plan, seeds: Sequence[int] | None = None) -> list[Run]:
    """The runs of all methods on these seeds, reward models first; None for all seeds of the plan."""
    seeds = plan.seeds if seeds is None else seeds
    rewarded = seeds if any(method.needs_reward_model for method in plan.methods) else ()
    runs = [
        Run("reward_model", _reward_model(plan, s), {**plan.reward_model, "seed": s}, plan.launcher) for s in rewarded
    ]
    for method in plan.methods:
        for seed in seeds:
            rewards = {"reward_model": str(_reward_model(plan, seed))} if method.needs_reward_model else {}
            arguments = {**method.arguments, **rewards, "seed": seed}
            runs.append(Run(method.recipe, plan.folder / f"{method.name}-{seed}", arguments, plan.launcher))
    return runs


def _reward_model(plan: Plan, seed: int) -> Path:
    return plan.folder / f"reward_model-{seed}"


# ---- The report ----


def report(plan: Plan, folder: Path, *, required: bool = False) -> None:
    """Compare the finished runs, write the files, and print the tables; if `required`, none may be missing."""
    places = [(folder / f"{method.name}-{seed}", method.name, seed) for method in plan.methods for seed in plan.seeds]
    finished = [place for place in places if (place[0] / "results.json").is_file()]
    runs = [read_method_run(*place) for place in finished]
    missing = [place.name for place, _, _ in places if place not in {folder for folder, _, _ in finished}]
    names = ", ".join(missing)
    if missing and required:
        raise ValueError(f"no finished run {names} in {folder}: change --methods or --seeds, or leave out --runs")
    notes = [f"Not finished, and left out: {names}."] if missing else []
    summary = compare_runs(runs, plan.baseline, metric=plan.metric, notes=notes)
    written = write_comparison(summary, plan.folder)
    if folder == plan.folder:
        write_report([run.folder for run in runs], plan.folder / "report.html")
        written.append("report.html")
    print(f"\n{format_table(*method_table(summary))}\n")
    if summary["comparisons"]:
        print(f"{format_table(*difference_table(summary))}\n")
    for note in summary["notes"]:
        print(note)
    print(f"\nin {plan.folder}: {', '.join(written)}")


def slurm_script(plan: Plan, given) -> str:
    """An sbatch script with an array job for each seed; the same command without an index reports afterwards."""
    command = [sys.executable, str(RECIPES / "compare.py"), "--output_dir", given.output_dir]
    for flag in FLAGS:
        if getattr(given, flag) is not None:
            command += [f"--{flag}", str(getattr(given, flag))]
    return f"""\
#!/bin/bash
#SBATCH --job-name=compare
#SBATCH --array=0-{len(plan.seeds) - 1}
#SBATCH --output=compare-%A-%a.log
#SBATCH --gres=gpu:1
#SBATCH --time=24:00:00
set -euo pipefail
cd {shlex.quote(str(Path.cwd()))}
# After all jobs, this command without --array_index writes the report.
{shlex.join(command)} --array_index "$SLURM_ARRAY_TASK_ID\""""
