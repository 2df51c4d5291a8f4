"""Faults of the machine, each reported in one line that says how to continue."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TrainingFault(RuntimeError):
    """A fault that ends a run and that its user can fix; the message says what happened and how to continue."""


@contextmanager
def plain_faults() -> Iterator[None]:
    """Raise a `TrainingFault` for a full disk; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise not_written(error.filename or "a file", error) from error


def not_written(path: str | Path, error: Exception) -> TrainingFault:
    """The fault for a file or folder that could not be written, with the space that is free there."""
    where = next(folder for folder in Path(path).absolute().parents if folder.exists())
    return TrainingFault(
        f"{path} could not be written, and {shutil.disk_usage(where).free / 2**20:.1f} MiB are free there: make room, "
        "or keep fewer checkpoints with a lower --save_total_limit. Earlier checkpoints are intact: the same command "
        f"with --resume_from_checkpoint resumes from the last complete one ({_first_line(error)})"
    )


def out_of_memory(error: Exception, args, step: int) -> TrainingFault:
    """The fault for exhausted memory in a step, with the flags that reduce what it needs."""
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rollout = f" --generation_batch_size {args.generation_batch_size}" if hasattr(args, "num_generations") else ""
    budget = "" if getattr(args, "tokens_per_pass", "off") == "off" else "a lower number for --tokens_per_pass, "
    return TrainingFault(
        f"out of memory in step {step}: try {budget}--per_device_train_batch_size {max(rows // 2, 1)} "
        f"--gradient_accumulation_steps {2 * accumulation}{rollout} (the same optimizer batch), "
        f"--gradient_checkpointing true, or shorter prompts and responses ({_first_line(error)})"
    )


def _first_line(error: Exception) -> str:
    """The first line of an error's message; a trace of C++ calls may follow."""
    line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {line[:200]}"
