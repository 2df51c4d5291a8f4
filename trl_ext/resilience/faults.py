"""Recognises faults of the machine during training, and reports each in one line that says how to continue."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trl_ext.processes import world_size
from trl_ext.resilience.checkpoints import last_checkpoint

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The file of Gloo's sources that its messages begin with; it raises no type of its own.
_GLOO_TEXT = "gloo/transport"


class TrainingFault(RuntimeError):
    """A fault that ends a run and that its user can fix; the message says what happened and how to continue."""


@contextmanager
def plain_faults(output_dir: str | None = None) -> Iterator[None]:
    """Raise a `TrainingFault` for a full disk and for lost processes; other errors pass unchanged."""
    try:
        yield
    except TrainingFault:
        raise
    except Exception as error:
        if is_lost_process(error):
            raise TrainingFault(
                "another process of this run has ended, and this one cannot continue without it: see its own message "
                "above (one that was killed, as for want of memory, leaves none). "
                f"{_way_on(output_dir)} ({_first_line(error)})"
            ) from error
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            what = f"the disk is full: {error.filename or 'a file'} could not be written"
            raise TrainingFault(disk_message(what, error, output_dir)) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of a device or of the host was exhausted."""
    import torch
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def is_lost_process(error: BaseException) -> bool:
    """Whether a collective of several processes failed because another one is gone or does not respond."""
    import torch

    # Missing if torch was built without distributed training.
    distributed = getattr(torch.distributed, "DistError", ())
    of_gloo = isinstance(error, RuntimeError) and _GLOO_TEXT in str(error)
    return world_size() > 1 and (isinstance(error, distributed) or of_gloo)


def disk_message(what: str, error: BaseException, output_dir: str | None) -> str:
    """The message for what could not be written: how many MiB were free there, and how to continue."""
    where = Path(output_dir or ".")
    existing = next(folder for folder in (where, *where.absolute().parents) if folder.exists())
    return (
        f"{what}, and {shutil.disk_usage(existing).free / 2**20:.1f} MiB were free there. If the disk is full, make "
        f"room; a lower --save_total_limit keeps fewer checkpoints. {_way_on(output_dir)} ({_first_line(error)})"
    )


def memory_message(error: BaseException, args, step: int) -> str:
    """The message for exhausted memory in a step: the flags that reduce what it needs."""
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rollout = f" --generation_batch_size {args.generation_batch_size}" if hasattr(args, "num_generations") else ""
    return (
        f"out of memory in step {step}: try --per_device_train_batch_size {max(rows // 2, 1)} "
        f"--gradient_accumulation_steps {2 * accumulation}{rollout} (the same optimizer batch), "
        f"--gradient_checkpointing true, or shorter prompts and responses ({_first_line(error)})"
    )


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
    """The first line of an error's message; a trace of C++ calls may follow."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line.strip()[:200]}"
