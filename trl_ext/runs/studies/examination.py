"""`trl-ext doctor`: why nothing is learned, from a recipe's configuration or the folder of a run.

`trl-ext doctor --recipe dpo --config run.yaml` builds the recipe's trainer with its data, and examines it. Further
flags are the recipe's own. `--steps 3` trains three steps in a temporary folder as well. `trl-ext doctor FOLDER` reads
what a run wrote. The exit code is 0 if no fault is found, 1 if one is, and 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import IntervalStrategy
from transformers.trainer_utils import SaveStrategy

from trl_ext.doctor import DoctorCallback, Report, examine
from trl_ext.doctor.examine import show_rows, use_color
from trl_ext.doctor.page import write_page
from trl_ext.doctor.patient import Patient
from trl_ext.doctor.table import CHECKS, run_checks
from trl_ext.files import read_yaml
from trl_ext.registry import nearest
from trl_ext.resilience.checkpoints import last_checkpoint
from trl_ext.runs import RECIPES
from trl_ext.runs.arguments import argument_types
from trl_ext.runs.training_run import TrainingRun
from trl_ext.trainers.callbacks import read_metrics

# A metric that only one kind of trainer logs.
_METRICS = {"frac_reward_zero_std": "policy", "rewards/margins": "preference", "min_reward": "reward"}


class _Built(BaseException):
    """Ends a recipe once its trainer is built. Recipes catch errors, and this is none."""


def examine_recipe(recipe: str, arguments: Sequence[str], *, steps: int = 0) -> Report:
    """Build the trainer of a recipe with its data, examine it, and train it for some steps in a temporary folder.

    Args:
        recipe: name of a recipe that trains, such as `dpo`.
        arguments: its flags, as on the command line.
        steps: steps to watch; 0 for none.

    Raises:
        ValueError: there is no such recipe, or it did not build a trainer.
        SystemExit: the recipe refused its arguments.
    """
    if argument_types(recipe) is None:
        known = [path.stem for path in RECIPES.glob("*.py") if argument_types(path.stem)]
        raise ValueError(f"no recipe {recipe!r} that trains{nearest(recipe, known)} Known: {', '.join(sorted(known))}")
    found: list[Report] = []

    def end(run: TrainingRun, trainer: Any, metrics: Any = None):
        found.append(_watch(trainer, steps) if steps else examine(trainer))
        raise _Built

    saved, given = TrainingRun.open, sys.argv
    # Every recipe calls it with its trainer, right before training.
    TrainingRun.open = end
    try:
        with tempfile.TemporaryDirectory() as folder:
            sys.argv = [str(RECIPES / f"{recipe}.py"), *arguments, "--output_dir", folder, "--report_to", "none"]
            runpy.run_path(sys.argv[0], run_name="__main__")
    except _Built:
        pass
    finally:
        TrainingRun.open, sys.argv = saved, given
    if not found:
        raise ValueError(f"the recipe {recipe} did not build a trainer")
    return found[0]


def _watch(trainer: Any, steps: int) -> Report:
    # The length of the run, on which the learning rate depends, stays as it is.
    trainer.args.eval_strategy, trainer.args.eval_on_start = IntervalStrategy.NO, False
    trainer.args.save_strategy, trainer.args.load_best_model_at_end = SaveStrategy.NO, False
    doctor = DoctorCallback(trainer, steps=steps, stop=True, show=lambda text: None)
    trainer.add_callback(doctor)
    trainer.train()
    return doctor.report


def examine_folder(folder: str | Path) -> Report:
    """Check what a finished or stuck run wrote: config.yaml, metrics.jsonl and generations.jsonl.

    Of a run of TRL itself, it reads the logs in the last checkpoint.

    Raises:
        FileNotFoundError: the folder has neither metrics nor a checkpoint.
    """
    folder = Path(folder)
    rows = read_metrics(folder / "metrics.jsonl") or _checkpoint_logs(folder)
    if not rows:
        raise FileNotFoundError(
            f"{folder} has no step in metrics.jsonl, and no checkpoint with logs: name the folder of a run"
        )
    rows = [row for row in rows if "learning_rate" in row]
    kind = next((kind for name, kind in _METRICS.items() if any(name in row for row in rows)), "other")
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    patient = Patient(args=SimpleNamespace(**config), kind=kind, logs=rows)
    patient.responses = [row.get("response_text") or "" for row in read_metrics(folder / "generations.jsonl")]
    written = ("configuration", "steps", *(["responses"] if patient.responses else []))
    report = run_checks(patient, written)
    if not patient.responses:
        of_responses = (row.name for row in CHECKS.values() if row.needs == "responses")
        report.skipped.update(dict.fromkeys(of_responses, "there are no responses in generations.jsonl"))
    show_rows(patient, report)
    return report


def _checkpoint_logs(folder: Path) -> list[dict[str, Any]]:
    checkpoint = last_checkpoint(folder) if folder.is_dir() else None
    path = Path(checkpoint or folder) / "trainer_state.json"
    return json.loads(path.read_text(encoding="utf-8"))["log_history"] if path.is_file() else []


# ---- The command ----


def parser(*, of_recipe: bool) -> argparse.ArgumentParser:
    """The flags for one of the two forms; a recipe has flags of its own beside them."""
    parser = argparse.ArgumentParser(
        prog="trl-ext doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if not of_recipe:
        parser.add_argument("folder", help="folder of a finished or stuck run")
    parser.add_argument("--recipe", help="build the trainer of this recipe, such as dpo; other flags are passed on")
    parser.add_argument("--config", help="with --recipe: YAML file of its arguments")
    parser.add_argument("--steps", type=int, default=0, help="with --recipe: steps to train and watch, such as 3")
    parser.add_argument("--page", help="write the report as an HTML page to this file, too")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    of_recipe = any(word.partition("=")[0] == "--recipe" for word in arguments)
    flags, passed = parser(of_recipe=of_recipe).parse_known_args(arguments)
    if not of_recipe and (passed or flags.config or flags.steps):
        parser(of_recipe=False).error(
            "a folder takes no flag but --json and --page; a configuration needs its --recipe"
        )
    try:
        # What recipes print must not mix with the report.
        with contextlib.redirect_stdout(sys.stderr):
            if of_recipe:
                given = ["--config", flags.config] if flags.config else []
                report = examine_recipe(flags.recipe, [*given, *passed], steps=flags.steps)
            else:
                report = examine_folder(flags.folder)
        if flags.page:
            write_page(report, flags.page, flags.recipe or flags.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = report.text(color=use_color(), rows=True)
    print(json.dumps(report.to_dict(), indent=2) if flags.json else text)
    return 0 if report.healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
