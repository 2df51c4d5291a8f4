"""A run of a recipe: what it was asked for, its folder, and the steps that all runs which train share."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import broadcast_object_list
from common import MENDABLE_IN_TRAINING, RECIPES, one_line_errors, parse_arguments
from httpx import HTTPError
from huggingface_hub import whoami
from plan import LaunchArguments, check_launch, end_with_plan, say_refusal
from same_run import check_same_settings
from tqdm.contrib.logging import logging_redirect_tqdm
from training import ModelArguments, load_trainer
from transformers import IntervalStrategy

from trl_ext.files import brief, write_text
from trl_ext.trainers.callbacks import MetricsFileCallback, StepLineCallback
from trl_ext.trainers.checkpoints import PARTIAL_FOLDER, check_checkpoint, last_checkpoint
from trl_ext.trainers.defaults import is_main_process, world_size
from trl_ext.trainers.preemption import Preemption
from trl_ext.trainers.secrets import arguments_without_secrets, without_secrets

# What a run writes into its folder, beside checkpoints.
RESULT_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "generations.jsonl",
    "scores.jsonl",
    "reward_mistakes.jsonl",
    "results.json",
    "report.png",
    "report_time.png",
)


@dataclasses.dataclass
class TrainingRun:
    """One call of a recipe that trains, from its arguments to its results.

    A recipe makes it with `begin_run`, calls `load_trainer`, `open` and `train` in this order, and describes it with
    `describe` in its results.

    Attributes:
        arguments: the recipe's own.
        model: of the model.
        training: the trainer's configuration.
        launch: how it was launched.
        checkpoint: what the run goes on from; None from the beginning.
        started: when, in seconds of the system's clock.
        resolved: the arguments as config.yaml holds them; `load_trainer` settles them.
        training_seconds: how long `train` took.
    """

    arguments: Any
    model: ModelArguments
    training: Any
    launch: LaunchArguments
    checkpoint: str | None
    started: float
    resolved: str = ""
    training_seconds: float = 0.0

    @property
    def folder(self) -> Path:
        return Path(self.training.output_dir)

    def load_trainer(self, trainer_class: Callable[..., Any], **datasets: Any):
        """The trainer on the datasets given as keywords; one with `eval_dataset=None` does not evaluate.

        Raises:
            ValueError: as `training.load_trainer`; where a resumed run was begun with other settings; or where the
                best checkpoint is to be chosen on rows that are not there.
        """
        # Before what the data and the model settle: config.yaml is what was asked for.
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
        end_with_plan(self.launch, self.model, self.training, datasets, RESULT_FILES)
        return load_trainer(trainer_class, self.model, self.training, **datasets)

    def open(self, trainer, metrics: MetricsFileCallback | None = None) -> MetricsFileCallback:
        """Clear the folder where that was asked for, and write config.yaml.

        Args:
            trainer: of this run.
            metrics: what writes its metrics.jsonl; None to add it.

        Returns:
            what writes metrics.jsonl.
        """
        if trainer.accelerator.is_main_process:
            if self.arguments.overwrite_output_dir:
                clear_run_folder(self.training.output_dir)
            elif self.checkpoint is None:
                _forget_other_base(self.folder, self.resolved)
            write_text(self.folder / "config.yaml", self.resolved)
        trainer.accelerator.wait_for_everyone()
        if metrics is None:
            metrics = MetricsFileCallback(self.folder / "metrics.jsonl")
            trainer.add_callback(metrics)
        StepLineCallback.show_in(trainer)
        return metrics

    def train(
        self, trainer, *, save: bool = True, mendable: tuple[type[Exception], ...] = MENDABLE_IN_TRAINING
    ) -> None:
        """Train, from the checkpoint if there is one, and save the model into the folder.

        Args:
            trainer: of this run.
            save: False where the recipe chooses among checkpoints first and saves itself.
            mendable: errors that end the run with one line.
        """
        begun = time.time()
        with one_line_errors(mendable), logging_redirect_tqdm():
            # Last, so that nothing of another callback is left out when it ends the program.
            trainer.add_callback(Preemption(trainer))
            trainer.train(resume_from_checkpoint=self.checkpoint)
        self.training_seconds = time.time() - begun
        if save:
            trainer.save_model(self.training.output_dir)

    def describe(self, **own: Any) -> dict[str, Any]:
        """What results.json says of the run: what its recipe knows, and what all runs have; time ends now."""
        return {
            **own,
            "settings_digest": settings_digest(self.resolved),
            "model": self.model.model_name_or_path,
            "dataset": self.arguments.dataset_name,
            "training_seconds": self.training_seconds,
            "total_seconds": time.time() - self.started,
        }


def begin_run(
    argument_class: type,
    config_class: type,
    *,
    config: str,
    description: str | None,
    name: Callable[[Any], str],
) -> TrainingRun:
    """Read the arguments, and check the run folder and the trackers before anything is loaded.

    Args:
        argument_class: the recipe's own arguments, with `dataset_name` and `overwrite_output_dir`.
        config_class: of the trainer.
        config: which file of configs/toy is used without arguments.
        description: for `--help`.
        name: the trainer's configuration -> what the run folder is called, before the data's name.

    Raises:
        ValueError, OSError: as `parse_arguments`, `open_run_folder`, `check_trackers` and `check_hub`.
    """
    started = time.time()
    arguments, model, training, launch = parse_arguments(
        (argument_class, ModelArguments, config_class, LaunchArguments),
        default_config=RECIPES / "configs" / "toy" / f"{config}.yaml",
        description=description,
    )
    # Trackers note down the command line.
    sys.argv[1:] = arguments_without_secrets(sys.argv[1:])
    if training.output_dir == "trainer_output":
        training.output_dir = f"runs/{name(training)}-{Path(arguments.dataset_name).absolute().stem}"
    check_launch(launch, training)

    def check() -> str | None:
        checkpoint = of_first_process(
            lambda: open_run_folder(
                training.output_dir,
                overwrite=arguments.overwrite_output_dir,
                resume_from_checkpoint=training.resume_from_checkpoint,
            )
        )
        check_trackers(training.report_to)
        check_hub(training)
        return checkpoint

    checkpoint = check() if launch.print_plan is None else say_refusal(check)
    return TrainingRun(arguments, model, training, launch, checkpoint, started)


# ---- The folder ----


def of_first_process(find: Callable[[], str | None]) -> str | None:
    """What the first process finds, or the error that it raises, in every process: others may see a disk late."""
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


def open_run_folder(output_dir: str, *, overwrite: bool, resume_from_checkpoint: str | None) -> str | None:
    """Check that a run may write into its folder; returns the checkpoint to resume from, if any.

    Raises:
        FileExistsError: the folder holds an earlier run, and neither flag says what to do with it.
        OSError: the folder cannot be made or written to.
        FileNotFoundError: there is no checkpoint to resume from.
        ValueError: both flags are given.
    """
    folder = Path(output_dir)
    if overwrite and resume_from_checkpoint:
        raise ValueError("give --overwrite_output_dir or --resume_from_checkpoint, not both")
    if resume_from_checkpoint and resume_from_checkpoint.lower() != "false":
        return _checkpoint_to_resume(folder, resume_from_checkpoint)
    _check_writable(folder)
    earlier = _earlier_run(folder)
    if earlier and not overwrite:
        holds = f"{output_dir} holds an earlier run ({', '.join(earlier[:3])})"
        if last_checkpoint(folder) is None:
            raise FileExistsError(
                f"{holds} and no checkpoint of it to resume: choose another --output_dir, or begin anew with "
                "--overwrite_output_dir"
            )
        raise FileExistsError(
            f"{holds}: choose another --output_dir, resume it with --resume_from_checkpoint, or give "
            "--overwrite_output_dir"
        )
    return None


def _checkpoint_to_resume(folder: Path, wanted: str) -> str | None:
    """The checkpoint of that path, or the folder's last where `last` or `true` is wanted.

    None, to begin anew, where a run ended before its first checkpoint: a scheduler starts it by the same command.
    """
    if wanted.lower() not in ("last", "true"):
        check_checkpoint(wanted)
        return wanted
    last = last_checkpoint(folder)
    if last is None:
        earlier = _earlier_run(folder)
        if (folder / "config.yaml").is_file() and set(earlier) <= {"metrics.jsonl"}:
            if is_main_process():
                print(f"{folder} has no checkpoint yet: its run begins anew")
            return None
        if earlier:
            raise FileNotFoundError(
                f"{folder} has no checkpoint to resume, only {', '.join(earlier[:3])}: to begin anew, give "
                "--overwrite_output_dir in place of --resume_from_checkpoint"
            )
        raise FileNotFoundError(f"{folder} has no checkpoint to resume: leave out --resume_from_checkpoint")
    if is_main_process():
        print(f"going on from {last}")
    return str(last)


def _earlier_run(folder: Path) -> list[str]:
    """The names of what a run left; arguments alone are of one that failed before its first step."""
    files = [folder / name for name in RESULT_FILES if name != "config.yaml"]
    names = [path.name for path in files if path.exists() and path.stat().st_size]
    return names + [path.name for path in sorted(folder.glob("checkpoint-*"))]


def check_trackers(report_to: Sequence[str]) -> None:
    """Fail before the model loads, rather than after, where a tracker cannot be used.

    Raises:
        ValueError: its package is missing, or wandb would ask for a login.
    """
    for tracker in report_to:
        if tracker in ("wandb", "trackio", "tensorboard") and importlib.util.find_spec(tracker) is None:
            raise ValueError(f"--report_to {tracker} needs its package: pip install {tracker}")
    if "wandb" in report_to and not os.environ.get("WANDB_API_KEY") and is_main_process():
        import wandb

        online = wandb.setup().settings.mode not in ("offline", "disabled", "dryrun")
        if online and not wandb.login(prompt=False):
            raise ValueError("--report_to wandb has no login: run `wandb login`, or set WANDB_MODE=offline")


def check_hub(training) -> None:
    """Fail before anything is loaded where `push_to_hub` could not push.

    Raises:
        ValueError: the hub cannot be reached, or knows no login.
    """
    if not training.push_to_hub or not is_main_process():
        return
    try:
        whoami(token=training.hub_token)
    except (OSError, HTTPError) as error:
        raise ValueError(
            f"--push_to_hub needs the hub, which cannot be reached or refuses the login ({brief(error, 200)}): run "
            "`hf auth login` on a machine with a network, or leave it out and push the folder later with `hf upload`"
        ) from error


def _check_writable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--output_dir {folder} is a file: name a folder")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"--output_dir {folder} cannot be written to: no permission in {parent}")


def clear_run_folder(output_dir: str) -> None:
    """Remove what an earlier run left, so that no file of it passes for the new one's."""
    folder = Path(output_dir)
    model_files = ("adapter_*", "model*.safetensors*", "*config.json", "training_args.bin", "reward_model.json")
    for path in [*(folder / name for name in RESULT_FILES), *(p for name in model_files for p in folder.glob(name))]:
        path.unlink(missing_ok=True)
    folders = ("samples", "best", "best.partial", PARTIAL_FOLDER)
    for path in [*folder.glob("checkpoint-*"), *(folder / name for name in folders)]:
        shutil.rmtree(path, ignore_errors=True)


