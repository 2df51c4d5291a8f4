"""`trl-ext doctor`: why nothing is learned, from a recipe's configuration or the folder of a run.

`trl-ext doctor --recipe dpo --config run.yaml` builds the recipe's trainer with its data, and examines it; further
flags are the recipe's own. `--steps 3` trains three steps in a temporary folder as well. `trl-ext doctor FOLDER` reads
what a run wrote. The exit code is 0 if no fault is found, 1 if one is, and 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from trl_ext.doctor import DoctorCallback, Report, examine
from trl_ext.doctor.examine import run_checks
from trl_ext.doctor.patient import Patient
from trl_ext.files import read_yaml
from trl_ext.names import nearest
from trl_ext.resilience.checkpoints import STATE_FILE, checkpoints_in
from trl_ext.runs import RECIPES, recipes_can_be_imported
from trl_ext.runs.arguments import argument_types
from trl_ext.runs.training_run import TrainingRun
from trl_ext.trainers.callbacks import read_metrics

# A metric that only one kind of trainer logs.
_METRICS = {"frac_reward_zero_std": "policy", "rewards/margins": "preference", "min_reward": "reward"}


class _Built(BaseException):
    """Ends a recipe once its trainer is built. Recipes catch errors, and this is none."""


def examine_recipe(recipe: str, arguments: Sequence[str], *, steps: int = 0) -> Report:
    """Build the trainer of a recipe with its data, examine it, and train it for some steps in a temporary folder."""
    if argument_types(recipe) is None:
        known = sorted(path.stem for path in RECIPES.glob("*.py") if argument_types(path.stem))
        raise ValueError(f"no recipe {recipe!r} that trains{nearest(recipe, known)} Known: {', '.join(known)}")
    reports: list[Report] = []

    def end(run, trainer, metrics=None):
        reports.append(watch(trainer, steps) if steps else examine(trainer))
        raise _Built

    # Every recipe calls it with its trainer, right before training.
    saved, given, TrainingRun.open = TrainingRun.open, sys.argv, end
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Built):
            sys.argv = [str(RECIPES / f"{recipe}.py"), *arguments, "--output_dir", folder, "--report_to", "none"]
            recipes_can_be_imported()
            runpy.run_path(sys.argv[0], run_name="__main__")
            raise ValueError(f"the recipe {recipe} did not build a trainer")
    finally:
        TrainingRun.open, sys.argv = saved, given
    return reports[0]


def watch(trainer, steps: int) -> Report:
    """The findings before and in the first steps of a trainer, which stops after them."""
    # The length of the run, on which the learning rate depends, stays as it is.
    trainer.args.eval_strategy, trainer.args.eval_on_start = IntervalStrategy.NO, False
    trainer.args.save_strategy, trainer.args.load_best_model_at_end = SaveStrategy.NO, False
    doctor = DoctorCallback(trainer, steps=steps, stop=True, show=lambda text: None)
    trainer.add_callback(doctor)
    trainer.train()
    return doctor.report


def examine_folder(folder: Path) -> Report:
    """Check the config.yaml and metrics.jsonl that a run wrote, or for TRL the logs of its last checkpoint."""
    rows = read_metrics(folder / "metrics.jsonl")
    states = [path / STATE_FILE for path in (folder, *checkpoints_in(folder)) if (path / STATE_FILE).is_file()]
    if not rows and not states:
        raise FileNotFoundError(f"{folder} has no step in metrics.jsonl, and no checkpoint with logs")
    rows = [row for row in rows or json.loads(states[-1].read_text("utf-8"))["log_history"] if "learning_rate" in row]
    kind = next((kind for name, kind in _METRICS.items() if any(name in row for row in rows)), "other")
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    return run_checks(Patient(args=SimpleNamespace(**config), kind=kind, logs=rows), ("settings", "steps"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    usage = "trl-ext doctor FOLDER [--json] | --recipe NAME [--config FILE] [--steps N] [--json] [the recipe's flags]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--recipe", help="build the trainer of this recipe, such as dpo")
    parser.add_argument("--config", help="with --recipe: YAML file of its arguments")
    parser.add_argument("--steps", type=int, default=0, help="with --recipe: steps to train and watch, such as 3")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    flags, others = parser.parse_known_args(arguments)
    if not flags.recipe and (len(others) != 1 or others[0].startswith("-") or flags.steps or flags.config):
        parser.error("name the folder of a run, which takes no flag but --json, or a --recipe")
    try:
        # What recipes print must not mix with the report.
        with contextlib.redirect_stdout(sys.stderr):
            if flags.recipe:
                others = ["--config", flags.config, *others] if flags.config else others
                report = examine_recipe(flags.recipe, others, steps=flags.steps)
            else:
                report = examine_folder(Path(others[0]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    told = json.dumps({"healthy": report.healthy, **dataclasses.asdict(report)}, indent=2)
    print(told if flags.json else report.text())
    return 0 if report.healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
