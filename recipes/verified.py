"""What recipes share that train on verified rewards: the sets of problems, and plots over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasoning import ProblemArguments, Problems, load_problems

from trl_ext.evaluation.plots import curve_panels, run_titles, save_panels
from trl_ext.trainers.callbacks import read_metrics

# Title -> label of each curve -> metric, drawn over steps and over time.
TIME_PANELS = {
    "Accuracy on validation problems, 95% interval": {
        "sampled": "eval_score",
        "in the form": "eval_rewards/format",
    },
    "Reward of the rollouts": {"mean": "reward"},
    "Response length (tokens), validation": {
        "correct": "eval_completions/mean_length_correct",
        "incorrect": "eval_completions/mean_length_incorrect",
    },
    "Entropy (nats per token)": {"rollouts": "entropy", "validation": "eval_entropy"},
}


@dataclass
class TrainingProblems(ProblemArguments):
    """Problems to train and validate on, beside those of the final comparison."""

    train_split: str = field(default="train", metadata={"help": "Problems to train on."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Problems to validate on. Default: validation on toy, else eval_split."}
    )
    num_validation_prompts: int = field(default=128, metadata={"help": "The first so many are the fixed set."})
    num_train_problems: int | None = field(
        default=None, metadata={"help": "Train on the first so many. Default: all."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_validation_prompts", "num_train_problems"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def load_problem_sets(arguments: TrainingProblems) -> tuple[Problems, Problems, Problems]:
    """Problems to train on, to validate on and of the final comparison, all with one template and reward.

    Raises:
        FileNotFoundError, ValueError: as `reasoning.load_problems`.
    """
    validation = arguments.validation_split
    if validation is None:
        validation = "validation" if arguments.dataset_name == "toy" else arguments.eval_split
    wanted = (
        (arguments.train_split, arguments.num_train_problems),
        (validation, arguments.num_validation_prompts),
        (arguments.eval_split, arguments.num_eval_prompts),
    )
    return tuple(load_problems(arguments, split, count) for split, count in wanted)


def plot_over_time(folder: str | Path, results: Mapping[str, Any]) -> None:
    """Draw the run's metrics into `report_time.png`: over optimizer steps above, over the time of training below."""
    metrics = read_metrics(Path(folder) / "metrics.jsonl")
    timed = [row for row in metrics if "seconds" in row]
    last = max((row["seconds"] for row in timed), default=0)
    unit, scale = ("minutes", 60) if last >= 180 else ("seconds", 1)
    # Under the name that the curves are drawn over.
    over_time = [{**row, "step": row["seconds"] / scale} for row in timed]
    drawn = curve_panels(TIME_PANELS, metrics)
    drawn += curve_panels(TIME_PANELS, over_time, f"{unit} of training, evaluations included")
    try:
        save_panels(drawn, Path(folder) / "report_time.png", *run_titles(results["run"]))
    except ImportError as error:
        print(f"report_time.png was not drawn: {error}")