def _forget_other_base(folder: Path, resolved: str) -> None:
    """Remove the base's responses that a run under other arguments left, which ended before its first step."""
    config = folder / "config.yaml"
    if config.is_file() and config.read_text(encoding="utf-8") != resolved:
        for path in folder.glob("samples/base_*.jsonl"):
            path.unlink()


# ---- The arguments as config.yaml holds them ----

# What is of one call and not of the run, and what other arguments and the device settle anew.
_NOT_OF_THE_RUN = (
    "resume_from_checkpoint",
    "overwrite_output_dir",
    "use_cpu",
    "steps_per_generation",
    # Of the course's terms; gradient_accumulation_steps says it.
    "train_batch_size",
)


def config_text(*instances: Any) -> str:
    """The resolved arguments as YAML that `--config` reads back, without secrets and without what is empty."""
    values: dict[str, Any] = {}
    for instance in instances:
        for field in dataclasses.fields(instance):
            value = getattr(instance, field.name)
            # An empty value says something where it is not the default.
            told = value is not None or field.default not in (None, dataclasses.MISSING)
            if field.init and told and field.name not in _NOT_OF_THE_RUN:
                values[field.name] = value
    if "report_to" in values:
        values["report_to"] = values["report_to"] or "none"
    plain = without_secrets(json.loads(json.dumps(values, default=_plain)))
    return yaml.safe_dump(plain, sort_keys=True, allow_unicode=True)


# What runs of one method over several seeds differ in.
_OF_THE_SEED = ("seed", "data_seed", "output_dir", "run_name", "reward_model")


def settings_digest(resolved: str) -> str:
    """A short digest of resolved arguments, the same for runs that differ in their seed alone."""
    values = {name: value for name, value in yaml.safe_load(resolved).items() if name not in _OF_THE_SEED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """What JSON cannot hold as it is: configurations within the configuration, and types by their names."""
    return value.to_dict() if hasattr(value, "to_dict") else str(value)
