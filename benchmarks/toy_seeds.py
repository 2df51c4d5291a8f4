"""The recipes on the embedded benchmark over several seeds, as the README's table.

`python -m benchmarks.toy_seeds aot dpo ipo --seeds 0 1 2 3 4` runs each recipe once per seed into `runs/seeds/`, skips
runs that are already there, and prints a Markdown table; `--json` prints the figures instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def run(method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Results of one run; run it if they are not there."""
    output_dir = folder / f"{method}-{seed}"
    if not (output_dir / "results.json").is_file():
        print(f"running {method}, seed {seed}", file=sys.stderr)
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
        command += [str(REPOSITORY / "accelerate_configs" / "cpu.yaml"), str(REPOSITORY / "recipes" / f"{method}.py")]
        command += ["--seed", str(seed), "--output_dir", str(output_dir), "--overwrite_output_dir", "true"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{method}, seed {seed}, failed:\n{done.stderr[-2000:]}")
    return json.loads((output_dir / "results.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", help="names of recipes, such as aot dpo ipo")
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
    print(
        "| method | seed | win rate, ties as half | ties dropped | score (base) | accuracy, log-ratio | KL | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for method, by_seed in results.items():
        for seed, result in by_seed.items():
            half, agreed = (
                f"{interval['rate']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"
                for interval in (result["win_rate"]["half"], result["win_rate"]["agreed"])
            )
            score = result["score"]
            accuracy = result["preferences"]["after"]["reference_corrected"]["accuracy"]
            print(
                f"| {method} | {seed} | {half} | {agreed} | {score['policy']:.3f} ({score['base']:.3f}) "
                f"| {accuracy:.3f} | {result['kl']['mean']:.2f} | {result['run']['total_seconds']:.0f} |"
            )


if __name__ == "__main__":
    main()
