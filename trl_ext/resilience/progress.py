"""What a resumed run needs besides what transformers saves, as `progress_{rank}.pt` in a checkpoint."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trl_ext.processes import warn_once_per_run

REFERENCE_FILE = "reference.safetensors"
# What transformers counts of the loss and does not save.
_COUNTS = ("_total_loss_scalar", "_globalstep_last_logged")
# Losses and metrics since the last log, counts, and the order of the rows.
Progress = dict[str, Any]


def write_progress(trainer, checkpoint: Path) -> None:
    """Write the progress of this process."""
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
        "generators": states_of(trainer.generators),
    }
    # With save_only_model, transformers makes the folder on the first process alone, or on one of each machine.
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(progress, checkpoint / f"progress_{trainer.args.process_index}.pt")


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


def restore_progress(trainer, progress: Progress) -> None:
    """Restore all but the order of the rows, after transformers has set its counts to zero."""
    trainer._tr_loss = torch.tensor(progress["loss"], device=trainer.args.device)
    for mode, metrics in progress["metrics"].items():
        trainer._metrics[mode].clear()
        trainer._metrics[mode].update(metrics)
    trainer.model.train(progress["training"])
    set_counts(trainer, progress["counts"])


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


def states_of(generators: dict[str, torch.Generator]) -> dict[str, Tensor]:
    """The states of generators."""
    return {name: generator.get_state() for name, generator in generators.items()}


# ---- A reference model that follows the policy ----


def _moving_reference(trainer):
    moves = getattr(trainer.args, "sync_ref_model", False) and trainer.ref_model is not None
    return trainer.accelerator.unwrap_model(trainer.ref_model) if moves else None


def save_reference(trainer, checkpoint: Path) -> None:
    """Save the reference model if it follows the policy."""
    reference = _moving_reference(trainer)
    if reference is None:
        return
    if trainer.is_fsdp_enabled or getattr(trainer.accelerator.state.deepspeed_plugin, "zero_stage", 0) == 3:
        warn_once_per_run("sync_ref_model: a sharded reference model is not part of a checkpoint")
    elif trainer.args.should_save:
        parameters = {name: tensor.detach().contiguous() for name, tensor in reference.named_parameters()}
        save_file(parameters, checkpoint / REFERENCE_FILE)


def load_reference(trainer, checkpoint: Path) -> None:
    """Load the reference model of a checkpoint, if it holds one."""
    reference = _moving_reference(trainer)
    if reference is not None and (checkpoint / REFERENCE_FILE).is_file():
        saved = load_file(checkpoint / REFERENCE_FILE)
        with torch.no_grad():
            for name, tensor in reference.named_parameters():
                tensor.copy_(saved[name])
