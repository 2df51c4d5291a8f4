"""Checkpoint folders: one is complete once it holds `checkpoint_complete.json`, which is written last."""

from __future__ import annotations

import shutil
from pathlib import Path

from trl_ext.files import read_json, write_json

MARKER = "checkpoint_complete.json"
STATE_FILE = "trainer_state.json"


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


def optimizer_batch_of(checkpoint: str | Path) -> int | None:
    """The number of examples to an update in the run that wrote a checkpoint; None if it has no marker."""
    return read_json(Path(checkpoint) / MARKER)["optimizer_batch"] if is_complete(Path(checkpoint)) else None


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


def delete_old(newest: Path, limit: int | None, *, best: str | None = None, in_use: Path | None = None) -> None:
    """Delete the oldest checkpoints beyond a limit, but not the newest, the best and the one in use.

    The one in use does not count towards the limit. Checkpoints later than the newest were left by a run that was
    resumed from an earlier checkpoint: they are deleted first.
    """
    if not limit or limit < 1:
        return
    in_use, kept = in_use and in_use.resolve(), {newest.resolve(), best and Path(best).resolve()}
    there = [path for path in checkpoints_in(newest.parent) if path.resolve() != in_use]
    there.sort(key=lambda path: (step_of(path) <= step_of(newest), step_of(path)))
    spare = [path for path in there if path.resolve() not in kept]
    for checkpoint in spare[: max(len(there) - limit, 0)]:
        delete(checkpoint)
