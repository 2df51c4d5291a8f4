"""Checkpoints on disks that machines share or not, that show changes late or flush no folders; rights of files."""

from __future__ import annotations

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_ext.files import write_text
from trl_ext.resilience import checkpoints
from trl_ext.resilience.checkpoints import FILES_FILE, PARTIAL_FOLDER


class Cached(type(Path())):
    """A path whose machine still lists folders that are gone."""

    def is_dir(self) -> bool:
        return True


def save(folders: list[Path], step: int) -> None:
    """A checkpoint of two machines. The first process writes the weights, and each process its own part."""
    barrier = threading.Barrier(2, timeout=20)

    def work(rank: int) -> None:
        accelerator = SimpleNamespace(is_local_main_process=True, wait_for_everyone=barrier.wait)
        name, kind = f"checkpoint-{step}", Path if rank == 0 else Cached
        partial, final = kind(folders[rank] / PARTIAL_FOLDER / name), kind(folders[rank] / name)
        with checkpoints.written_whole(partial, final, accelerator, saves=rank == 0):
            write_text(Path(partial) / f"progress_{rank}.json", "{}")
            if rank == 0:
                write_text(partial / "trainer_state.json", "{}")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_shared_disk_that_still_lists_what_is_gone(tmp_path):
    """The second machine still sees the partial folder, which the first has renamed; the second step saved twice."""
    for step in (1, 2, 2):
        save([tmp_path, tmp_path], step)
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    whole = {"progress_0.json", "progress_1.json", "trainer_state.json", FILES_FILE}
    assert names(tmp_path / "checkpoint-1") == names(tmp_path / "checkpoint-2") == whole


def test_machines_without_a_shared_disk(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for _ in range(2):
        save(folders, 1)
    assert names(folders[0]) == names(folders[1]) == {"checkpoint-1"}
    assert names(folders[0] / "checkpoint-1") == {"progress_0.json", "trainer_state.json", FILES_FILE}
    assert names(folders[1] / "checkpoint-1") == {"progress_1.json"}


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_disk_that_flushes_no_folders(call, monkeypatch, tmp_path):
    """Windows opens none; some network and user-space file systems answer EINVAL to fsync."""
    partial, final = tmp_path / PARTIAL_FOLDER / "checkpoint-1", tmp_path / "checkpoint-1"
    write_text(partial / "part" / "weights", "1234")
    real, flushed = getattr(os, call), []

    def refuses_folders(what, *arguments, **keywords):
        if os.path.isdir(what):
            raise OSError(errno.EINVAL if call == "fsync" else errno.EACCES, "no folders")
        flushed.append(what)
        return real(what, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, call, refuses_folders)
        if call == "open":
            # Deleting opens folders, on a machine that has them.
            patch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: None)
        checkpoints.seal(partial)
        checkpoints.move_into_place(partial, final)
    assert (final / "part" / "weights").read_text() == "1234" and (final / FILES_FILE).is_file()
    assert flushed


def test_a_file_that_cannot_be_flushed_is_a_fault(monkeypatch, tmp_path):
    write_text(tmp_path / "weights", "1234")

    def full(handle):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.seal(tmp_path)


def test_files_have_the_rights_of_new_ones_while_others_are_made(tmp_path, monkeypatch):
    """The process's mask is everybody's: it is not touched for a moment either."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the mask of the whole process is changed"))
        write_text(tmp_path / "a.json", "{}")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o640
    assert names(tmp_path) == {"a.json"}
