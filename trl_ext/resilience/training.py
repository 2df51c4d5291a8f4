"""`ResilientTraining`: exact resuming, complete checkpoints, and one clear message for a fault that ends the run.

The mixin wraps three private methods of `Trainer`: `_save_checkpoint` adds this process's progress and the marker of
a complete checkpoint, `_run_epoch` restores the order of the rows, and `_get_grad_norm` shows `UpdateGuard` the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list, set_seed
from accelerate.utils.memory import should_reduce_batch_size
from httpx import HTTPError
from safetensors import SafetensorError

from trl_ext.files import read_json
from trl_ext.models.batches import temporarily
from trl_ext.models.loading import check_vocabulary
from trl_ext.models.packing import may_draw
from trl_ext.processes import begin_warnings
from trl_ext.resilience import checkpoints
from trl_ext.resilience.faults import TrainingFault, not_written, out_of_memory
from trl_ext.resilience.guards import UpdateGuard


class ResilientTraining:
    """Mixin before a TRL trainer whose configuration has `max_skipped_updates`.

    Updates that are not finite are skipped on all processes and counted (`skipped_updates`).

    A checkpoint is complete once it holds a marker, which is written when every process has written its part.
    `save_total_limit` deletes older ones after that. `train(resume_from_checkpoint=True)` uses the last complete one.

    Attributes:
        update_guard: counts the skipped updates.
        carried_over: counts of the trainer that a resumed run continues from, as dotted names.
        saves_within_training: whether a run that is stopped writes a checkpoint.
        generators: those that order the rows, and `epoch_start`, their states at the beginning of the epoch.

    Raises:
        ValueError: `auto_find_batch_size` is set, which would let transformers change the optimizer batch; the
            training data makes no batch; or the model lacks embeddings of the tokenizer's special tokens.
    """

    carried_over: ClassVar[tuple[str, ...]] = ("_total_train_tokens", "update_guard.skipped", "update_guard.in_a_row")
    saves_within_training: ClassVar[bool] = True
    _resumed_from: Path | None = None
    # Of the checkpoint, until the run's first epoch has restored it.
    _progress: checkpoints.Progress | None = None
    # Whether this process was not there when the checkpoint was written.
    _reseeds = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size changes the optimizer batch: lower per_device_train_batch_size and raise "
                "gradient_accumulation_steps by the same factor"
            )
        self._require_a_batch()
        check_vocabulary(self.model, self.processing_class)
        if self.args.device.type == "cpu":
            # Several processes on a CPU have numbered devices such as cpu:1, to which torch loads no checkpoint.
            self.args._setup_devices = torch.device("cpu")
        self.update_guard = UpdateGuard(self, self.args.max_skipped_updates)
        self.add_callback(self.update_guard)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train as TRL does, optionally from a checkpoint: its folder, or True for the last complete one.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the given checkpoint is not complete, or is of another optimizer batch.
            FloatingPointError: `max_skipped_updates` updates in a row were not finite; there is a checkpoint.
            TrainingFault: a checkpoint could not be written, or memory is too small.
        """
        begin_warnings()
        self._progress = None
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        if checkpoint is not None:
            self.check_optimizer_batch(checkpoint)
            self._resumed_from = Path(checkpoint)
            self._progress = checkpoints.read_progress(self, self._resumed_from)
            random_state = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
            self._reseeds = not (self._resumed_from / random_state).is_file()
        try:
            with self._recomputation():
                result = super().train(checkpoint, *args, **kwargs)
        except Exception as error:
            if should_reduce_batch_size(error):
                raise out_of_memory(error, self.args, self.state.global_step + 1) from error
            raise
        if self.update_guard.failure is not None:
            raise FloatingPointError(self.update_guard.failure)
        return result

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """While training, checkpointed layers save no random states if nothing draws from them, which takes host time.

        Your own `preserve_rng_state` holds.
        """
        options = self.args.gradient_checkpointing_kwargs
        if self.args.gradient_checkpointing and not may_draw(self.model):
            options = {"use_reentrant": False, "preserve_rng_state": False, **(options or {})}
        with temporarily(self.args, gradient_checkpointing_kwargs=options):
            yield

    def _require_a_batch(self) -> None:
        # transformers would train on nothing, and save the model as it came.
        needed = self._train_batch_size * self.accelerator.num_processes if self.args.dataloader_drop_last else 1
        rows = len(self.train_dataset) if isinstance(self.train_dataset, Sized) else needed
        if rows * getattr(self.args, "num_generations", 1) < needed:
            raise ValueError(
                f"the training data has {rows or 'no'} rows, too few for a batch: give more rows or a smaller "
                "per_device_train_batch_size"
            )

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> str | None:
        if not wanted:
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
        now = self.get_total_train_batch_size(self.args)
        # A checkpoint of TRL's trainers has no marker.
        marker = Path(checkpoint) / checkpoints.MARKER
        begun = read_json(marker)["optimizer_batch"] if marker.is_file() else now
        if begun != now:
            raise ValueError(
                f"{checkpoint} is of a run with {begun} examples to an update, and now it is {now}: keep the batch "
                "size x accumulation x processes of that run, or choose another output_dir"
            )

    # ---- Epochs and updates ----

    def restore_progress(self) -> None:
        """Continue counts and metrics where the checkpoint ended, if the run resumes from one."""
        if self._progress is not None:
            checkpoints.restore_progress(self, self._progress, self._resumed_from)

    def _run_epoch(self, **kwargs: Any) -> None:
        begun, self._progress = self._progress, None
        if self.state.global_step >= self.state.max_steps:
            # The checkpoint is of the last step: another step would be one too many.
            self._load_rng_state(kwargs["resume_from_checkpoint"])
            self.control.should_training_stop = True
            return
        self.generators = checkpoints.generators_of(kwargs["train_dataloader"])
        if begun is not None:
            # transformers makes the batches of a begun epoch again, skips those of earlier steps, and only then loads
            # the checkpoint's random state.
            in_the_middle = kwargs["steps_trained_in_current_epoch"] > 0
            states = begun["epoch_start" if in_the_middle else "generators"]
            for name in self.generators.keys() & states.keys():
                self.generators[name].set_state(states[name])
        self.epoch_start = {name: generator.get_state() for name, generator in self.generators.items()}
        super()._run_epoch(**kwargs)

    def training_step(self, *args: Any, **kwargs: Any):
        if self._reseeds:
            # Processes that were not there before would all draw the first one's numbers.
            self._reseeds = False
            set_seed(self.args.seed + self.state.global_step, device_specific=True)
        loss = super().training_step(*args, **kwargs)
        self.update_guard.observe_loss(loss)
        # transformers adds it up for the log, where a NaN would stay.
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.update_guard.observe_gradient_norm(norm)
        return norm

    # ---- Writing a model and a checkpoint ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        try:
            super().save_model(output_dir, _internal_call)
        # It keeps no error number.
        except SafetensorError as error:
            raise not_written(output_dir or self.args.output_dir, error) from error

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            # Of a run that was killed in writing it, or resumed from an earlier one.
            checkpoints.delete(folder)
        self.accelerator.wait_for_everyone()
        try:
            # transformers would push the new one, and delete old ones, before it is complete.
            with temporarily(self.args, save_total_limit=None, push_to_hub=False):
                super()._save_checkpoint(model, trial)
            checkpoints.write_progress(self, folder)
        # Each writer has an error of its own for a full disk, and most of them keep no error number.
        except (OSError, RuntimeError) as error:
            if should_reduce_batch_size(error) or isinstance(error, (HTTPError, torch.distributed.DistError)):
                raise
            if self.args.should_save:
                # It is of no use and takes up space.
                checkpoints.delete(folder)
            if isinstance(error, TrainingFault):
                raise
            raise not_written(folder, error) from error
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if not self.args.save_only_model:
                checkpoints.mark_complete(folder, self.get_total_train_batch_size(self.args))
            checkpoints.delete_old(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
