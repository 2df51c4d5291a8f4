"""Whether a process sees what the first one of its run writes: machines share a disk, or each has one of its own."""

from __future__ import annotations

import uuid
from pathlib import Path

from accelerate.utils import broadcast_object_list


def sees_disk_of_first_process(accelerator, folder: Path) -> bool:
    """Whether a file that the first process has just made in a folder is there; every process must call this.

    For a minute, a machine may go by what it knows of a network disk: files that are gone seem to be there, and new
    ones not. Of a name that it has never asked for, it knows nothing, and has to ask.
    """
    if accelerator.num_processes == 1:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    name = f".shared-{uuid.uuid4().hex}"
    if accelerator.is_main_process:
        (folder / name).touch()
    # The others wait for the name, until the file is there.
    (name,) = broadcast_object_list([name])
    found = (folder / name).exists()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / name).unlink(missing_ok=True)
    return found
