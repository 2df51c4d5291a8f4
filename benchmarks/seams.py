"""Whether three methods help: studies on the embedded benchmarks, over several seeds.

`python -m benchmarks.seams --seeds 0 1 2` runs all studies into `runs/seams/{study}/{method}-{seed}`, skips finished
runs and resumes interrupted ones, and prints Markdown tables. `python -m benchmarks.seams rubric` runs one.

- resampling: DAPO with `--resample_groups`, which replaces groups of equal rewards, and DAPO without it, on additions
  and at about the same number of sampled responses, replaced ones included;
- rubric: a judge that answers by the embedded checker and is wrong with a known probability.

Intervals are over prompts and seeds; p-values have Holm's correction within a study.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from scipy.stats import spearmanr

from benchmarks._seam_rewards import judge, rubric_share, write_rubrics
from benchmarks.toy_seeds import CONFIGS, REPOSITORY, print_table
from trl_ext.evaluation.methods.report import compare_runs, difference_table, method_table, sentence
from trl_ext.evaluation.methods.runs import read_method_run
from trl_ext.files import write_json
from trl_ext.runs.studies.processes import Countdown, Run, check_runs, launcher_options, run_all, say_finished

REWARDS = REPOSITORY / "benchmarks" / "_seam_rewards.py"
# Rollouts of plain DAPO: as many as 30 resampled ones took with all their rounds, on average over seeds.
PLAIN_STEPS = 60


@dataclass(frozen=True)
class Study:
    """A comparison of methods.

    Attributes:
        runs: `f(folder, seed)`, the runs of a seed in order; a method's run lies in `{folder}/{method}-{seed}`.
        methods: the methods to compare, the baseline first.
        metric: what is compared, a number in generations.jsonl.
        details: `f(folder, seeds)`, further tables as (header, rows), and what they show as JSON.
    """

    runs: Callable[[Path, int], list[Run]]
    methods: tuple[str, ...]
    metric: str = "score"
    details: Callable[[Path, Sequence[int]], tuple[str, list[list[Any]], Any]] | None = None


def run_of(folder: Path, method: str, seed: int, recipe: str, config: str, **arguments) -> Run:
    """A run of a recipe with one of the embedded configurations."""
    place = folder / f"{method}-{seed}"
    settings = {"config": str(CONFIGS / f"{config}.yaml"), "seed": seed, "save_total_limit": 1, **arguments}
    launcher = launcher_options(str(REPOSITORY / "accelerate_configs" / "cpu.yaml"))
    return Run(recipe, place, settings, launcher)


# ---- The studies ----


def resampling(folder: Path, seed: int) -> list[Run]:
    """30 rollouts of resampled DAPO, and as many responses without resampling."""
    shared = {"recipe": "grpo_math", "config": "grpo_math", "algorithm": "dapo", "eval_every": 0}
    return [
        run_of(folder, "resampled", seed, **shared, resample_groups=4, max_steps=30),
        run_of(folder, "plain", seed, **shared, max_steps=PLAIN_STEPS),
    ]


def rubric(folder: Path, seed: int) -> list[Run]:
    """GRPO on the true score, and on rubrics whose judge is wrong in none, 0.1 and 0.3 of its verdicts."""
    data = write_rubrics(folder / "data")
    shared = {"recipe": "grpo", "config": "grpo", "dataset_name": str(data), "max_steps": 20}
    shared |= {"generation_eval_every": 0, "num_eval_prompts": 200}
    truth = f"{REWARDS}:truth"
    rubrics = {
        name: {"reward_function": [truth, f"{REWARDS}:{name}"], "reward_weights": [0.0, 1.0]}
        for name in ("rubric_0", "rubric_10", "rubric_30")
    }
    rewards = {"checker": {"reward_function": [truth], "reward_weights": [1.0]}, **rubrics}
    return [run_of(folder, method, seed, **shared, **reward) for method, reward in rewards.items()]


def agreement(folder: Path, seeds: Sequence[int]) -> tuple[str, list[list[Any]], Any]:
    """Rank correlation of the rubric's reward with the true score, on the checker's runs."""
    found: dict[str, dict[str, Any]] = {}
    for noise, source in itertools.product((0.0, 0.1, 0.3), ("base_", "")):
        values = []
        for seed in seeds:
            rows = read_method_run(folder / f"checker-{seed}", "checker", seed).rows.values()
            shares = [rubric_share(row["prompt_text"], row[f"{source}response_text"], noise) for row in rows]
            values.append(float(spearmanr(shares, [row[f"{source}reward/truth"] for row in rows]).statistic))
        found[f"{noise:g}, {'base' if source else 'policy'}"] = {"by_seed": values, "mean": numpy.mean(values)}
    rows = [[*name.split(", "), f"{one['mean']:.3f}"] for name, one in found.items()]
    return "share of wrong verdicts | responses of | rank correlation with the true score", rows, found


STUDIES = {
    "resampling": Study(resampling, ("plain", "resampled")),
    "rubric": Study(rubric, ("checker", "rubric_0", "rubric_10", "rubric_30"), "reward/truth", agreement),
}


def report(name: str, folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Print the tables of a study, and return them as JSON."""
    study = STUDIES[name]
    wanted = {(method, seed): folder / f"{method}-{seed}" for method in study.methods for seed in seeds}
    finished = {which: place for which, place in wanted.items() if (place / "results.json").is_file()}
    summary = compare_runs(
        [read_method_run(place, *which) for which, place in finished.items()], study.methods[0], metric=study.metric
    )
    print(f"\n## {name}\n")
    for which in wanted.keys() - finished.keys():
        print("not finished, and left out:", *which)
    for header, rows in (method_table(summary), difference_table(summary)):
        print_table(" | ".join(header), rows)
        print()
    for one in summary["comparisons"]:
        print(f"- {sentence(one, summary)}")
    if study.details is not None:
        header, rows, summary["details"] = study.details(folder, seeds)
        print()
        print_table(header, rows)
    return summary


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(STUDIES)}; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/seams"))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--report", action="store_true", help="run nothing: print the tables of finished runs")
    parser.add_argument("--max_steps", type=int, help="shorten every run, to try the command")
    given = parser.parse_args(arguments)
    names = given.studies or list(STUDIES)
    if unknown := set(names) - set(STUDIES):
        parser.error(f"no study {', '.join(sorted(unknown))}: choose of {', '.join(STUDIES)}")
    if not given.report:
        with judge() if "rubric" in names else nullcontext():
            runs = [
                run for name in names for seed in given.seeds for run in STUDIES[name].runs(given.folder / name, seed)
            ]
            if given.max_steps is not None:
                runs = [replace(run, arguments={**run.arguments, "max_steps": given.max_steps}) for run in runs]
            check_runs(runs)
            failed = run_all(runs, Countdown(runs))
        say_finished(len(runs), failed, given.folder)
        if failed:
            raise SystemExit(1)
    found = {name: report(name, given.folder / name, given.seeds) for name in names}
    if given.json is not None:
        write_json(given.json, found)


if __name__ == "__main__":
    main()
