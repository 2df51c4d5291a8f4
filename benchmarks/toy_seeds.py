"""The recipes on the embedded benchmark over several seeds, as the README's tables.

`python -m benchmarks.toy_seeds aot dpo ipo --seeds 0 1 2 3 4` runs each recipe once per seed into `runs/seeds/`, skips
runs that are already there, and prints a Markdown table; `--json` prints the figures instead. `reward_model` is one
of them, and online ones such as `grpo` train with the reward model of their own seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ONLINE = ("grpo", "dr_grpo", "gspo", "rloo", "remax", "ppo", "online_preference", "online_preference_replay")
# Configurations of a recipe with another name.
RECIPE_OF = {"online_preference_replay": "online_preference"}


def run(method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Results of one run; run it if they are not there."""
    output_dir = folder / f"{method}-{seed}"
    if not (output_dir / "results.json").is_file():
        rewards = []
        if method in ONLINE:
            run("reward_model", seed, folder)
            rewards = ["--reward_model", str(folder / f"reward_model-{seed}")]
        print(f"running {method}, seed {seed}", file=sys.stderr)
        recipes = REPOSITORY / "recipes"
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
        command += [str(REPOSITORY / "accelerate_configs" / "cpu.yaml")]
        command += [str(recipes / f"{RECIPE_OF.get(method, method)}.py")]
        command += ["--config", str(recipes / "configs" / "toy" / f"{method}.yaml")]
        command += ["--seed", str(seed), "--output_dir", str(output_dir), "--overwrite_output_dir", "true", *rewards]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{method}, seed {seed}, failed:\n{done.stderr[-2000:]}")
    return json.loads((output_dir / "results.json").read_text())


def policy_table(results: dict[str, dict[int, dict[str, Any]]]) -> str:
    """One row per trained policy."""
    lines = [
        "| method | seed | win rate, ties as half | ties dropped | score | gain over the base | learned reward | KL "
        "| tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method, by_seed in results.items():
        for seed, result in by_seed.items():
            half, agreed = (
                f"{interval['rate']:.3f} {_interval(interval)}"
                for interval in (result["win_rate"]["half"], result["win_rate"]["agreed"])
            )
            score = result["score"]
            learned = ", ".join(f"{r['base']:.2f} to {r['policy']:.2f}" for r in (result["rewards"] or {}).values())
            lines.append(
                f"| {method} | {seed} | {half} | {agreed} | {score['policy']:.3f} "
                f"| {score['gain']['mean']:.3f} {_interval(score['gain'])} | {learned} | {result['kl']['mean']:.2f} "
                f"| {result['generations']['policy']['mean_tokens']:.1f} | {result['run']['total_seconds']:.0f} |"
            )
    return "\n".join(lines)


def reward_table(by_seed: dict[int, dict[str, Any]]) -> str:
    """One row per reward model."""
    lines = [
        "| seed | accuracy, labels | accuracy, true order | margin | ECE | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for seed, result in by_seed.items():
        pairs, order = result["pairs"], result["true_order"]
        lines.append(
            f"| {seed} | {pairs['accuracy']:.3f} {_interval(pairs)} | {order['accuracy']:.3f} {_interval(order)} "
            f"| {pairs['margin']:.2f} | {pairs['ece']:.3f} | {result['run']['total_seconds']:.0f} |"
        )
    return "\n".join(lines)


def _interval(figures: dict[str, float]) -> str:
    return f"[{figures['low']:.3f}, {figures['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", help="names of recipes, such as aot dpo ipo, or reward_model grpo")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {
        method: {seed: run(method, seed, arguments.folder) for seed in arguments.seeds} for method in arguments.methods
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    reward_models = results.pop("reward_model", None)
    if reward_models is not None:
        print(reward_table(reward_models))
    if results:
        print(policy_table(results))


if __name__ == "__main__":
    main()
