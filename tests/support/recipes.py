"""Running the recipes from tests: in this process for what is quick, as a command for what is real."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.files import write_rows

RECIPES = REPOSITORY / "recipes"
# A second configuration of the same recipe.
SCRIPTS = {"online_preference_replay": "online_preference"}
# The arguments of recipes that do not train.
OTHERS = {
    "best_of_n": "studies.best_of_n:BestOfNArguments",
    "rlhf": "studies.pipeline:RLHFArguments",
}
# Short enough for seconds, over every part of a run.
SHORT = ["--max_steps=4", "--generation_eval_every=2", "--save_steps=2", "--logging_steps=1", "--disable_tqdm=true"]
SHORT_PREFERENCE = [*SHORT, "--per_device_train_batch_size=4", "--gradient_accumulation_steps=2", "--eval_steps=2"]
SHORT_PREFERENCE += ["--num_generation_prompts=3", "--num_eval_prompts=12", "--max_new_tokens=12"]
# The same for recipes that sample in groups.
SHORT_ROLLOUTS = [*SHORT, "--per_device_train_batch_size=8", "--num_generations=4", "--num_generation_prompts=4"]
SHORT_ROLLOUTS += ["--num_eval_prompts=8", "--save_total_limit=3"]


def parse(monkeypatch, script: str, *arguments: str):
    """The dataclasses that `recipes/{script}.py` would run with: the recipe's own, the model's and any trainer's."""
    from trl_ext.runs import arguments as parsing
    from trl_ext.runs import configs

    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    types = parsing.argument_types(SCRIPTS.get(script, script))
    if types is None:
        module, _, name = OTHERS[script].partition(":")
        own = getattr(importlib.import_module(f"trl_ext.{module}"), name)
        types = (own,)
    # Without the flags of the launch, which every recipe that trains takes as well.
    return parsing.parse_arguments(types, default_config=configs.toy_config(script))[:3]


def is_online(script: str) -> bool:
    """Whether a recipe is one of the drivers that train on rewards."""
    from trl_ext.runs.arguments import argument_types

    types = argument_types(script)
    return types is not None and types[0].__name__ == "OnlineArguments"


def run(monkeypatch, script: str, *arguments: str) -> None:
    """Run a recipe in this process, as Python runs a script."""
    from trl_ext.runs import recipes_can_be_imported

    script = SCRIPTS.get(script, script)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    recipes_can_be_imported()
    runpy.run_path(str(RECIPES / f"{script}.py"), run_name="__main__")


def launch(script: str, *arguments: str, folder: Path, **popen) -> subprocess.CompletedProcess:
    """Run `accelerate launch recipes/{script}.py` to its end, as a user does, in a folder of its own."""
    command = launch_command(script, *arguments)
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, **popen)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def launch_command(script: str, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    config = ["--config_file", str(REPOSITORY / "accelerate_configs" / "cpu.yaml")]
    return [*launcher, *config, str(RECIPES / f"{script}.py"), *arguments]


def environment() -> dict[str, str]:
    """The environment of this process, without the hub."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def wait_until(condition, process: subprocess.Popen | None = None, seconds: float = 120) -> None:
    """Wait for a condition, which must come true within so many seconds and while the process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.02)


