"""Checkpoints on disks that machines share or not, that show changes late or flush no folders; rights of files."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_ext.files import write_text
from trl_ext.trainers import checkpoints, shared_disk
from trl_ext.trainers.checkpoints import FILES_FILE, PARTIAL_FOLDER
from trl_ext.trainers.resumable import Resumable
from trl_ext.trainers.shared_disk import sees_disk_of_first_process


class Cached(type(Path())):
    """A path of whose folders the machine still holds that they are there."""

    def is_dir(self) -> bool:
        return True


class Machines:
    """The first process of each of two machines, as threads that wait for one another."""

    def __init__(self, monkeypatch):
        self.barrier = threading.Barrier(2, timeout=20)
        self.told: list = []
        self.failures: list[BaseException] = []
        self.here = threading.local()
        monkeypatch.setattr(shared_disk, "broadcast_object_list", self.broadcast)

    def broadcast(self, values: list) -> list:
        if self.here.rank == 0:
            self.told = list(values)
        self.barrier.wait()
        values[:] = self.told
        return values

    def run(self, work) -> list:
        """What `work(rank, accelerator)` returns in each."""
        found: list = [None, None]

        def one(rank: int) -> None:
            self.here.rank = rank
            accelerator = SimpleNamespace(
                num_processes=2,
                is_main_process=rank == 0,
                is_local_main_process=True,
                wait_for_everyone=self.barrier.wait,
            )
            try:
                found[rank] = work(rank, accelerator)
            except BaseException as error:
                self.failures.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return found

    def save(self, folders: list[Path], step: int) -> None:
        """A checkpoint, of which the first process writes the weights, and each its own part."""

        def work(rank: int, accelerator) -> None:
            trainer = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(should_save=rank == 0))
            name = f"checkpoint-{step}"
            kind = Path if rank == 0 else Cached
            partial, final = kind(folders[rank] / PARTIAL_FOLDER / name), kind(folders[rank] / name)
            with Resumable._written_whole(trainer, partial, final):
                write_text(Path(partial) / f"progress_{rank}.json", "{}")
                if rank == 0:
                    write_text(partial / "trainer_state.json", "{}")

        self.run(work)


@pytest.fixture
def machines(monkeypatch) -> Machines:
    return Machines(monkeypatch)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_one_disk_is_told_from_two(machines, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    shared = machines.run(lambda rank, accelerator: sees_disk_of_first_process(accelerator, one))
    own = machines.run(lambda rank, accelerator: sees_disk_of_first_process(accelerator, (one, other)[rank]))
    assert (shared, own) == ([True, True], [True, False])
    assert names(one) == names(other) == set()


def test_a_shared_disk_that_shows_what_is_gone(machines, tmp_path):
    """The second machine still sees the partial folder, which the first has moved to its name; two saves."""
    for step in (1, 2):
        machines.save([tmp_path, tmp_path], step)
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    whole = {"progress_0.json", "progress_1.json", "trainer_state.json", FILES_FILE}
    assert names(tmp_path / "checkpoint-1") == names(tmp_path / "checkpoint-2") == whole


def test_machines_with_disks_of_their_own(machines, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    machines.save(folders, 1)
    assert names(folders[0] / "checkpoint-1") == {"progress_0.json", "trainer_state.json", FILES_FILE}
    assert names(folders[1]) == {"checkpoint-1"} and names(folders[1] / "checkpoint-1") == {"progress_1.json"}


def test_what_is_sealed_stays(machines, tmp_path, monkeypatch):
    """Where a shared disk is taken for two, the checkpoint is there for all that."""
    monkeypatch.setattr(
        "trl_ext.trainers.resumable.sees_disk_of_first_process", lambda accelerator, _: accelerator.is_main_process
    )
    machines.save([tmp_path, tmp_path], 1)
    assert FILES_FILE in names(tmp_path / "checkpoint-1") and names(tmp_path) == {"checkpoint-1"}


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
