"""Checkpoint folders on disk: whole or absent, told apart from damaged ones, and deleted in a safe order.

A checkpoint is written inside `checkpoint.partial`, sealed by a list of its files with their sizes, flushed to the
disk, and only then moved to its own name. Checking one reads headers and sizes, not weights.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

from trl_ext.files import write_json
from trl_ext.trainers.defaults import warn_once_per_run

# Not `checkpoint-*`, which transformers takes for a checkpoint.
PARTIAL_FOLDER = "checkpoint.partial"
_REPLACED = ".replaced"
FILES_FILE = "checkpoint_files.json"
STATE_FILE = "trainer_state.json"
# Only in the checkpoints of expert iteration, whose rounds each begin with a new optimizer.
ROUND_FILE = "expert_step.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "global_step*", "pytorch_model_fsdp*")
_TO_GO_ON = ("scheduler.pt", "global_step*", ROUND_FILE)


def step_of(checkpoint: Path) -> int | None:
    """The step of a folder `checkpoint-{step}`; None for any other name."""
    prefix, _, number = checkpoint.name.rpartition("-")
    return int(number) if prefix == "checkpoint" and number.isdecimal() else None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """The folders that are named as checkpoints, by their steps."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=step_of)


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The latest checkpoint that can be resumed from, None without one; a warning names each that cannot, and why.

    Where there are rounds of expert iteration, that is one of a round.
    """
    _finish_replacing(Path(output_dir))
    there = checkpoints_in(output_dir)
    of_rounds = any((checkpoint / ROUND_FILE).is_file() for checkpoint in there)
    for checkpoint in reversed(there):
        fault = fault_of(checkpoint)
        if fault is None and of_rounds and not (checkpoint / ROUND_FILE).is_file():
            fault = f"it has no {ROUND_FILE}, so it is not that of a round"
        if fault is None:
            return checkpoint
        warn_once_per_run(f"the checkpoint {checkpoint} is passed over: {fault}")
    return None


def check_checkpoint(checkpoint: str | Path) -> None:
    """Refuse a checkpoint that cannot be resumed from.

    Raises:
        FileNotFoundError: it has no trainer_state.json, or there is no such folder.
        ValueError: it is incomplete or damaged; the message names the file.
    """
    checkpoint = Path(checkpoint)
    if not (checkpoint / STATE_FILE).is_file():
        raise FileNotFoundError(f"{str(checkpoint)!r} is no checkpoint: it has no {STATE_FILE}")
    fault = fault_of(checkpoint)
    if fault is not None:
        raise ValueError(f"the checkpoint {checkpoint} cannot be resumed from: {fault}; name an earlier one")


def fault_of(checkpoint: Path) -> str | None:
    """What is missing or damaged in a checkpoint, with the name of the file; None for a sound one.

    One without a list of its files, as TRL's own trainers write it, must have a state and weights at least.
    """
    if not (checkpoint / STATE_FILE).is_file():
        return f"it has no {STATE_FILE}, so it was not finished"
    try:
        for path in sorted(checkpoint.rglob("*.json")):
            _read_json(path)
        listed = checkpoint / FILES_FILE
        if listed.is_file():
            _check_sizes(checkpoint, _read_json(listed))
        elif not any(any(checkpoint.glob(pattern)) for pattern in _WEIGHTS):
            return "it has no weights"
        if not any(any(checkpoint.glob(pattern)) for pattern in _TO_GO_ON):
            return "it has no scheduler.pt and no optimizer, as save_only_model leaves it"
        for path in sorted(checkpoint.rglob("*.safetensors")):
            _check_safetensors(path)
        for path in sorted([*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]):
            _check_archive(path)
        for index in checkpoint.glob("*.safetensors.index.json"):
            _check_shards(checkpoint, index)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON ({error})") from None


def _check_sizes(checkpoint: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, and was written with {size}")


def _check_safetensors(path: Path) -> None:
    """Compare the length that the header promises: 8 bytes for its own length, the header, the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"{path.name} is cut off or no safetensors file")
        try:
            header = json.loads(file.read(length))
            tensors = max(
                (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path.name} has a damaged header") from None
    if size != 8 + length + tensors:
        raise ValueError(f"{path.name} has {size} bytes, and its header says {8 + length + tensors}")


def _check_archive(path: Path) -> None:
    """torch writes ZIP archives, whose directory stands at the end: a cut-off one has none."""
    try:
        zipfile.ZipFile(path).close()
    except zipfile.BadZipFile:
        raise ValueError(f"{path.name} is cut off or damaged") from None


def _check_shards(checkpoint: Path, index: Path) -> None:
    for name in sorted(set(_read_json(index)["weight_map"].values())):
        if not (checkpoint / name).is_file():
            raise ValueError(f"{name} is missing, which {index.name} names")


def seal(folder: Path) -> None:
    """List the files of a finished checkpoint with their sizes, and flush all of it to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES_FILE)
    write_json(folder / FILES_FILE, {str(path.relative_to(folder)): path.stat().st_size for path in files})
    for path in [*files, folder / FILES_FILE, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _flush(path)


def move_into_place(partial: Path, final: Path) -> None:
    """Give a sealed checkpoint its name; an earlier one of that name, which the run has come by again, goes."""
    if final.exists():
        os.rename(final, partial.with_name(f"{partial.name}{_REPLACED}"))
    os.rename(partial, final)
    _flush(final.parent)
    shutil.rmtree(partial.parent, ignore_errors=True)


def _finish_replacing(output_dir: Path) -> None:
    """Give a checkpoint its name whose run was killed when the earlier one of that name had just gone."""
    for earlier in (output_dir / PARTIAL_FOLDER).glob(f"checkpoint-*{_REPLACED}"):
        sealed = earlier.with_name(earlier.name.removesuffix(_REPLACED))
        final = output_dir / sealed.name
        if not final.exists():
            # Another process may be at it as well.
            with suppress(OSError):
                os.rename(sealed if sealed.is_dir() else earlier, final)


def delete_old(newest: Path, limit: int | None, *, best: str | None = None, in_use: Path | None = None) -> None:
    """Delete the oldest checkpoints beyond a number of them, but not the newest, the best and the one in use.

    The one in use does not count. Those of later steps than the newest are what a run left that was resumed from an
    earlier checkpoint than its last: they go first.
    """
    if not limit or limit < 1:
        return
    in_use, kept = in_use and in_use.resolve(), {newest.resolve(), best and Path(best).resolve()}
    there = [path for path in checkpoints_in(newest.parent) if path.resolve() != in_use]
    there.sort(key=lambda path: (step_of(path) <= step_of(newest), step_of(path)))
    spare = [path for path in there if path.resolve() not in kept]
    # A checkpoint is never half deleted under its own name.
    going = newest.parent / PARTIAL_FOLDER
    for checkpoint in spare[: max(len(there) - limit, 0)]:
        going.mkdir(exist_ok=True)
        os.rename(checkpoint, going / checkpoint.name)
    shutil.rmtree(going, ignore_errors=True)


def _flush(path: Path) -> None:
    is_folder = path.is_dir()
    try:
        # Windows flushes only what is open for writing.
        handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:
        # Network and user-space file systems may flush no folders, and Windows opens none.
        if not is_folder:
            raise
