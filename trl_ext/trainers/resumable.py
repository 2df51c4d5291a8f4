"""`Resumable`: a run that is taken up from a checkpoint goes on exactly as it would have, and checkpoints are whole.

transformers saves parameters, optimizer, schedule, random state and its own counters. Lost without this: the loss and
metrics gathered since the last log, the counts that TRL and this library keep, the state of the sampler that shuffles,
and a reference model that follows the policy. They go into `progress_{rank}.json` and `reference.safetensors`.

It wraps ten methods of `Trainer`. `train` chooses and checks the checkpoint. `_save_checkpoint` writes, and
`_get_output_dir` sends what it writes into a partial folder, which `_push_from_checkpoint` must not upload.
`_run_epoch` sees the run begin, when transformers has set its counters to zero, or `_finalize_training` where there is
no epoch left, which also lets nothing be deleted when a run ends early; `_get_train_sampler` notes what shuffles.
`_load_optimizer_and_scheduler`, `_load_rng_state` and `_evaluate` mend what transformers does as it resumes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list, set_seed
from safetensors.torch import load_file, save_file

from trl_ext.files import write_text
from trl_ext.trainers import checkpoints
from trl_ext.trainers.defaults import warn_once_per_run
from trl_ext.trainers.policies import is_zero3
from trl_ext.trainers.shared_disk import sees_disk_of_first_process

REFERENCE_FILE = "reference.safetensors"


class Resumable:
    """For a subclass of a TRL trainer, before TRL's class in its bases.

    A checkpoint appears under its name only when every process has written its part and all of it is on the disk.
    `save_total_limit` deletes older ones after that, and never the best one nor the one that the run was resumed from.
    `train(resume_from_checkpoint=True)` takes the last one that is complete, with a warning for each that is not.

    Attributes:
        carried_over: counts of the trainer that a resumed run goes on from, as dotted names.
        saves_within_training: whether a run that is asked to end writes a checkpoint.
        interrupted: whether a callback has stopped the run for another one to go on from its last checkpoint.
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
    # What is left to take up of the checkpoint that the run is resumed from.
    _progress: dict[str, Any] | None = None
    _train_sampler = None
    _epoch_start: dict[str, str | None] | None = None

    # ---- The checkpoint to resume from ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train, from a checkpoint where one is given: its folder, or True for the last complete one.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the one that is given is damaged.
        """
        self.interrupted, self._progress = False, None
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        if checkpoint is not None:
            self._resumed_from = Path(checkpoint)
            self._progress = self._read_progress(self._resumed_from)
        return super().train(checkpoint, *args, **kwargs)

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> str | None:
        if wanted is None or wanted is False:
            return None
        if wanted is not True:
            checkpoints.check_checkpoint(wanted)
            return str(wanted)
        # One process decides, as disks may show a new folder at different times.
        found = [checkpoints.last_checkpoint(self.args.output_dir) if self.is_world_process_zero() else None]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(found)
        if found[0] is None:
            raise FileNotFoundError(f"{self.args.output_dir} has no checkpoint to resume from")
        return str(found[0])

    # ---- Writing ----

    def _get_output_dir(self, trial) -> str:
        return super()._get_output_dir(trial) if self._partial is None else str(self._partial)

    def _save_checkpoint(self, model, trial) -> None:
        output_dir = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        partial, final = output_dir / checkpoints.PARTIAL_FOLDER / name, output_dir / name
        with self._written_whole(partial, final):
            self._partial = partial.parent
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._partial = None
            write_text(partial / self._progress_file, json.dumps(self._progress_now()))
            self._save_reference(partial)
            if self.state.best_model_checkpoint == str(partial):
                self.state.best_model_checkpoint = str(final)
                if self.args.should_save:
                    self.state.save_to_json(str(partial / checkpoints.STATE_FILE))
        if self.args.should_save:
            # Named on the command line, it may be asked for again until the run has ended.
            in_use = self._resumed_from if self.state.global_step < self.state.max_steps else None
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            checkpoints.delete_old(final, limit, best=best, in_use=in_use)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(final))

    @contextmanager
    def _written_whole(self, partial: Path, final: Path) -> Iterator[None]:
        """What is written to a partial folder appears as the final one, once every process has done its part."""
        if self.args.should_save:
            shutil.rmtree(partial.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        has_own_disk = not sees_disk_of_first_process(self.accelerator, final.parent)
        yield
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.seal(partial)
            checkpoints.move_into_place(partial, final)
        self.accelerator.wait_for_everyone()
        has_own_part = has_own_disk and self.accelerator.is_local_main_process and partial.is_dir()
        # What is sealed is whole, and not this machine's part.
        if has_own_part and not (final / checkpoints.FILES_FILE).is_file():
            checkpoints.move_into_place(partial, final)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Uploaded in the background, when it has its name.
        if self._partial is None:
            super()._push_from_checkpoint(checkpoint_folder)

    @property
    def _progress_file(self) -> str:
        return _progress_file(self.args.process_index)

    def _progress_now(self) -> dict[str, Any]:
        """What this process has gathered and counted, ready for JSON; floats keep all their digits."""
        return {
            "processes": self.args.world_size,
            "loss": self._tr_loss.item(),
            "loss_before": self._total_loss_scalar,
            "logged_at": self._globalstep_last_logged,
            "metrics": {mode: _plain_lists(metrics) for mode, metrics in self._metrics.items()},
            # TRL asks this to know what to log of. A run without a step left would not have set it.
            "training": self.model.training,
            "carried_over": self._counts(),
            "epoch_start": self._epoch_start,
            "sampler": _state(getattr(self._train_sampler, "generator", None)),
        }

    # ---- Taking up ----

    def _read_progress(self, checkpoint: Path) -> dict[str, Any] | None:
        """What this process had gathered, or the first where there were fewer: counts must be alike in all of them."""
        path = checkpoint / self._progress_file
        if not path.is_file():
            path = checkpoint / _progress_file(0)
        if not path.is_file():
            warn_once_per_run(
                f"{checkpoint} has no {path.name}: metrics gathered since its last log, and counts, begin anew"
            )
            return None
        progress = json.loads(path.read_text(encoding="utf-8"))
        before, now = progress.get("processes", self.args.world_size), self.args.world_size
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
            # Otherwise all new processes would draw what the first had drawn when the epoch began.
            set_seed(self.args.seed + self.state.global_step, device_specific=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        device = self.args.device
        if device.type != "cpu" or device.index is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # Of several processes on a CPU, each has a number in its device, which torch loads nothing to.
        self.args.__dict__["_setup_devices"] = torch.device("cpu")
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.args.__dict__["_setup_devices"] = device

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
        self.model.train(progress.get("training", True))
        self._set_counts(progress["carried_over"])
        self._load_reference(self._resumed_from)

    def _counts(self) -> dict[str, Any]:
        return {name: attrgetter(name)(self) for name in self.carried_over}

    def _set_counts(self, counts: dict[str, Any]) -> None:
        # An older checkpoint may have others.
        for name, value in ((name, counts[name]) for name in self.carried_over if name in counts):
            owner, _, attribute = name.rpartition(".")
            setattr(attrgetter(owner)(self) if owner else self, attribute, value)

    def _get_train_sampler(self, *args: Any, **kwargs: Any):
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        progress = self._progress
        self._take_up_progress()
        if self.state.global_step >= self.state.max_steps:
            # A checkpoint of the last step: another step would be one too many.
            self._load_rng_state(kwargs["resume_from_checkpoint"])
            self.control.should_training_stop = True
            return
        generator = getattr(self._train_sampler, "generator", None)
        if progress is not None:
            self._shuffle_as_before(progress, generator, in_the_middle=kwargs["steps_trained_in_current_epoch"] > 0)
        self._epoch_start = {"random": _state(torch.default_generator), "sampler": _state(generator)}
        super()._run_epoch(*args, **kwargs)

    @staticmethod
    def _shuffle_as_before(
        progress: dict[str, Any], generator: torch.Generator | None, *, in_the_middle: bool
    ) -> None:
        """Put the generators that shuffle where they stood when the epoch began, that its batches come again."""
        start = progress["epoch_start"]
        if in_the_middle:
            # transformers loads the checkpoint's random state when it has skipped the batches of before.
            _set_state(torch.default_generator, start["random"])
        _set_state(generator, start["sampler"] if in_the_middle else progress["sampler"])

    def _finalize_training(self, *args: Any, **kwargs: Any):
        # Without an epoch to run, nothing has been taken up yet.
        self._take_up_progress()
        if self.state.global_step >= self.state.max_steps and not self.interrupted:
            return super()._finalize_training(*args, **kwargs)
        # With a limit of one, transformers deletes all but the best, and with them the one to go on from.
        hidden = {"save_total_limit": None} | ({"load_best_model_at_end": False} if self.interrupted else {})
        given = {name: getattr(self.args, name) for name in hidden}
        vars(self.args).update(hidden)
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            vars(self.args).update(given)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler: bool = False):
        if skip_scheduler and self.state.global_step:
            # `eval_on_start`: a run that is resumed has started long ago.
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler)

    # ---- A reference model that follows the policy ----

    def _moving_reference(self):
        return getattr(self, "ref_model", None) if getattr(self.args, "sync_ref_model", False) else None

    def _save_reference(self, folder: Path) -> None:
        reference = self._moving_reference()
        if reference is None:
            return
        if is_zero3(self.accelerator) or self.is_fsdp_enabled:
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
