"""A recipe's training run: its arguments, its folder, and the steps that all training runs share."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import IntervalStrategy

from trl_ext.doctor.examine import report_before_training
from trl_ext.files import write_text
from trl_ext.processes import is_main_process, world_size
from trl_ext.resilience.preemption import Preemption
from trl_ext.resilience.secrets import arguments_without_secrets
from trl_ext.runs.arguments import (
    MENDABLE_IN_TRAINING,
    LaunchArguments,
    ModelArguments,
    one_line_errors,
    parse_arguments,
)
from trl_ext.runs.configs import toy_config
from trl_ext.runs.engine import engine_in_force, print_batch
from trl_ext.runs.folder import check_same_settings, clear_run_folder, config_text, open_run_folder
from trl_ext.runs.loading import load_trainer
from trl_ext.trainers.callbacks import MetricsFileCallback, StepLineCallback


@dataclasses.dataclass
class TrainingRun:
    """One call of a recipe that trains, from its arguments to its results.

    A recipe creates it with `begin_run` and calls `load_trainer`, `open` and `train` in this order. `checkpoint` is
    the one that the run resumes from, or None; `resolved` are the arguments as config.yaml holds them.
    `training_seconds` include evaluations and the parts before a resumption.
    """

    arguments: Any
    model: ModelArguments
    training: Any
    launch: LaunchArguments
    checkpoint: str | None
    started: float
    resolved: str = ""
    training_seconds: float = 0.0
    metrics: MetricsFileCallback | None = None

    @property
    def folder(self) -> Path:
        return Path(self.training.output_dir)

    def load_trainer(self, trainer_class: Callable[..., Any], **datasets: Any):
        """Create the trainer on the datasets given as keywords; with `eval_dataset=None` it does not evaluate."""
        # Do this before the data and model change the arguments: config.yaml holds what the user requested.
        self.resolved = config_text(self.arguments, self.model, self.training)
        if self.checkpoint is not None:
            check_same_settings(self.folder / "config.yaml", self.resolved)
        if "eval_dataset" in datasets and datasets["eval_dataset"] is None:
            if self.training.load_best_model_at_end:
                raise ValueError(
                    "load_best_model_at_end chooses a checkpoint on held-out rows, and there are none: name a split "
                    "with --eval_split, or leave it out to keep the last"
                )
            self.training.eval_strategy = IntervalStrategy.NO
        trainer = load_trainer(trainer_class, self.model, self.training, **datasets)
        if self.checkpoint is not None:
            trainer.check_optimizer_batch(self.checkpoint)
        return trainer

    def open(self, trainer, metrics: MetricsFileCallback | None = None) -> None:
        """Clear the folder if requested, write config.yaml, and print what the doctor finds before a first step.

        The callback that writes metrics.jsonl is added to the trainer, unless it is given.
        """
        if trainer.accelerator.is_main_process:
            if self.arguments.overwrite_output_dir:
                clear_run_folder(self.training.output_dir)
            elif self.checkpoint is None:
                # Those of a run that ended before its first step, perhaps with other arguments.
                for path in self.folder.glob("samples/base_*.jsonl"):
                    path.unlink()
            write_text(self.folder / "config.yaml", self.resolved)
        trainer.accelerator.wait_for_everyone()
        if metrics is None:
            metrics = MetricsFileCallback(self.folder / "metrics.jsonl")
            trainer.add_callback(metrics)
        self.metrics = metrics
        StepLineCallback.show_in(trainer)
        print_batch(self.training)
        if self.launch.doctor == "on" and self.checkpoint is None:
            report_before_training(trainer)

    def train(self, trainer, *, mendable: tuple[type[Exception], ...] = MENDABLE_IN_TRAINING) -> None:
        """Train, from the checkpoint if there is one, and save the model; `mendable` errors end with one line."""
        with one_line_errors(mendable), logging_redirect_tqdm():
            # Add it last: it may end the program, and all other callbacks must have finished.
            trainer.add_callback(Preemption(trainer))
            trainer.train(resume_from_checkpoint=self.checkpoint)
        self.training_seconds = self.metrics.seconds
        trainer.save_model(self.training.output_dir)


def begin_run(
    argument_class: type, config_class: type, *, config: str, name: Callable[[Any], str] | None = None
) -> TrainingRun:
    """Read the recipe's arguments and the trainer's, and check the run folder before anything is loaded.

    Without arguments, those of configs/toy/{config}.yaml are used. `name` takes the trainer's configuration and gives
    the start of the run folder's name, before the dataset's; by default it is `config`. The script's docstring is the
    description in `--help`.
    """
    started = time.time()
    arguments, model, training, launch = parse_arguments(
        (argument_class, ModelArguments, config_class, LaunchArguments),
        default_config=toy_config(config),
        description=(sys.modules["__main__"].__doc__ or "").partition("\n\n")[0],
    )
    # Trackers record the command line.
    sys.argv[1:] = arguments_without_secrets(sys.argv[1:])
    if training.output_dir == "trainer_output":
        start = config.replace("_", "-") if name is None else name(training)
        training.output_dir = f"runs/{start}-{Path(arguments.dataset_name).absolute().stem}"
    engine_in_force(training)

    folder, overwrite = training.output_dir, arguments.overwrite_output_dir
    checkpoint = of_first_process(
        lambda: open_run_folder(folder, overwrite=overwrite, resume_from_checkpoint=training.resume_from_checkpoint)
    )
    check_trackers(training.report_to)
    return TrainingRun(arguments, model, training, launch, checkpoint, started)


def of_first_process(find: Callable[[], str | None]) -> str | None:
    """Return in every process what the first one finds, or raise its error: others may see changes on disk late."""
    if world_size() == 1:
        return find()
    found: list[Any] = [None, None]
    if is_main_process():
        try:
            found[0] = find()
        except (OSError, ValueError) as error:
            found[1] = error
    broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def check_trackers(report_to: Sequence[str]) -> None:
    """Fail before the model loads if a tracker's package is missing, or if wandb would ask for a login."""
    for tracker in report_to:
        if tracker in ("wandb", "trackio", "tensorboard") and importlib.util.find_spec(tracker) is None:
            raise ValueError(f"--report_to {tracker} needs its package: pip install {tracker}")
    if "wandb" in report_to and not os.environ.get("WANDB_API_KEY") and is_main_process():
        import wandb

        online = wandb.setup().settings.mode not in ("offline", "disabled", "dryrun")
        if online and not wandb.login(prompt=False):
            raise ValueError("--report_to wandb has no login: run `wandb login`, or set WANDB_MODE=offline")
