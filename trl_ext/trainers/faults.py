"""What goes wrong with the machine while a model trains, told apart and said in one line with the way on."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trl_ext.trainers.checkpoints import last_checkpoint

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What writers that keep no error number say: safetensors, torch's zip writer, DeepSpeed.
_DISK_TEXT = re.compile(
    r"no space left|quota exceeded|file too large|PytorchStreamWriter failed|inline_container\.cc.*unexpected pos|"
    r"os error (28|27|122)\b",
    re.IGNORECASE,
)
# Gloo's transport, the store of the rendezvous, and NCCL.
_LOST_TEXT = re.compile(
    r"gloo/transport|connection (was )?(likely )?(closed|reset|refused)|broken pipe|remote process exited|"
    r"socket (timeout|closed)|timed out waiting",
    re.IGNORECASE,
)


class TrainingFault(RuntimeError):
    """A run cannot go on, for a reason that its user can mend; the message says what happened and how to go on."""


class FaultOfAllProcesses(TrainingFault):
    """A fault that is raised in every process, and between two updates: a checkpoint can still be saved."""


@contextmanager
def plain_faults(output_dir: str | None = None) -> Iterator[None]:
    """Raise a `TrainingFault` for a full disk and for processes that are gone; other errors pass as they are."""
    try:
        yield
    except TrainingFault:
        raise
    except Exception as error:
        if is_lost_process(error):
            raise TrainingFault(
                "another process of this run has ended, and this one cannot go on without it: see its own message "
                "above (one that was killed, as for want of memory, leaves none). "
                f"{_way_on(output_dir)} ({_first_line(error)})"
            ) from error
        if is_disk_full(error):
            free = free_space(getattr(error, "filename", None) or output_dir or ".")
            raise TrainingFault(disk_message(error, output_dir, unwritten(error), free)) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the host's memory was too small."""
    import torch
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def is_disk_full(error: BaseException) -> bool:
    """Whether a file could not be written for want of space, quota or permitted size."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _DISK_ERRORS
    return _DISK_TEXT.search(str(error)) is not None


def is_lost_process(error: BaseException) -> bool:
    """Whether a collective failed since another process is gone or does not answer."""
    import torch

    if not isinstance(error, RuntimeError):
        return False
    # Not there where torch was built without distributed training.
    distributed = getattr(torch.distributed, "DistError", ())
    return isinstance(error, distributed) or _LOST_TEXT.search(str(error)) is not None


def disk_message(error: BaseException, output_dir: str | None, what: str, free: float) -> str:
    """What a full disk is told by: what could not be written, and how many MiB were free there."""
    return (
        f"the disk is full: {what} could not be written, and {free:.1f} MiB were free there. Make room; "
        "a lower --save_total_limit keeps fewer checkpoints. "
        f"{_way_on(output_dir)} ({_first_line(error)})"
    )


def unwritten(error: BaseException, folder: Path | None = None) -> str:
    """What a writer failed on: the file that it names, or else the last one in the folder that it wrote to."""
    if getattr(error, "filename", None):
        return str(error.filename)
    # safetensors takes back the file that it has begun.
    if folder is not None and type(error).__name__ != "SafetensorError":
        files = [path for path in folder.rglob("*") if path.is_file()]
        if files:
            return str(max(files, key=lambda path: path.stat().st_mtime_ns))
    what = "model.safetensors or a part of it" if type(error).__name__ == "SafetensorError" else "a file"
    return what if folder is None else f"{what} in {folder}"


def free_space(path: str | Path) -> float:
    """MiB that are free where a path is or would be."""
    path = Path(path)
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free / 2**20


def _way_on(output_dir: str | None) -> str:
    if output_dir is None:
        return "The same command with --resume_from_checkpoint goes on from the last checkpoint, if there is one."
    last = last_checkpoint(output_dir)
    if last is None:
        return "There is no checkpoint to go on from: begin anew with --overwrite_output_dir."
    return (
        f"Earlier checkpoints are intact: the same command with --resume_from_checkpoint goes on from {last} "
        "(without --overwrite_output_dir)."
    )


def _first_line(error: BaseException) -> str:
    """An error's own words, without the trace of C++ calls that may follow."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()[:200]}"
