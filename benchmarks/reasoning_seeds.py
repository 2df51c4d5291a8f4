"""Run the reasoning recipes on the embedded additions over several seeds: zero-shot, SFT, expert iteration, GRPO.

`python -m benchmarks.reasoning_seeds --seeds 0 1 2` runs each recipe once per seed into `runs/reasoning-seeds/`, skips
runs that are already there, and prints a Markdown table of accuracies on the test problems.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.toy_seeds import figure, print_table, run_recipe

ALGORITHMS = ("grpo", "dr_grpo", "reinforce_with_baseline", "no_baseline", "grpo_no_clip")
METHODS = ("zero_shot", "sft", "expert_iteration", *ALGORITHMS)
RECIPES = {"zero_shot": "evaluate_math", **dict.fromkeys(ALGORITHMS, "grpo_math")}


def run(method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Results of one run."""
    flags = ["--algorithm", method] if method in ALGORITHMS else []
    return run_recipe(RECIPES.get(method, method), folder / f"{method}-{seed}", seed, flags)


def row(method: str, seed: int, results: dict[str, Any]) -> list[Any]:
    """One line of the table."""
    found = results["reasoning"]
    if method == "zero_shot":
        before, sampled, gains = "", found, ["", ""]
    else:
        before, sampled = f"{found['before']['sampled']['accuracy']['mean']:.3f}", found["after"]["sampled"]
        greedy = (
            f"{found['before']['greedy']['accuracy']['mean']:.3f} to {figure(found['after']['greedy']['accuracy'])}"
        )
        gains = [figure(found["gain"]["sampled"]), greedy]
    costs = [f"{sampled['mean_tokens']:.1f}", f"{results['run']['total_seconds']:.0f}"]
    return [method, seed, before, figure(sampled["accuracy"]), *gains, f"{sampled['format_rate']['mean']:.3f}", *costs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS, help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/reasoning-seeds"))
    given = parser.parse_args()
    print_table(
        "method | seed | before | accuracy, sampled | gain | accuracy, greedy | in the form | tokens | seconds",
        [row(method, seed, run(method, seed, given.folder)) for method in given.methods for seed in given.seeds],
    )


if __name__ == "__main__":
    main()
