"""What every trainer here does about faults: updates that are not finite, a full disk, lost processes, memory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from trl_ext.trainers.checkpoints import PARTIAL_FOLDER
from trl_ext.trainers.faults import (
    FaultOfAllProcesses,
    TrainingFault,
    disk_message,
    free_space,
    is_disk_full,
    plain_faults,
    unwritten,
)
from trl_ext.trainers.model_card import WritesModelCard
from trl_ext.trainers.out_of_memory import check_memory_search, train_within_memory
from trl_ext.trainers.update_guard import UpdateGuard


class GuardedTraining(WritesModelCard):
    """Mixed in before a trainer of TRL's, whose configuration has `max_skipped_updates`.

    Updates that are not finite are skipped on all processes and counted (`skipped_updates`); `train` ends with a
    `TrainingFault` that says what to do where the disk is full, another process is gone, or memory is too small.

    Attributes:
        update_guard: counts the skipped updates.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        check_memory_search(self)
        self.update_guard = UpdateGuard(self, self.args.max_skipped_updates)
        self.add_callback(self.update_guard)

    def training_step(self, *args: Any, **kwargs: Any):
        loss = super().training_step(*args, **kwargs)
        self.update_guard.observe_loss(loss)
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.update_guard.observe_gradient_norm(norm)
        return norm

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_checkpoint(*args, **kwargs)
        except Exception as error:
            if not is_disk_full(error):
                raise
            partial = Path(self.args.output_dir) / PARTIAL_FOLDER
            what, free = unwritten(error, partial), free_space(partial)
            if self.args.should_save:
                # What is left of it only takes space.
                shutil.rmtree(partial, ignore_errors=True)
            raise TrainingFault(disk_message(error, self.args.output_dir, what, free)) from error

    def train(self, *args: Any, **kwargs: Any):
        """Train as TRL does.

        Raises:
            FloatingPointError: `max_skipped_updates` updates in a row were not finite; there is a checkpoint.
            TrainingFault: the disk is full, another process has ended, or memory is too small.
        """
        with plain_faults(self.args.output_dir):
            try:
                result = train_within_memory(self, partial(super().train, *args, **kwargs))
            except FaultOfAllProcesses:
                if self.state.global_step and self.saves_within_training:
                    self._save_checkpoint(self.model, trial=None)
                raise
        if self.update_guard.failure is not None:
            raise FloatingPointError(self.update_guard.failure)
        return result
