"""Runs of recipes as processes: the order, failures, interrupted runs, and the checks before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import recipes
from trl_ext import cli
from trl_ext.runs import training_run
from trl_ext.runs.arguments import argument_types
from trl_ext.runs.studies import processes
from trl_ext.runs.studies.processes import Run, check_runs, launcher_options, print_commands, run_all

# A recipe that takes --value and --output_dir, writes results, and fails where it is told to.
RECIPE = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("value", "fail", "config", "output_dir", "resume_from_checkpoint", "overwrite_output_dir"):
    parser.add_argument(f"--{name}")
given = parser.parse_args()
folder = pathlib.Path(given.output_dir)
with (folder / "calls.txt").open("a") as calls:
    calls.write(json.dumps([given.value, given.resume_from_checkpoint, given.overwrite_output_dir]) + "\\n")
if given.fail and pathlib.Path(given.fail).exists():
    (folder / pathlib.Path(given.fail).read_text()).touch()
    sys.exit(3)
(folder / "results.json").write_text("{}")
"""


@pytest.fixture
def runs(monkeypatch, tmp_path) -> list[Run]:
    """Three runs of the stand-in; the second fails while there is a file `broken`, which names what it leaves."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "stand_in.py").write_text(RECIPE)
    monkeypatch.setattr(processes, "RECIPES", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    own = {"one": {"value": 1}, "two": {"value": 2, "fail": "broken"}, "three": {"value": 3}}
    launcher = launcher_options(None)
    return [Run("stand_in", Path("runs") / name, arguments, launcher) for name, arguments in own.items()]


def calls(name: str) -> list:
    path = Path("runs") / name / "calls.txt"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_failure_does_not_keep_the_others_from_running(runs, capfd):
    Path("broken").write_text("metrics.jsonl")
    assert run_all(runs) == ["two"]
    printed, errors = capfd.readouterr()
    assert "two failed with exit status 1" in printed
    assert "CalledProcessError" not in errors and "not passed to `accelerate launch`" not in errors
    assert [len(calls(name)) for name in ("one", "two", "three")] == [1, 1, 1]
    # The second time, only the one that failed runs, anew, as it has updates and no checkpoint.
    Path("broken").unlink()
    assert run_all(runs) == []
    assert calls("one") == [["1", None, None]]
    assert calls("two") == [["2", None, None], ["2", None, "true"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "second"),
    [
        # Responses are kept in the folder, where `--overwrite_output_dir` would remove them.
        ("generations.jsonl", ["2", None, None]),
        ("metrics.jsonl", ["2", "last", None]),
    ],
)
def test_an_interrupted_run_is_resumed(left, second, runs):
    Path("broken").write_text(left)
    run_all(runs[1:2])
    if left == "metrics.jsonl":
        state = Path("runs/two/checkpoint-4/trainer_state.json")
        state.parent.mkdir()
        state.write_text("{}")
    run_all(runs[1:2])
    assert calls("two") == [["2", None, None], second]


def test_a_folder_of_other_arguments_is_refused(runs, tmp_path):
    run = runs[0]
    run.folder.mkdir(parents=True)
    (run.folder / "notes.txt").touch()
    with pytest.raises(ValueError, match="runs/one holds something that no study started"):
        check_runs([run])
    (run.folder / processes.RECORD_NAME).write_text(json.dumps(run.record()))
    check_runs([run])
    with pytest.raises(ValueError, match="runs/one was run with value 1, and now it is 7: take that back"):
        check_runs([Run("stand_in", run.folder, {"value": 7})])


def test_the_command_of_a_run(runs, capsys):
    print_commands(runs[:1])
    name, command = capsys.readouterr().out.splitlines()
    assert name == "# one: new"
    assert command.startswith(f"{sys.executable} -m accelerate.commands.launch --quiet")
    assert command.endswith("stand_in.py --value 1 --output_dir runs/one")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"learnin_rate": 0.1}, "the run two of recipes/dpo.py: unknown flag --learnin_rate; did you mean 'learning_"),
        ({"learning_rate": "fast"}, "the run two of recipes/dpo.py: argument --learning_rate"),
        ({"loss_kwargs": {"a": 1}, "use_cpu": True, "weighting": ["wpo", "confidence"]}, None),
    ],
)
def test_arguments_are_checked_before_anything_runs(own, expected, tmp_path):
    found = [Run("dpo", tmp_path / name, arguments) for name, arguments in (("one", {"beta": 0.1}), ("two", own))]
    if expected is None:
        check_runs(found)
        return
    with pytest.raises(ValueError) as error:
        check_runs(found)
    assert expected in str(error.value)


@pytest.mark.parametrize("recipe", sorted({*cli.recipes()} - {*recipes.OTHERS}))
def test_arguments_are_checked_against_what_the_recipe_reads(recipe, monkeypatch):
    """The table of the check against what the recipe itself reads."""
    read = []

    def parse(types, **options):
        read.append(types)
        raise SystemExit

    monkeypatch.setattr(training_run, "parse_arguments", parse)
    with pytest.raises(SystemExit):
        recipes.run(monkeypatch, recipe)
    assert read == [argument_types(recipe)]
