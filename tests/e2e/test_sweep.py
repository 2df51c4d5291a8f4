"""Studies: what each of them runs, that finished runs are skipped and failures passed over, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import recipes
from trl_ext import cli
from trl_ext.runs import training_run
from trl_ext.runs.arguments import argument_types
from trl_ext.runs.studies import processes, sweep

STUDIES = sorted((recipes.RECIPES / "configs" / "sweeps").glob("*.yaml"))


# A recipe that takes --value and --output_dir, writes results, and fails where it is told to.
RECIPE = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("value", "fail", "config", "output_dir", "resume_from_checkpoint", "overwrite_output_dir"):
    parser.add_argument(f"--{name}")
given = parser.parse_args()
folder = pathlib.Path(given.output_dir)
folder.mkdir(parents=True, exist_ok=True)
with (folder / "calls.txt").open("a") as calls:
    calls.write(json.dumps([given.value, given.resume_from_checkpoint, given.overwrite_output_dir]) + "\\n")
if given.fail and pathlib.Path(given.fail).exists():
    (folder / pathlib.Path(given.fail).read_text()).touch()
    sys.exit(3)
estimate = {"mean": 0.25, "low": 0.125, "high": 0.375, "n": 8}
score = {"base": 0.5, "policy": 0.75, "gain": estimate}
run = {"objective": f"stand-in {given.value}", "model": "toy", "dataset": "toy"}
(folder / "results.json").write_text(json.dumps({"run": run, "score": score}))
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A folder of recipes with the stand-in, and a study of three runs of it; returns a function that runs it."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "stand_in.py").write_text(RECIPE)
    monkeypatch.setattr(sweep, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(processes, "RECIPES", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    runs = [{"name": "one", "value": 1}, {"name": "two", "value": 2, "fail": "broken"}, {"name": "three", "value": 3}]
    study(tmp_path, recipe="stand_in", runs=runs)

    def run(*arguments: str) -> int:
        try:
            sweep.main(["--study", "study.yaml", *arguments])
        except SystemExit as stopped:
            return stopped.code
        return 0

    return run


def study(folder: Path, **content) -> Path:
    (folder / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "study.yaml"


def calls(name: str) -> list:
    path = Path("runs") / "study" / name / "calls.txt"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_failure_does_not_keep_the_others_from_running(stand_in, capfd):
    Path("broken").write_text("metrics.jsonl")
    assert stand_in() == 1
    printed, errors = capfd.readouterr()
    assert "two failed with exit status 1" in printed
    assert "CalledProcessError" not in errors and "not passed to `accelerate launch`" not in errors
    assert "2 of 3 runs are finished" in printed and "failed: two" in printed
    assert [len(calls(name)) for name in ("one", "two", "three")] == [1, 1, 1]
    table = [line.split() for line in printed.partition("\n\nrun ")[2].splitlines()]
    assert table[2] == ["one", "1", "0.750", "0.250", "[0.125,", "0.375]"]
    # The second time, only the one that failed runs, anew, as it has updates and no checkpoint.
    Path("broken").unlink()
    assert stand_in() == 0
    assert calls("one") == [["1", None, None]]
    assert calls("two") == [["2", None, None], ["2", None, "true"]]
    assert "3 of 3 runs are finished" in capfd.readouterr().out
    assert Path("runs/study/report.html").is_file() and "stand-in 2" in Path("runs/study/report.md").read_text()


@pytest.mark.slow
def test_an_interrupted_run_that_samples_is_repeated_as_it_was(stand_in):
    """Its responses are kept in its folder, where `--overwrite_output_dir` would remove them."""
    Path("broken").write_text("generations.jsonl")
    stand_in("--array_index", "1")
    stand_in("--array_index", "1")
    assert calls("two") == [["2", None, None]] * 2


def test_the_record_of_a_run_with_an_empty_configuration(tmp_path):
    (tmp_path / "empty.yaml").touch()
    run = processes.Run("best_of_n", tmp_path / "run", {"config": str(tmp_path / "empty.yaml"), "n": 4})
    assert run.record() == {"recipe": "best_of_n", "n": 4}


@pytest.mark.slow
def test_an_interrupted_run_is_taken_up_from_its_checkpoint(stand_in):
    Path("broken").write_text("metrics.jsonl")
    stand_in("--array_index", "1")
    state = Path("runs/study/two/checkpoint-4/trainer_state.json")
    state.parent.mkdir()
    state.write_text("{}")
    stand_in("--array_index", "1")
    assert calls("two")[1] == ["2", "last", None]
    assert not calls("one") and not Path("runs/study/report.html").exists(), "a task of an array runs its own only"


@pytest.mark.slow
def test_a_folder_of_other_arguments_is_refused(stand_in, tmp_path, capsys):
    assert stand_in() == 0
    study(tmp_path, recipe="stand_in", runs=[{"name": "one", "value": 7}])
    assert stand_in() == 2
    assert "runs/study/one was run with value 1, and now it is 7: take that back" in capsys.readouterr().err
    assert stand_in("--output_dir", "elsewhere") == 0


def test_each_setting_that_varies_has_a_column(tmp_path):
    """A grid has no names; what all runs share is left out, and so are a run without results and an absent figure."""
    grid = {"rate": [1e-4, 5e-4], "seed": [0, 1]}
    found = sweep.read_study(study(tmp_path, recipe="sweep", common={"a": 1}, grid=grid))
    gain = {"value": 0.25, "low": 0.125, "high": 0.375}
    policies = [
        {"folder": f"runs/study/{run.name}", "score": {"policy": 0.5 + number / 10}, "score_gain": gain}
        for number, run in enumerate(found.runs[:3])
    ]
    header, rows = sweep.table(found, {"policies": policies, "reward_models": []})
    assert header == ["rate", "seed", "score", "gain"]
    assert rows[1:] == [["0.0001", "1", "0.600", "0.250  [0.125, 0.375]"], ["0.0005", "0", "0.700", rows[0][3]]]


def test_a_dry_run_prints_and_runs_nothing(stand_in, capsys):
    assert stand_in("--dry_run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == ["# one: new", "# two: new", "# three: new"]
    command = shlex.split(lines[1])
    assert command[:4] == [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    assert command[-5].endswith("stand_in.py") and command[-2:] == ["--output_dir", "runs/study/one"]
    assert not Path("runs").exists()


def test_the_time_that_is_left():
    """By the mean of the recipe's own runs, or of all where it has none yet: 3 x 20, then 2 x 80, then 60 s."""
    countdown = processes.Countdown([processes.Run(name, Path("new"), {}) for name in ("dpo", "grpo", "grpo", "grpo")])
    assert countdown.place() == "1 of 4"
    countdown.ended("dpo", 20.0)
    assert countdown.place() == "2 of 4, about 60 s left"
    countdown.ended("grpo", 80.0)
    assert countdown.place() == "3 of 4, about 2.7 min left"
    countdown.ended("grpo", 40.0)
    assert countdown.place() == "4 of 4, about 60 s left"


