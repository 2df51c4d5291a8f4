"""The folder of a run in several processes: the first one decides what all of them do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import recipes


@pytest.fixture
def run_folder(monkeypatch):
    """The module as the second of two processes has it; `told` is what the first one sends."""
    monkeypatch.syspath_prepend(str(recipes.RECIPES))
    import run_folder

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    return run_folder


def begin(run_folder, monkeypatch, told: list, folder) -> str | None:
    training = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint="last", report_to=[])
    parsed = SimpleNamespace(overwrite_output_dir=False), None, training, SimpleNamespace(print_plan=None)
    monkeypatch.setattr(run_folder, "parse_arguments", lambda *_, **__: parsed)
    monkeypatch.setattr(run_folder, "check_launch", lambda *_: None)
    monkeypatch.setattr(run_folder.sys, "argv", ["recipe.py"])

    def broadcast(values: list) -> list:
        values[:] = told
        return values

    monkeypatch.setattr(run_folder, "broadcast_object_list", broadcast, raising=False)
    return run_folder.begin_run(object, object, config="x", description=None, name=str).checkpoint


def test_a_process_whose_disk_is_late_goes_on_from_the_checkpoint_of_the_first(run_folder, monkeypatch, tmp_path):
    """Its own folder still shows nothing, of which it would say that there is no checkpoint."""
    last = str(tmp_path / "checkpoint-20")
    assert begin(run_folder, monkeypatch, [last, None], tmp_path) == last


def test_all_processes_fail_as_the_first(run_folder, monkeypatch, tmp_path):
    error = FileNotFoundError("no checkpoint to resume")
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume"):
        begin(run_folder, monkeypatch, [None, error], tmp_path)


def test_the_first_sends_its_choice_or_its_error(run_folder, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    sent = []
    monkeypatch.setattr(run_folder, "broadcast_object_list", lambda values: sent.append(list(values)))
    assert run_folder.of_first_process(lambda: "checkpoint-3") == "checkpoint-3"

    def fails():
        raise ValueError("both flags")

    with pytest.raises(ValueError, match="both flags"):
        run_folder.of_first_process(fails)
    assert sent[0] == ["checkpoint-3", None]
    assert sent[1][0] is None and str(sent[1][1]) == "both flags"
