"""Run the recipes on the embedded benchmark over several seeds, and print the README's tables.

`python -m benchmarks.toy_seeds aot dpo ipo --seeds 0 1 2 3 4` runs each recipe once per seed into `runs/seeds/`, skips
runs that are already there, and prints a Markdown table. `reward_model` is one of the recipes. Online recipes such as
`grpo` train with the reward model of the same seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_ext.resilience.checkpoints import last_checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "recipes" / "configs" / "toy"
ONLINE = ("grpo", "dr_grpo", "gspo", "rloo", "remax", "ppo", "online_preference", "online_preference_replay")
# Configurations whose recipe has a different name.
RECIPE_OF = {"online_preference_replay": "online_preference"}
Results = dict[str, dict[int, dict[str, Any]]]


def run_recipe(
    recipe: str, output_dir: Path, seed: int, flags: Sequence[str] = (), *, show: bool = False
) -> dict[str, Any]:
    """Results of one run of a recipe, which runs if they are missing, from its last checkpoint if there is one.

    `show` passes on what the recipe prints, for runs that take longer than a minute.
    """
    if not (output_dir / "results.json").is_file():
        print(f"running {output_dir.name}", file=sys.stderr)
        begin = (
            ["--resume_from_checkpoint", "last"] if last_checkpoint(output_dir) else ["--overwrite_output_dir", "true"]
        )
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
        command += [str(REPOSITORY / "accelerate_configs" / "cpu.yaml"), str(REPOSITORY / "recipes" / f"{recipe}.py")]
        command += ["--seed", str(seed), "--output_dir", str(output_dir), *begin, *flags]
        output = {"stdout": sys.stderr} if show else {"capture_output": True}
        try:
            done = subprocess.run(command, text=True, **output)
        except KeyboardInterrupt:
            raise SystemExit("interrupted: this command goes on from the last checkpoint") from None
        if done.returncode:
            raise SystemExit(f"{output_dir.name} failed\n{(done.stderr or '')[-2000:]}")
    return json.loads((output_dir / "results.json").read_text())


def run(method: str, seed: int, folder: Path, bf16: bool = False) -> dict[str, Any]:
    """Results of one method; its reward model runs first."""
    flags = ["--config", str(CONFIGS / f"{method}.yaml"), *(["--bf16", "true"] if bf16 else [])]
    if method in ONLINE:
        run("reward_model", seed, folder, bf16)
        flags += ["--reward_model", str(folder / f"reward_model-{seed}")]
    return run_recipe(RECIPE_OF.get(method, method), folder / f"{method}-{seed}", seed, flags)


def policy_row(method: str, seed: int, result: dict[str, Any]) -> list[Any]:
    """One row per trained policy."""
    score, rates = result["score"], result["win_rate"]
    learned = ", ".join(f"{r['base']:.2f} to {r['policy']:.2f}" for r in (result["rewards"] or {}).values())
    return [
        method,
        seed,
        figure(rates["half"], "rate"),
        figure(rates["agreed"], "rate"),
        f"{score['policy']:.3f}",
        figure(score["gain"]),
        learned,
        f"{result['kl']['mean']:.2f}",
        f"{result['generations']['policy']['mean_tokens']:.1f}",
        f"{result['run']['total_seconds']:.0f}",
    ]


def reward_row(seed: int, result: dict[str, Any]) -> list[Any]:
    """One row per reward model."""
    pairs = result["pairs"]
    accuracies = [figure(pairs, "accuracy"), figure(result["true_order"], "accuracy")]
    seconds = f"{result['run']['total_seconds']:.0f}"
    return [seed, *accuracies, f"{pairs['margin']:.2f}", f"{pairs['ece']:.3f}", seconds]


def figure(values: dict[str, float], name: str = "mean") -> str:
    """A figure and its interval."""
    return f"{values[name]:.3f} [{values['low']:.3f}, {values['high']:.3f}]"


def print_tables(results: Results) -> None:
    """A table of the reward models, and one of the policies."""
    reward_models = results.pop("reward_model", {})
    if reward_models:
        rows = [reward_row(seed, result) for seed, result in reward_models.items()]
        print_table("seed | accuracy, labels | accuracy, true order | margin | ECE | seconds", rows)
    rows = [policy_row(method, seed, one) for method, by_seed in results.items() for seed, one in by_seed.items()]
    if rows:
        print_table(
            "method | seed | win rate, ties as half | ties dropped | score | gain over the base | learned reward | KL "
            "| tokens | seconds",
            rows,
        )


def print_table(header: str, rows: Sequence[Sequence[Any]]) -> None:
    """Print a Markdown table; the header is given in Markdown."""
    columns = header.split(" | ")
    for line in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(map(str, line))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", help="names of recipes, such as aot dpo ipo, or reward_model grpo")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--bf16", action="store_true", help="train and sample in bfloat16; takes another --folder")
    given = parser.parse_args()
    print_tables(
        {name: {seed: run(name, seed, given.folder, given.bf16) for seed in given.seeds} for name in given.methods}
    )


if __name__ == "__main__":
    main()