def refused(monkeypatch, capsys, script: str, *arguments: str) -> str:
    """The one line with which a recipe refuses its arguments."""
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, script, *arguments)
    assert stopped.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def read(folder: Path, name: str):
    """The content of a JSON file, or the rows of a .jsonl file."""
    text = (folder / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def check_run(folder: Path, steps: int, *, save_every: int = 2) -> dict:
    """Check what every recipe that trains leaves behind after that many steps, logged one by one; return the results.

    Settings, a row of metrics for each step, figures, the model's card, checkpoints that are whole and weights that
    moved, no temporary file, and a run that the report finds nothing wrong with.
    """
    from safetensors.torch import load_file

    from trl_ext.evaluation.report import write_report
    from trl_ext.resilience.checkpoints import is_complete

    results, metrics = read(folder, "results.json"), read(folder, "metrics.jsonl")
    described, config = results["run"], yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert described["optimizer_steps"] == steps and described["seed"] == config["seed"]
    training = [row for row in metrics if "loss" in row]
    assert [row["step"] for row in training] == list(range(1, steps + 1))
    assert all(math.isfinite(row["loss"]) for row in training)
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "trl_ext" in (folder / "README.md").read_text(encoding="utf-8")
    saved = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert saved == [f"checkpoint-{step}" for step in range(save_every, steps + 1, save_every)]
    assert all(is_complete(folder / name) for name in saved)
    first, last = (load_file(folder / name / "model.safetensors") for name in (saved[0], saved[-1]))
    assert any(not first[name].equal(last[name]) for name in last), "training moved nothing"
    assert not [path for path in folder.rglob(".*") if path.is_file()], "a temporary file was left"
    check_figures(folder, results)
    summary = write_report([folder], folder.parent / "report.html")
    assert not summary["problems"] and not summary["incomplete"]
    return results


def check_figures(folder: Path, results: dict) -> None:
    """Check the figures of results.json against the run's responses, or the scores of a reward model."""

    def mean(values) -> float:
        values = list(values)
        return pytest.approx(sum(values) / len(values), abs=1e-9)

    if "true_order" in results:
        margins = [row["chosen_score"] - row["rejected_score"] for row in read(folder, "scores.jsonl")]
        assert results["pairs"]["accuracy"] == mean(margin > 0 for margin in margins)
        assert results["pairs"]["margin"] == mean(margins)
        return
    rows, credit = read(folder, "generations.jsonl"), {"candidate": 1.0, "tie": 0.5, "base": 0.0}
    figures = {"score": results["score"]} | {f"reward/{name}": one for name, one in (results["rewards"] or {}).items()}
    for name, found in figures.items():
        assert found["policy"] == mean(row[name] for row in rows)
        base = f"base_{name}"
        if base in rows[0]:
            assert found["base"] == mean(row[base] for row in rows)
            assert found["gain"]["mean"] == mean(row[name] - row[base] for row in rows)
    if results["win_rate"] is not None:
        assert results["win_rate"]["half"]["rate"] == mean(credit[row["outcome"]] for row in rows)
    for when, kinds in (
        ("before", {"sampled": "base_category", "greedy": "base_greedy_category"}),
        ("after", {"sampled": "category", "greedy": "greedy_category"}),
    ):
        for decoding, name in kinds.items() if "reasoning" in results else ():
            found = results["reasoning"][when][decoding]
            assert found["accuracy"]["mean"] == mean(row[name] == "correct" for row in rows)
            assert found["categories"]["correct"] == sum(row[name] == "correct" for row in rows)


def write_labelled_pairs(path: Path, count: int) -> None:
    from tests.support.tiny import pairs

    sides = ("prompt", "chosen", "rejected")
    texts = [{f"{side}_text": pair[side][0]["content"] for side in sides} for pair in pairs(count)]
    write_rows(path, [{"row_id": f"row{index}", **row} for index, row in enumerate(texts)])


def copy_repository(folder: Path) -> None:
    """Copy what git keeps, or in a copy without git all but what it would ignore."""
    made = ("runs", "build", "dist", "*.egg-info", "__pycache__", "wandb", "submission")
    patterns = shutil.ignore_patterns(".*", *made)

    def ignored(place: str, names: list[str]) -> set[str]:
        return patterns(place, names) - ({"runs"} if Path(place).name == "trl_ext" else set())

    shutil.copytree(REPOSITORY, folder, ignore=ignored)


def write_rewards(folder: Path) -> None:
    """Write `my_rewards.py`, whose function `known` is the score of the embedded task."""
    (folder / "my_rewards.py").write_text(
        "from trl_ext.toy import score\n\n\n"
        "def known(prompts, completions, finished, **columns):\n"
        "    texts = zip(prompts, completions, finished, strict=True)\n"
        "    return [score(p[-1]['content'], c[0]['content'], finished=f) for p, c, f in texts]\n"
    )
