"""Checkpoint folders, and what a resumed run needs besides what transformers saves, as `progress_{rank}.pt`.

A checkpoint is complete once it holds `checkpoint_complete.json`, which is written last.
"""

from __future__ import annotations

import shutil
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trl_ext.files import write_json
from trl_ext.processes import warn_once_per_run

MARKER = "checkpoint_complete.json"
STATE_FILE = "trainer_state.json"
REFERENCE_FILE = "reference.safetensors"
# What transformers counts of the loss and does not save.
_COUNTS = ("_total_loss_scalar", "_globalstep_last_logged")
# Losses and metrics since the last log, counts, and the order of the rows.
Progress = dict[str, Any]


def step_of(checkpoint: Path) -> int | None:
    """The step of a folder `checkpoint-{step}`; None for any other name."""
    prefix, _, number = checkpoint.name.rpartition("-")
    return int(number) if prefix == "checkpoint" and number.isdecimal() else None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """The folders named as checkpoints, complete or not, sorted by step."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=step_of)


def is_complete(checkpoint: Path) -> bool:
    """Whether every process has written its part."""
    return (checkpoint / MARKER).is_file()


def mark_complete(checkpoint: Path, optimizer_batch: int) -> None:
    """Write the marker, after every process has written its part; it holds the number of examples to an update."""
    write_json(checkpoint / MARKER, {"optimizer_batch": optimizer_batch})


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The latest complete checkpoint, or None."""
    return next(filter(is_complete, reversed(checkpoints_in(output_dir))), None)


def check_checkpoint(checkpoint: str | Path) -> None:
    """Reject a checkpoint that a run cannot resume from. One of TRL's own trainers needs no marker.

    Raises:
        FileNotFoundError: there is no such folder, or it has no trainer_state.json.
        ValueError: it was not written to its end, or by `save_only_model`, without an optimizer.
    """
    folder = Path(checkpoint)
    if is_complete(folder):
        return
    if not (folder / STATE_FILE).is_file():
        raise FileNotFoundError(f"no checkpoint {checkpoint}: give a folder with a {STATE_FILE}")
    has_optimizer = (folder / "scheduler.pt").is_file() or any(folder.glob("global_step*"))
    if not has_optimizer or any(folder.glob("progress_*.pt")):
        raise ValueError(
            f"the checkpoint {checkpoint} was not written to its end, or has no optimizer, as with save_only_model: "
            "name an earlier one"
        )


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; first its marker, so that it is never half deleted and complete."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def delete_old(newest: Path, limit: int | None, best: str | None = None) -> None:
    """Delete the oldest checkpoints beyond a limit, but not the newest and the best.

    Checkpoints later than the newest were left by a run that was resumed from an earlier one: they are deleted first.
    """
    there = sorted(checkpoints_in(newest.parent), key=lambda path: (step_of(path) <= step_of(newest), step_of(path)))
    kept = {newest.resolve(), best and Path(best).resolve()}
    spare = [path for path in there if path.resolve() not in kept]
    for checkpoint in spare[: max(len(there) - limit, 0)] if limit and limit > 0 else ():
        delete(checkpoint)


# ---- Progress ----


def write_progress(trainer, checkpoint: Path) -> None:
    """Write the progress of this process, and the reference model if it follows the policy."""
    progress = {
        "processes": trainer.args.world_size,
        "loss": trainer._tr_loss.item(),
        "metrics": {
            mode: {name: [float(value) for value in values] for name, values in metrics.items()}
            for mode, metrics in trainer._metrics.items()
        },
        # TRL chooses its metrics by the mode of the model, which a run without a remaining step does not set.
        "training": trainer.model.training,
        "counts": counts_of(trainer, (*trainer.carried_over, *_COUNTS)),
        # The states of the generators that order the rows, at the beginning of the epoch and now.
        "epoch_start": trainer.epoch_start,
        "generators": {name: generator.get_state() for name, generator in trainer.generators.items()},
    }
    # With save_only_model, transformers makes the folder on the first process alone, or on one of each machine.
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(progress, checkpoint / f"progress_{trainer.args.process_index}.pt")
    reference = _moving_reference(trainer)
    if reference is not None and trainer.args.should_save:
        parameters = {name: tensor.detach().contiguous() for name, tensor in reference.named_parameters()}
        save_file(parameters, checkpoint / REFERENCE_FILE)


def read_progress(trainer, checkpoint: Path) -> Progress | None:
    """The progress of this process, or of the first if there were fewer; None in a checkpoint of TRL's trainers."""
    paths = [checkpoint / f"progress_{index}.pt" for index in (trainer.args.process_index, 0)]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        warn_once_per_run(f"{checkpoint} has no progress_0.pt: metrics since its last log, and counts, begin anew")
        return None
    progress = torch.load(path, weights_only=True)
    if progress["processes"] != trainer.args.world_size:
        warn_once_per_run(
            f"{checkpoint} was written by {progress['processes']} processes, and {trainer.args.world_size} resume "
            "from it: random numbers, and metrics until the next log, differ from those of an unbroken run"
        )
    return progress


def restore_progress(trainer, progress: Progress, checkpoint: Path) -> None:
    """Restore all but the order of the rows, after transformers has set its counts to zero."""
    trainer._tr_loss = torch.tensor(progress["loss"], device=trainer.args.device)
    for mode, metrics in progress["metrics"].items():
        trainer._metrics[mode].clear()
        trainer._metrics[mode].update(metrics)
    trainer.model.train(progress["training"])
    set_counts(trainer, progress["counts"])
    reference = _moving_reference(trainer)
    if reference is not None and (checkpoint / REFERENCE_FILE).is_file():
        saved = load_file(checkpoint / REFERENCE_FILE)
        with torch.no_grad():
            for name, tensor in reference.named_parameters():
                tensor.copy_(saved[name])


def counts_of(trainer, names: tuple[str, ...]) -> dict[str, Any]:
    """The trainer's attributes of these dotted names."""
    return {name: attrgetter(name)(trainer) for name in names}


def set_counts(trainer, counts: dict[str, Any]) -> None:
    """Set the trainer's attributes of these dotted names."""
    for name, count in counts.items():
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(trainer) if owner else trainer, attribute, count)


def generators_of(dataloader) -> dict[str, torch.Generator]:
    """The generators that order the rows: torch's own, and the sampler's if it has one."""
    # accelerate wraps the sampler of batches where there are several processes.
    batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)
    sampler = getattr(getattr(batches, "sampler", None), "generator", None)
    return {"torch": torch.default_generator} | ({} if sampler is None else {"sampler": sampler})


def _moving_reference(trainer):
    """The reference model if it follows the policy; None for one that is sharded, which no checkpoint holds."""
    if not getattr(trainer.args, "sync_ref_model", False) or trainer.ref_model is None:
        return None
    if trainer.is_fsdp_enabled or getattr(trainer.accelerator.state.deepspeed_plugin, "zero_stage", 0) == 3:
        warn_once_per_run("sync_ref_model: a sharded reference model is not part of a checkpoint")
        return None
    return trainer.accelerator.unwrap_model(trainer.ref_model)
