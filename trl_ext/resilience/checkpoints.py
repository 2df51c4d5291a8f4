"""Checkpoint folders: written completely or not at all, checked before a resume, and deleted in a safe order.

A checkpoint is written inside `checkpoint.partial`, sealed by a list of its files with their sizes, and then renamed.
The check compares names and sizes; it does not read weights.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trl_ext.files import write_json

logger = logging.getLogger(__name__)

# Not `checkpoint-*`, which transformers would treat as a checkpoint.
PARTIAL_FOLDER = "checkpoint.partial"
FILES_FILE = "checkpoint_files.json"
STATE_FILE = "trainer_state.json"
# Only in checkpoints of expert iteration, where each round starts with a new optimizer.
ROUND_FILE = "expert_step.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "global_step*", "pytorch_model_fsdp*")
_NEEDED_TO_RESUME = ("scheduler.pt", "global_step*", ROUND_FILE)


def step_of(checkpoint: Path) -> int | None:
    """The step of a folder `checkpoint-{step}`; None for any other name."""
    prefix, _, number = checkpoint.name.rpartition("-")
    return int(number) if prefix == "checkpoint" and number.isdecimal() else None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """The folders named as checkpoints, sorted by step."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=step_of)


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The latest checkpoint that a run can resume from, or None; each unusable one gives a warning with the reason."""
    for checkpoint in reversed(checkpoints_in(output_dir)):
        fault = fault_of(checkpoint)
        if fault is None:
            return checkpoint
        logger.warning(f"the checkpoint {checkpoint} is passed over: {fault}")
    return None


def check_checkpoint(checkpoint: str | Path) -> None:
    """Reject a checkpoint that a run cannot resume from.

    Raises:
        FileNotFoundError: it has no trainer_state.json, or there is no such folder.
        ValueError: it is incomplete; the message names the file.
    """
    fault = fault_of(Path(checkpoint))
    if fault is not None:
        kind = ValueError if (Path(checkpoint) / STATE_FILE).is_file() else FileNotFoundError
        raise kind(f"the checkpoint {checkpoint} cannot be resumed from: {fault}; name an earlier one")


def fault_of(checkpoint: Path) -> str | None:
    """What is missing from a checkpoint, with the name of the file; None if it is complete.

    A checkpoint of TRL's own trainers has no list of its files. It must have at least a state and weights.
    """
    if not (checkpoint / STATE_FILE).is_file():
        return f"it has no {STATE_FILE}, so it was not finished"
    listed = checkpoint / FILES_FILE
    if listed.is_file():
        for name, size in json.loads(listed.read_text(encoding="utf-8")).items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, and was written with {size}"
    elif not any(any(checkpoint.glob(pattern)) for pattern in _WEIGHTS):
        return "it has no weights"
    if not any(any(checkpoint.glob(pattern)) for pattern in _NEEDED_TO_RESUME):
        return "it has no scheduler.pt and no optimizer, as save_only_model leaves it"
    return None


@contextmanager
def written_whole(partial: Path, final: Path, accelerator, *, saves: bool) -> Iterator[None]:
    """Rename `partial` to `final` once every process has written its part in the block. Every process calls this.

    `partial` is a folder inside `PARTIAL_FOLDER`; `saves` says whether this process saves the model.
    """
    if saves:
        shutil.rmtree(partial.parent, ignore_errors=True)
    accelerator.wait_for_everyone()
    yield
    accelerator.wait_for_everyone()
    if saves:
        seal(partial)
        move_into_place(partial, final)
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process and not saves:
        # Machines without a shared disk each keep their own part. On a shared disk the folder is already gone.
        with suppress(FileNotFoundError):
            move_into_place(partial, final)


def seal(folder: Path) -> None:
    """List the files of a finished checkpoint with their sizes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES_FILE)
    write_json(folder / FILES_FILE, {str(path.relative_to(folder)): path.stat().st_size for path in files})


def move_into_place(partial: Path, final: Path) -> None:
    """Rename a finished checkpoint, and delete an earlier one of the same name.

    Raises:
        FileNotFoundError: there is no such partial folder; a checkpoint of the final name is left unchanged.
    """
    # Network disks may still list a folder that is gone, but they do not rename it.
    whole = partial.with_name(f"{partial.name}.whole")
    os.rename(partial, whole)
    if final.exists():
        os.rename(final, partial.with_name(f"{partial.name}.replaced"))
    os.rename(whole, final)
    shutil.rmtree(partial.parent, ignore_errors=True)


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
    # Moved first, so that no checkpoint is ever half deleted under its own name.
    going = newest.parent / PARTIAL_FOLDER
    for checkpoint in spare[: max(len(there) - limit, 0)]:
        going.mkdir(exist_ok=True)
        os.rename(checkpoint, going / checkpoint.name)
    shutil.rmtree(going, ignore_errors=True)
