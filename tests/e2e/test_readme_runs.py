"""The commands of the README and then of the tour run in order in a fresh folder: each finds what it needs.

The folder holds a copy of the repository without anything that was made in it. Each command runs as it stands there,
with flags that cut it short, in a process of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.pages import README, TEXTS, blocks, commands
from tests.support.recipes import copy_repository

# Why a command is not run, by how it begins; `tests/docs/test_readme.py` parses these too.
NOT_RUN = {
    "make ": "sets up an environment; `make demo` is the first command that is run, and the others run the tests",
    "pip install ": "installs; tests/docs/test_wheel.py does that",
    "python recipes/one_file/": "trains for a minute; tests/invariants/test_one_file.py runs its steps",
    "python recipes/own/": "trains for minutes; tests/algorithms/test_own_recipes.py runs its update",
    "python recipes/dr_grpo.py --config recipes/configs/smollm2/": "needs the weights of smollm2",
    "python recipes/sft_math.py --config recipes/configs/smollm2/": "the same",
    "python recipes/grpo_math.py --config recipes/configs/smollm2/": "the same",
}
STEPS = "--max_steps 2 --per_device_train_batch_size 4"
SHORT = f"{STEPS} --num_eval_prompts 4 --generation_eval_every 0 --eval_strategy no --save_strategy no"
ROLLOUT = "--generation_batch_size 8 --max_completion_length 16"
# What cuts a command short, by how it begins or by the recipe's name; the first that fits.
FLAGS = {
    "trl-ext train --list": "",
    "expert_iteration": "--n_steps 1 --questions_per_step 32 --num_validation_prompts 4 --num_eval_prompts 8",
    "best_of_n": "--num_prompts 4 --n 1 2",
    "sft_math": f"{STEPS} --num_eval_prompts 8 --generation_eval_every 0 --num_examples 64 --save_strategy no",
    "grpo_math": "--max_steps 2 --num_validation_prompts 4 --num_eval_prompts 8 --save_strategy no",
    "reward_model": f"{STEPS} --eval_steps 2 --save_steps 2",
    "ppo": f"{SHORT} {ROLLOUT}",
    "online_preference": f"{SHORT} --generation_batch_size 8",
    "online": f"{SHORT} --generation_batch_size 16 --max_completion_length 16",
    **dict.fromkeys(("grpo", "rloo"), f"{SHORT} {ROLLOUT}"),
    **dict.fromkeys(("aot", "dpo", "ipo", "preference", "kto"), SHORT),
    "public_eval.generate": "",
    "rlhf": "--config short-rlhf.yaml",
    "compare": "--config short-compare.yaml --seeds 0 --methods dpo,grpo",
}


def flags_for(command: str) -> list[str]:
    """What cuts a command short."""
    for start, flags in FLAGS.items():
        if command.startswith(start) or re.search(rf"(recipes/|train |-m ){re.escape(start)}(\.py)?( |$)", command):
            return shlex.split(flags)
    return []


@pytest.mark.long
def test_the_commands_of_the_readme_and_the_tour_run_in_order(tmp_path):
    tour = TEXTS["docs/tour.md"]
    pages = f"{README}\n{tour}"
    clone, wheel = tmp_path / "clone", tmp_path / "wheel"
    copy_repository(clone)
    wheel.mkdir()
    # What its reader is told to write into these files.
    (clone / "my_losses.py").write_text(next(text for text in blocks("python", README) if "@preference_loss" in text))
    (clone / "mine.yaml").write_text(next(text for text in blocks("yaml", tour) if "my_losses.py" in text))
    write_short_studies(clone)
    [elsewhere] = [block for block in blocks("bash", tour) if "pip install" in block]
    run = [command for command in commands(pages) if not command.startswith(tuple(NOT_RUN))]
    jobs = [(command, wheel if command in elsewhere else clone) for command in run]
    assert len(jobs) > 30
    environment = {**os.environ, "PYTHONPATH": str(clone), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "COLUMNS": "120"}
    for command, place in jobs:
        words = in_python([*shlex.split(command), *flags_for(command)])
        options = {"cwd": place, "env": environment, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(words, **options)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert not [start for start in NOT_RUN if not any(line.startswith(start) for line in commands(pages))]
    report = (clone / "report.html").read_text()
    assert all(name in report for name in ("aot-toy", "dpo-toy", "simpo-toy"))


def in_python(words: list[str]) -> list[str]:
    """The command without the launcher and without what an installed package adds to the path."""
    if words[:2] == ["accelerate", "launch"]:
        at = next(index for index, word in enumerate(words) if word == "-m" or word.startswith("recipes/"))
        words = ["python", *words[at:]]
    elif words[0] == "trl-ext":
        words = ["python", "-m", "trl_ext", *words[1:]]
    assert words[0] == "python"
    return [sys.executable, *words[1:]]


def write_short_studies(folder: Path) -> None:
    """Files for the two commands that run recipes themselves, whose flags are those of the study."""
    words = SHORT.replace("--", "").split()
    given = zip(words[::2], words[1::2], strict=True)
    short = {name: int(value) if value.isdecimal() else value for name, value in given}
    rewards = {"max_steps": 2, "per_device_train_batch_size": 4, "eval_steps": 2, "save_steps": 2}
    own = {"reward_model": rewards, "dpo": short}
    own["grpo"] = {**short, "generation_batch_size": 8, "max_completion_length": 16}
    methods = {name: {"config": f"recipes/configs/toy/{name}.yaml", **given} for name, given in own.items()}
    study = {"reward_model": methods.pop("reward_model"), "methods": methods}
    (folder / "short-compare.yaml").write_text(yaml.safe_dump(study))
    pipeline = yaml.safe_load((folder / "recipes" / "configs" / "toy" / "rlhf.yaml").read_text())
    pipeline |= {"policy_methods": "dpo", "reward_model": rewards, "weak_reward_model": None, "policy": short}
    pipeline["sft"] = {"max_steps": 2, "num_eval_prompts": 4, "num_examples": 64, "generation_eval_every": 0}
    pipeline |= {"num_eval_prompts": 8, "num_samples": 5}
    pipeline.pop("methods", None)
    (folder / "short-rlhf.yaml").write_text(yaml.safe_dump(pipeline))
