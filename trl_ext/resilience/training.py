"""`ResilientTraining`: exact resuming, complete checkpoints, and one clear message for a fault that ends the run.

transformers saves parameters, optimizer, schedule, random state and its own counters. It does not save the loss and
metrics gathered since the last log, the counts that TRL and this library keep, the state of the shuffling sampler, or
a reference model that follows the policy. `progress_{rank}.json` and `reference.safetensors` hold these.

The mixin wraps these private methods of `Trainer`. `_save_checkpoint` writes a checkpoint, `_get_output_dir` sends it
into a partial folder, and `_push_from_checkpoint` waits until it has its final name. `_run_epoch` restores
progress after transformers has reset its counters. `_finalize_training` does so if no epoch is left, and keeps
transformers from deleting checkpoints of a run that ends early. `_get_train_sampler` keeps the shuffling sampler.
`_load_rng_state` and `_load_optimizer_and_scheduler` correct how transformers resumes, and `_get_grad_norm` allows
skipping updates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sized
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list, set_seed
from httpx import HTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trl_ext.files import write_text
from trl_ext.models.batches import temporarily
from trl_ext.models.loading import check_vocabulary
from trl_ext.processes import begin_warnings, warn_once_per_run
from trl_ext.resilience import checkpoints
from trl_ext.resilience.faults import (
    TrainingFault,
    disk_message,
    is_lost_process,
    is_out_of_memory,
    memory_message,
    plain_faults,
)
from trl_ext.resilience.guards import UpdateGuard

REFERENCE_FILE = "reference.safetensors"


class ResilientTraining:
    """Mixin before a TRL trainer whose configuration has `max_skipped_updates`.

    Updates that are not finite are skipped on all processes and counted (`skipped_updates`).

    A checkpoint gets its name only when every process has written its part.
    `save_total_limit` deletes older ones after that, but never the best one nor the one that the run was resumed from.
    `train(resume_from_checkpoint=True)` uses the last complete one, with a warning for each incomplete one.

    Attributes:
        update_guard: counts the skipped updates.
        carried_over: counts of the trainer that a resumed run continues from, as dotted names.
        saves_within_training: whether a run that receives a signal writes a checkpoint.
        interrupted: whether a callback has stopped the run so that another can continue from its last checkpoint.

    Raises:
        ValueError: `auto_find_batch_size` is set, which would let transformers change the optimizer batch; the
            training data makes no batch; or the model lacks embeddings of the tokenizer's special tokens.
    """

    carried_over: ClassVar[tuple[str, ...]] = (
        "_total_train_tokens",
        "update_guard.skipped",
        "update_guard.in_a_row",
    )
    saves_within_training: ClassVar[bool] = True
    interrupted: bool = False
    _partial: Path | None = None
    _resumed_from: Path | None = None
    # The progress stored in the checkpoint, until the run restores it.
    _progress: dict[str, Any] | None = None
    _train_sampler = None
    _epoch_start: dict[str, str | None] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size cannot be used, as it changes the optimizer batch: lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor"
            )
        self._require_a_batch()
        check_vocabulary(self.model, self.processing_class)
        self.update_guard = UpdateGuard(self, self.args.max_skipped_updates)
        self.add_callback(self.update_guard)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train as TRL does, optionally from a checkpoint: its folder, or True for the last complete one.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the given checkpoint is not complete, or is of another optimizer batch.
            FloatingPointError: `max_skipped_updates` updates in a row were not finite; there is a checkpoint.
            TrainingFault: the disk is full, another process has ended, or memory is too small.
        """
        begin_warnings()
        self.interrupted, self._progress = False, None
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        if checkpoint is not None:
            self.check_optimizer_batch(checkpoint)
            self._resumed_from = Path(checkpoint)
            self._progress = self._read_progress(self._resumed_from)
        with plain_faults(self.args.output_dir):
            try:
                result = super().train(checkpoint, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise TrainingFault(memory_message(error, self.args, self.state.global_step + 1)) from error
        if self.update_guard.failure is not None:
            raise FloatingPointError(self.update_guard.failure)
        return result

    def _require_a_batch(self) -> None:
        # transformers would train on nothing, and save the model as it came.
        needed = self._train_batch_size * self.accelerator.num_processes if self.args.dataloader_drop_last else 1
        rows = len(self.train_dataset) if isinstance(self.train_dataset, Sized) else needed
        rows *= getattr(self.args, "num_generations", 1)
        if rows < needed:
            raise ValueError(
                f"the training data has {rows} rows, and dataloader_drop_last leaves out a batch of fewer than "
                f"{needed}: give more rows or a smaller per_device_train_batch_size"
                if rows
                else "the training data has no rows"
            )

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> str | None:
        if wanted is None or wanted is False:
            return None
        if wanted is not True:
            checkpoints.check_checkpoint(wanted)
            return str(wanted)
        # One process decides, since a new folder may appear to the processes at different times.
        found = [checkpoints.last_checkpoint(self.args.output_dir) if self.is_world_process_zero() else None]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(found)
        if found[0] is None:
            raise FileNotFoundError(f"{self.args.output_dir} has no checkpoint to resume from")
        return str(found[0])

    def check_optimizer_batch(self, checkpoint: str | Path) -> None:
        """Reject a checkpoint of a run with another number of examples to an update; their split may differ.

        Raises:
            ValueError: the message has both numbers.
        """
        records = [
            Path(checkpoint) / name for name in (self._progress_file, _progress_file(0), checkpoints.ROUND_FILE)
        ]
        record = next((json.loads(path.read_text(encoding="utf-8")) for path in records if path.is_file()), {})
        now = self.get_total_train_batch_size(self.args)
        begun = record.get("optimizer_batch", now)
        if begun != now:
            raise ValueError(
                f"{checkpoint} is of a run with {begun} examples to an update, and now it is {now}: processes times "
                f"per_device_train_batch_size times gradient_accumulation_steps must be {begun} to resume it"
            )

    # ---- Updates ----

    def training_step(self, *args: Any, **kwargs: Any):
        loss = super().training_step(*args, **kwargs)
        self.update_guard.observe_loss(loss)
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.update_guard.observe_gradient_norm(norm)
        return norm

    # ---- Writing a model and a checkpoint ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        try:
            super().save_model(output_dir, _internal_call)
        # It keeps no error number. `_save_checkpoint` reports the one of a checkpoint.
        except SafetensorError as error:
            if _internal_call:
                raise
            raise TrainingFault(disk_message("the model could not be written", error, output_dir)) from error

    def _get_output_dir(self, trial) -> str:
        return super()._get_output_dir(trial) if self._partial is None else str(self._partial)

    def _save_checkpoint(self, model, trial) -> None:
        output_dir = Path(self._get_output_dir(trial))
        try:
            self._write_checkpoint(output_dir, model, trial)
        # Each writer has an error of its own for a full disk, and most of them keep no error number.
        except (OSError, RuntimeError, SafetensorError) as error:
            if is_lost_process(error) or is_out_of_memory(error) or isinstance(error, HTTPError):
                raise
            what = f"the checkpoint of step {self.state.global_step} could not be written"
            message = disk_message(what, error, str(output_dir))
            if self.args.should_save:
                # An incomplete checkpoint is of no use and takes up space.
                shutil.rmtree(output_dir / checkpoints.PARTIAL_FOLDER, ignore_errors=True)
            raise TrainingFault(message) from error

    def _write_checkpoint(self, output_dir: Path, model, trial) -> None:
        name = f"checkpoint-{self.state.global_step}"
        partial, final = output_dir / checkpoints.PARTIAL_FOLDER / name, output_dir / name
        with checkpoints.written_whole(partial, final, self.accelerator, saves=self.args.should_save):
            with temporarily(self, _partial=partial.parent):
                super()._save_checkpoint(model, trial)
            write_text(partial / self._progress_file, json.dumps(self._progress_now()))
            self._save_reference(partial)
            if self.state.best_model_checkpoint == str(partial):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(partial / checkpoints.STATE_FILE))
        if self.args.should_save:
            # The user may repeat the same command until the run has ended.
            in_use = self._resumed_from if self.state.global_step < self.state.max_steps else None
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            checkpoints.delete_old(final, limit, best=best, in_use=in_use)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(final))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The upload runs in the background, so it must not begin in the partial folder.
        if self._partial is None:
            super()._push_from_checkpoint(checkpoint_folder)

    @property
    def _progress_file(self) -> str:
        return _progress_file(self.args.process_index)

    def _progress_now(self) -> dict[str, Any]:
        """This process's gathered metrics and counts, ready for JSON; floats keep all their digits."""
        return {
            "processes": self.args.world_size,
            "optimizer_batch": self.get_total_train_batch_size(self.args),
            "loss": self._tr_loss.item(),
            "loss_before": self._total_loss_scalar,
            "logged_at": self._globalstep_last_logged,
            "metrics": {mode: _plain_lists(metrics) for mode, metrics in self._metrics.items()},
            # TRL reads this to choose its metrics. A run without a remaining step would not have set it.
            "training": self.model.training,
            "carried_over": self._counts(),
            "epoch_start": self._epoch_start,
            "sampler": _state(getattr(self._train_sampler, "generator", None)),
        }

    # ---- Restoring a checkpoint ----

    def _read_progress(self, checkpoint: Path) -> dict[str, Any] | None:
        """This process's progress, or the first's if there were fewer processes: all of them have the same counts."""
        path = checkpoint / self._progress_file
        if not path.is_file():
            path = checkpoint / _progress_file(0)
        if not path.is_file():
            warn_once_per_run(f"{checkpoint} has no {path.name}: metrics since its last log, and counts, begin anew")
            return None
        progress = json.loads(path.read_text(encoding="utf-8"))
        before, now = progress["processes"], self.args.world_size
        if before != now:
            warn_once_per_run(
                f"{checkpoint} was written by {before} processes, and {now} go on from it: random numbers differ from "
                "those of an unbroken run, and so do the metrics of the window that it lies in"
            )
        return progress

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        name = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
        if checkpoint is not None and not (Path(checkpoint) / name).is_file():
            # Otherwise all new processes would draw the first one's numbers from the beginning of the epoch.
            set_seed(self.args.seed + self.state.global_step, device_specific=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        device = self.args.device
        # Several processes on a CPU have numbered devices such as cpu:1, to which torch cannot load.
        with temporarily(self.args, _setup_devices=torch.device("cpu") if device.type == "cpu" else device):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _take_up_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is None:
            return
        self._tr_loss = torch.tensor(progress["loss"], device=self.args.device)
        self._total_loss_scalar = progress["loss_before"]
        self._globalstep_last_logged = progress["logged_at"]
        for mode, metrics in progress["metrics"].items():
            self._metrics[mode].clear()
            self._metrics[mode].update(metrics)
        self.model.train(progress["training"])
        self._set_counts(progress["carried_over"])
        self._load_reference(self._resumed_from)

    def _counts(self) -> dict[str, Any]:
        return {name: attrgetter(name)(self) for name in self.carried_over}

    def _set_counts(self, counts: dict[str, Any]) -> None:
        for name in self.carried_over:
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(self) if owner else self, attribute, counts[name])

    def _get_train_sampler(self, *args: Any, **kwargs: Any):
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        progress = self._progress
        self._take_up_progress()
        if self.state.global_step >= self.state.max_steps:
            # The checkpoint is of the last step: another step would be one too many.
            self._load_rng_state(kwargs["resume_from_checkpoint"])
            self.control.should_training_stop = True
            return
        generator = getattr(self._train_sampler, "generator", None)
        if progress is not None:
            # Reset the shuffling generators to the beginning of the epoch, so that its batches are the same.
            start, in_the_middle = progress["epoch_start"], kwargs["steps_trained_in_current_epoch"] > 0
            if in_the_middle:
                # transformers loads the checkpoint's random state after it has skipped the earlier batches.
                _set_state(torch.default_generator, start["random"])
            _set_state(generator, start["sampler"] if in_the_middle else progress["sampler"])
        self._epoch_start = {"random": _state(torch.default_generator), "sampler": _state(generator)}
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any):
        # Without an epoch to run, nothing has been restored yet.
        self._take_up_progress()
        if self.state.global_step >= self.state.max_steps and not self.interrupted:
            return super()._finalize_training(*args, **kwargs)
        # With a limit of one, transformers would delete all checkpoints but the best, even the one to resume from.
        hidden = {"save_total_limit": None} | ({"load_best_model_at_end": False} if self.interrupted else {})
        with temporarily(self.args, **hidden):
            return super()._finalize_training(*args, **kwargs)

    # ---- A reference model that follows the policy ----

    def _moving_reference(self):
        return getattr(self, "ref_model", None) if getattr(self.args, "sync_ref_model", False) else None

    def _save_reference(self, folder: Path) -> None:
        reference = self._moving_reference()
        if reference is None:
            return
        if self.is_fsdp_enabled or getattr(self.accelerator.state.deepspeed_plugin, "zero_stage", 0) == 3:
            warn_once_per_run("sync_ref_model: a sharded reference model is not part of a checkpoint")
        elif self.args.should_save:
            tensors = self.accelerator.unwrap_model(reference).named_parameters()
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors}, folder / REFERENCE_FILE)

    def _load_reference(self, folder: Path) -> None:
        reference = self._moving_reference()
        if reference is not None and (folder / REFERENCE_FILE).is_file():
            saved = load_file(folder / REFERENCE_FILE)
            with torch.no_grad():
                for name, tensor in self.accelerator.unwrap_model(reference).named_parameters():
                    tensor.copy_(saved[name])


def _progress_file(process_index: int) -> str:
    return f"progress_{process_index}.json"


def _plain_lists(metrics: dict[str, list]) -> dict[str, list[int | float]]:
    """Metrics with numbers in place of tensors."""
    return {
        name: [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        for name, values in metrics.items()
    }


def _state(generator: torch.Generator | None) -> str | None:
    """The state of a generator as text."""
    return None if generator is None else bytes(generator.get_state().tolist()).hex()


def _set_state(generator: torch.Generator | None, state: str | None) -> None:
    if generator is not None and state is not None:
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