def test_the_slurm_script_runs_one_task_each(stand_in, tmp_path, capsys):
    assert stand_in("--slurm") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-2" in script
    command = script.splitlines()[-1].replace('"$SLURM_ARRAY_TASK_ID"', "2")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert shlex.split(command)[-2:] == ["--array_index", "2"]
    assert f"--study {tmp_path / 'study.yaml'}" in command


def test_a_grid_is_every_combination(tmp_path):
    path = study(tmp_path, recipe="sweep", common={"a": 1}, grid={"rate": [0.1, 0.2], "seed": [0, 1]})
    runs = sweep.read_study(path).runs
    assert [run.name for run in runs] == [f"rate_{rate}-seed_{seed}" for rate in (0.1, 0.2) for seed in (0, 1)]
    assert runs[2].arguments == {"a": 1, "rate": 0.2, "seed": 0}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"recipe": "nope", "runs": [{"a": 1}]}, "no recipe 'nope'"),
        ({"recipe": "sweep"}, "give either runs"),
        ({"recipe": "sweep", "grid": {"a": 1}}, "grid: a must be a list of values, got 1"),
        ({"recipe": "sweep", "comon": {}, "runs": [{"a": 1}]}, "unknown key 'comon'"),
        ({"recipe": "sweep", "runs": [{"output_dir": "x"}]}, "output_dir is set by the sweep"),
        ({"recipe": "sweep", "runs": [{"name": "x", "a": 1}, {"name": "x", "a": 2}]}, "two runs are called 'x'"),
        ({"recipe": "sweep", "runs": [{"config": "nope.yaml"}]}, "no configuration file 'nope.yaml'"),
    ],
)
def test_what_is_no_study(content, expected, tmp_path, capsys):
    path = study(tmp_path, **content)
    with pytest.raises(SystemExit) as stopped:
        sweep.main(["--study", str(path)])
    assert stopped.value.code == 2 and expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"learnin_rate": 0.1}, "the run two of recipes/dpo.py: unknown flag --learnin_rate; did you mean 'learning_"),
        ({"learning_rate": "fast"}, "the run two of recipes/dpo.py: argument --learning_rate"),
        ({"loss_kwargs": {"a": 1}, "use_cpu": True, "weighting": ["wpo", "confidence"]}, None),
    ],
)
@pytest.mark.parametrize("flag", ["--dry_run", "--slurm", None])
def test_arguments_are_checked_before_anything_runs(flag, own, expected, monkeypatch, tmp_path, capsys):
    """Of every run, the last one's with the first one's, in whichever way the study is run."""
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(sweep, "run_all", lambda work: ran.extend(work) or [])
    monkeypatch.setattr(sweep, "_report", lambda study: None)
    path = study(tmp_path, recipe="dpo", runs=[{"name": "one", "beta": 0.1}, {"name": "two", **own}])
    arguments = ["--study", str(path), *([flag] if flag else [])]
    if expected is None:
        sweep.main(arguments)
        assert len(ran) == (0 if flag else 2)
        return
    with pytest.raises(SystemExit) as stopped:
        sweep.main(arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and not printed.out and not ran
    assert expected in printed.err and printed.err.count("\n") == 1


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


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_run_of_the_studies_has_arguments_that_its_recipe_takes(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = sweep.read_study(path)
    for run in found.runs:
        arguments, _, training = recipes.parse(monkeypatch, run.recipe, *run.flags())
        assert training.output_dir == os.path.join("runs", path.stem, run.name)
        if "config" in run.arguments and path.stem.startswith("toy"):
            assert arguments.eval_split == "validation", "studies choose settings, and not on the test problems"


@pytest.mark.long
def test_the_off_policy_study_on_the_embedded_additions(monkeypatch, tmp_path, capfd):
    """Two of its points, cut to two rollouts: on-policy that is an update each, and with half a rollout to an update,
    twice over, four updates each. The comparison has the figures of both runs."""
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((recipes.RECIPES / "configs" / "sweeps" / "toy_off_policy.yaml").read_text())
    content["runs"] = [run for run in content["runs"] if run["name"] in ("on_policy", "four_updates_no_clip")]
    content["common"] |= {"n_grpo_steps": 2, "num_validation_prompts": 8, "num_eval_prompts": 16, "logging_steps": 1}
    path = study(tmp_path, **content)
    sweep.main(["--study", str(path)])
    printed = capfd.readouterr().out
    assert "2 of 2 runs are finished, in runs/study" in printed
    folder = tmp_path / "runs" / "study"
    # As Markdown shows it.
    report = (folder / "report.md").read_text().replace("\\", "")
    found = {}
    for name, updates in (("on_policy", 1), ("four_updates_no_clip", 4)):
        results = json.loads((folder / name / "results.json").read_text())
        run, score = results["run"], results["score"]
        assert (run["updates_per_rollout"], run["optimizer_steps"]) == (updates, 2 * updates)
        assert run["sampled_responses"] == 2 * 128
        metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in metrics if "loss" in row] == [*range(1, 2 * updates + 1)]
        (row,) = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
        assert f"{score['policy']:.3f}  {score['gain']['mean']:.3f}" in row
        rows = [line for line in report.splitlines() if line.startswith("|") and name in line]
        assert any(f"{score['policy']:.3f}" in row for row in rows) and run["objective"] in report
        found[name] = run["algorithm"]
    assert found == {"on_policy": "grpo", "four_updates_no_clip": "grpo_no_clip"}
