"""The reasoning recipes on the embedded additions over several seeds: zero-shot, SFT, expert iteration, GRPO variants.

`python -m benchmarks.reasoning_seeds --seeds 0 1 2` runs each recipe once per seed into `runs/reasoning-seeds/`, skips
runs that are already there, and prints a Markdown table of accuracies on the test problems; `--json` prints the
figures instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ALGORITHMS = ("grpo", "dr_grpo", "reinforce_with_baseline", "no_baseline", "grpo_no_clip")
METHODS = ("zero_shot", "sft", "expert_iteration", *ALGORITHMS)
RECIPES = {"zero_shot": "evaluate_math", **dict.fromkeys(ALGORITHMS, "grpo_math")}


def run(method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Results of one run; run it if they are not there.

    Raises:
        SystemExit: the recipe failed.
    """
    output_dir = folder / f"{method}-{seed}"
    if not (output_dir / "results.json").is_file():
        print(f"running {method}, seed {seed}", file=sys.stderr)
        recipe = REPOSITORY / "recipes" / f"{RECIPES.get(method, method)}.py"
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
        command += [str(REPOSITORY / "accelerate_configs" / "cpu.yaml"), str(recipe)]
        command += ["--seed", str(seed), "--output_dir", str(output_dir), "--overwrite_output_dir", "true"]
        if method in ALGORITHMS:
            command += ["--algorithm", method]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{method}, seed {seed}, failed:\n{done.stderr[-2000:]}")
    return json.loads((output_dir / "results.json").read_text())


def row(method: str, seed: int, results: dict[str, Any]) -> str:
    """One line of the table."""
    seconds = f"{results['run']['total_seconds']:.0f}"
    if method == "zero_shot":
        summary = results["reasoning"]
        cells = ["", f"{_figure(summary['accuracy'])}", "", "", f"{summary['format_rate']['mean']:.3f}"]
        return "| " + " | ".join([method, str(seed), *cells, f"{summary['mean_tokens']:.1f}", seconds]) + " |"
    before, after, gain = (results["reasoning"][name] for name in ("before", "after", "gain"))
    sampled = after["sampled"]
    cells = [
        f"{before['sampled']['accuracy']['mean']:.3f}",
        _figure(sampled["accuracy"]),
        _figure(gain["sampled"]),
        f"{before['greedy']['accuracy']['mean']:.3f} to {_figure(after['greedy']['accuracy'])}",
        f"{sampled['format_rate']['mean']:.3f}",
        f"{sampled['mean_tokens']:.1f}",
        seconds,
    ]
    return "| " + " | ".join([method, str(seed), *cells]) + " |"


def _figure(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS), help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/reasoning-seeds"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.methods if name not in METHODS]
    if unknown:
        parser.error(f"no method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    results = {
        method: {seed: run(method, seed, arguments.folder) for seed in arguments.seeds} for method in arguments.methods
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print("| method | seed | before | accuracy, sampled | gain | accuracy, greedy | in the form | tokens | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for method, by_seed in results.items():
        for seed, result in by_seed.items():
            print(row(method, seed, result))


if __name__ == "__main__":
    main()
