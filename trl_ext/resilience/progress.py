"""What a resumed run needs besides what transformers saves, as `progress_{rank}.json` in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trl_ext.files import write_text
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.checkpoints import ROUND_FILE

REFERENCE_FILE = "reference.safetensors"

# The state of a generator, as bytes; None without a generator.
GeneratorState = list[int] | None


@dataclass
class Progress:
    """The progress of one process. The states at the beginning of the epoch reproduce its order of the rows."""

    processes: int
    optimizer_batch: int
    loss: float
    loss_before: float
    logged_at: int
    metrics: dict[str, dict[str, list[float]]]
    # TRL chooses its metrics by the mode of the model, which a run without a remaining step does not set.
    training: bool
    carried_over: dict[str, Any]
    random_at_epoch_start: GeneratorState
    sampler_at_epoch_start: GeneratorState
    sampler: GeneratorState

    @classmethod
    def of(cls, trainer) -> Progress:
        """The trainer's losses and metrics since the last log, its counts, and the generators of its rows."""
        random_at_start, sampler_at_start = trainer.epoch_start
        return cls(
            processes=trainer.args.world_size,
            optimizer_batch=trainer.get_total_train_batch_size(trainer.args),
            loss=trainer._tr_loss.item(),
            loss_before=trainer._total_loss_scalar,
            logged_at=trainer._globalstep_last_logged,
            metrics={
                mode: {name: [float(value) for value in values] for name, values in metrics.items()}
                for mode, metrics in trainer._metrics.items()
            },
            training=trainer.model.training,
            carried_over=counts_of(trainer),
            random_at_epoch_start=random_at_start,
            sampler_at_epoch_start=sampler_at_start,
            sampler=generator_state(trainer.shuffler),
        )

    def write(self, checkpoint: Path, process_index: int) -> None:
        """Write the file of one process; floats keep all their digits."""
        write_text(checkpoint / f"progress_{process_index}.json", json.dumps(asdict(self)))

    def restore(self, trainer) -> None:
        """Restore losses, metrics and counts, after transformers has set them to zero."""
        trainer._tr_loss = torch.tensor(self.loss, device=trainer.args.device)
        trainer._total_loss_scalar = self.loss_before
        trainer._globalstep_last_logged = self.logged_at
        for mode, metrics in self.metrics.items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(metrics)
        trainer.model.train(self.training)
        set_counts(trainer, self.carried_over)


def read_record(checkpoint: Path, process_index: int) -> dict[str, Any]:
    """What the process wrote into a checkpoint, or the first process if there were fewer; empty if none did."""
    names = (f"progress_{process_index}.json", "progress_0.json", ROUND_FILE)
    path = next((checkpoint / name for name in names if (checkpoint / name).is_file()), None)
    return {} if path is None else json.loads(path.read_text(encoding="utf-8"))


def read_progress(checkpoint: Path, process_index: int, processes: int) -> Progress | None:
    """The progress to resume a process from; None, with a warning, in a checkpoint of TRL's own trainers."""
    record = read_record(checkpoint, process_index)
    if not record:
        warn_once_per_run(f"{checkpoint} has no progress_0.json: metrics since its last log, and counts, begin anew")
        return None
    progress = Progress(**record)
    if progress.processes != processes:
        warn_once_per_run(
            f"{checkpoint} was written by {progress.processes} processes, and {processes} go on from it: random "
            "numbers differ from those of an unbroken run, and so do the metrics of the window that it lies in"
        )
    return progress


def counts_of(trainer) -> dict[str, Any]:
    """The counts that `carried_over` names."""
    return {name: attrgetter(name)(trainer) for name in trainer.carried_over}


def set_counts(trainer, counts: dict[str, Any]) -> None:
    """Set the counts that `carried_over` names."""
    for name in trainer.carried_over:
        owner, _, attribute = name.rpartition(".")
        setattr(attrgetter(owner)(trainer) if owner else trainer, attribute, counts[name])


# ---- Generators ----


def generator_of(dataloader) -> torch.Generator | None:
    """The generator that shuffles the rows; None if the sampler has none."""
    # accelerate wraps the sampler of batches where there are several processes.
    batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)
    return getattr(getattr(batches, "sampler", None), "generator", None)


def generator_state(generator: torch.Generator | None) -> GeneratorState:
    """The state of a generator."""
    return None if generator is None else generator.get_state().tolist()


def set_generator_state(generator: torch.Generator | None, state: GeneratorState) -> None:
    """Set the state of a generator, if there is one."""
    if generator is not None and state is not None:
        generator.set_state(torch.tensor(state, dtype=torch.uint8))


# ---- A reference model that follows the policy (`sync_ref_model`) ----


def _moving_reference(trainer):
    return getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None


def save_reference(trainer, checkpoint: Path) -> None:
    """Save a reference model that has moved."""
    reference = _moving_reference(trainer)
    if reference is None:
        return
    if trainer.is_fsdp_enabled or getattr(trainer.accelerator.state.deepspeed_plugin, "zero_stage", 0) == 3:
        warn_once_per_run("sync_ref_model: a sharded reference model is not part of a checkpoint")
    elif trainer.args.should_save:
        tensors = trainer.accelerator.unwrap_model(reference).named_parameters()
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors}, checkpoint / REFERENCE_FILE)


def load_reference(trainer, checkpoint: Path) -> None:
    """Load the reference model that a checkpoint holds, if any."""
    reference = _moving_reference(trainer)
    if reference is not None and (checkpoint / REFERENCE_FILE).is_file():
        saved = load_file(checkpoint / REFERENCE_FILE)
        with torch.no_grad():
            for name, tensor in trainer.accelerator.unwrap_model(reference).named_parameters():
                tensor.copy_(saved[name])
