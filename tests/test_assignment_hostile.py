"""Texts that a submission may hold: none ends the grader, and none stands in for what it is given or answers."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import pytest

from trl_ext.assignment.building import build_cases
from trl_ext.assignment.catalog import TASKS, task
from trl_ext.assignment.runtime.guard import Guard
from trl_ext.assignment.runtime.imports import imports_by_module
from trl_ext.assignment.runtime.running import Runner
from trl_ext.assignment.writing import _write_folders

PLAN = {"allowed_imports": [], "package": "course", "files": {"course.pair": "course/pair.py"}}
RUNTIME = Path(sys.modules[Runner.__module__].__file__).parent


def imported(folder: Path, text: str) -> str | None:
    (folder / "course").mkdir(exist_ok=True)
    (folder / "course" / "pair.py").write_text(text)
    return imports_by_module(folder, PLAN)[0]["course.pair"]


@pytest.mark.parametrize(
    "name",
    [
        "'lib/helper'",
        "'/etc/passwd'",
        "'lib/../../x'",
        "'.'",
        "'..inner'",
        "''",
        "'a\\0b'",
        "'a\\ud800.b'",
        "b'x/y'",
        repr("y" * 300),
        repr("lib." + "y" * 300),
        "0x" + "f" * 10_000,
    ],
)
def test_names_that_are_no_module_s(name, tmp_path):
    """Whatever stands where the name of a module may: the file's other imports are read all the same."""
    (tmp_path / "lib").mkdir()
    text = f"import importlib\nimportlib.import_module({name})\n__import__({name})\n"
    assert imported(tmp_path, text) is None
    assert imported(tmp_path, f"{text}import trl_ext.losses\n").startswith("course/pair.py, line 4, imports trl_ext")
    assert imported(tmp_path, f"import {'y' * 300}\n") is None


def test_a_folder_s_name_need_be_no_identifier(tmp_path):
    """import_module takes `my-lib.helper`, which an import statement does not."""
    (tmp_path / "my-lib").mkdir()
    (tmp_path / "my-lib" / "helper.py").write_text("import trl_ext.losses\n")
    text = "import importlib\nimportlib.import_module('my-lib.helper')\n"
    assert imported(tmp_path, text).startswith("my-lib/helper.py, line 1, imports trl_ext.losses")


def test_files_that_are_none(tmp_path):
    """A link to itself, a device without end, a pipe that nobody writes to, a folder."""
    (tmp_path / "course").mkdir()
    for name in ("pair.py", "other.py"):
        (tmp_path / "course" / name).symlink_to(tmp_path / "course" / name)
    (tmp_path / "course" / "zeros.py").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "course" / "pipe.py")
    (tmp_path / "course" / "folder.py").mkdir()
    assert imports_by_module(tmp_path, PLAN) == ({"course.pair": None}, [])


def test_what_a_function_says_that_it_wraps(monkeypatch):
    """A loop of wrappers, code whose file is no path, and the library's code at any depth."""
    import trl_ext.advantages

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    guard = Guard([])

    def one():
        pass

    def two():
        pass

    one.__wrapped__, two.__wrapped__ = two, one
    assert not guard.is_library_s(one) and not guard.is_library_s(functools.partial(one))
    for file in ("a\0b", "\ud800", ""):
        two.__code__ = two.__code__.replace(co_filename=file)
        assert not guard.is_library_s(one)
    two.__code__ = two.__code__.replace(co_filename=trl_ext.advantages.__file__)
    assert guard.is_library_s(one) and guard.is_library_s(functools.partial(functools.partial(one)))


@pytest.mark.parametrize(
    "paths, kept", [("", []), (":", []), ("src:/opt/lib:./x:", ["/opt/lib"]), ("/a::/b", ["/a", "/b"])]
)
def test_the_worker_s_path_has_no_entry_that_is_the_submission(paths, kept, tmp_path, monkeypatch):
    """The worker starts in the submission, which an empty or relative entry would be."""
    monkeypatch.setenv("PYTHONPATH", paths)
    runner = Runner(tmp_path, RUNTIME, 1, None)
    runner._home = tmp_path / "home"
    assert runner._environment()["PYTHONPATH"].split(":") == [str(tmp_path / "home"), *kept]


@pytest.mark.parametrize("name", [each for each in TASKS if each.startswith(("rewards.", "course.", "losses."))])
def test_what_students_read_of_a_hidden_case_has_none_of_its_texts(name):
    """`about` stands in the results; a text of one word is a text as well, and the choice of a kind is none."""
    for case in build_cases(task(name), 5, 8, nan_padding=True):
        given = {name: value for name, value in case["arguments"].items() if isinstance(value, str)}
        for argument, value in given.items():
            option = argument in ("kind", "loss_type")
            assert (f"{argument}={value!r}" in case["about"]) == option
            assert (f"{argument}={value!r}" in case.get("texts", "")) != option


@pytest.mark.parametrize("there", [(), ("course",), ("grader",), ("course", "grader")])
@pytest.mark.parametrize("place", ["course", "grader"])
def test_a_failure_to_put_a_folder_in_its_place_leaves_all_as_it_was(place, there, tmp_path, monkeypatch):
    for name in there:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")

    def fails(self, target):
        if self.name.endswith("-new") and Path(target).name == place:
            raise OSError("disk")
        os.rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    folders = {tmp_path / "course": {"a": "1"}, tmp_path / "grader": {"b": "2"}}
    with pytest.raises(OSError, match="disk"):
        _write_folders(folders, lambda new: None)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert left == [f"{name}/mine" for name in there] and len(list(tmp_path.iterdir())) == len(there)
    monkeypatch.undo()
    kept = _write_folders(folders, lambda new: None)
    assert kept == [tmp_path / f"{name}.old-1" for name in there]
    assert json.loads((tmp_path / "course" / "a").read_text()) == 1
