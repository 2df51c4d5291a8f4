"""The commands of the README and then of the tour run in order in a fresh folder: each finds what it needs.

The folder holds a copy of the repository without anything that was made in it. Each command runs as it stands there,
with flags that cut it short. Every one has a process of its own; these are forked from one that has imported the
libraries, in the place of `accelerate launch` and its import of the same, which `tests/docs/test_readme.py` parses and
other tests run.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
import traceback
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
    "accelerate launch recipes/aot.py --config recipes/configs/wildchat/": "needs the course's data and Qwen",
    "accelerate launch --config_file accelerate_configs/multi_gpu.yaml": "needs GPUs",
}
STEPS = "--max_steps 2 --per_device_train_batch_size 4"
SHORT = f"{STEPS} --num_eval_prompts 4 --generation_eval_every 0 --eval_strategy no --save_strategy no"
ROLLOUT = "--generation_batch_size 8 --max_completion_length 16"
# What cuts a command short, by how it begins or by the recipe's name; the first that fits.
FLAGS = {
    "trl-ext train --list": "",
    "expert_iteration": "--n_steps 1 --questions_per_step 32 --num_validation_prompts 4 --num_eval_prompts 8",
    "evaluate_math": "--num_eval_prompts 8",
    "best_of_n": "--num_prompts 4 --n 1 2",
    "sft": f"{STEPS} --num_eval_prompts 8 --generation_eval_every 0 --num_examples 64 --save_strategy no",
    "grpo_math": "--max_steps 2 --num_validation_prompts 4 --num_eval_prompts 8 --save_strategy no",
    "reward_model": f"{STEPS} --eval_steps 2 --save_steps 2",
    "ppo": f"{SHORT} {ROLLOUT}",
    "online_preference": f"{SHORT} --generation_batch_size 8",
    "policy": f"{SHORT} --generation_batch_size 16 --max_completion_length 16",
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
    jobs = [
        {"command": command, "words": [*shlex.split(command), *flags_for(command)], "folder": str(place)}
        for command in commands(pages)
        if not command.startswith(tuple(NOT_RUN))
        for place in [wheel if command in elsewhere else clone]
    ]
    assert len(jobs) > 30
    (tmp_path / "jobs.json").write_text(json.dumps({"clone": str(clone), "jobs": jobs}))
    environment = {**os.environ, "PYTHONPATH": str(clone), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "jobs.json")],
        env={**environment, "ACCELERATE_USE_CPU": "true", "COLUMNS": "120"},
        cwd=clone,
        # Only a conversation reads it.
        input="List three vehicles. Use semicolons.\n",
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert not [start for start in NOT_RUN if not any(line.startswith(start) for line in commands(pages))]
    (talk,) = [
        number for number, job in enumerate(jobs) if job["command"] == "trl-ext chat runs/aot-toy --single_turn"
    ]
    assert (tmp_path / f"{talk:02d}.log").read_text().count("boat; wagon; ferry") == 2, "two updates change no word"
    report = (clone / "report.html").read_text()
    assert all(name in report for name in ("aot-toy", "dpo-toy", "simpo-toy"))


def write_short_studies(folder: Path) -> None:
    """Files for the two commands that run recipes themselves, whose flags are those of the study."""
    words = SHORT.replace("--", "").split()
    short = {
        name: int(value) if value.isdecimal() else value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    rewards = {"max_steps": 2, "per_device_train_batch_size": 4, "eval_steps": 2, "save_steps": 2}
    methods = {
        "dpo": {"config": "recipes/configs/toy/dpo.yaml", **short},
        "grpo": {
            "config": "recipes/configs/toy/grpo.yaml",
            **short,
            "generation_batch_size": 8,
            "max_completion_length": 16,
        },
    }
    study = {"reward_model": {"config": "recipes/configs/toy/reward_model.yaml", **rewards}, "methods": methods}
    (folder / "short-compare.yaml").write_text(yaml.safe_dump(study))
    pipeline = yaml.safe_load((folder / "recipes" / "configs" / "toy" / "rlhf.yaml").read_text())
    pipeline |= {
        "policy_methods": "dpo",
        "sft": {"max_steps": 2, "num_eval_prompts": 4, "num_examples": 64, "generation_eval_every": 0},
        "reward_model": rewards,
        "weak_reward_model": None,
        "policy": short,
        "num_eval_prompts": 8,
        "num_samples": 5,
    }
    pipeline.pop("methods", None)
    (folder / "short-rlhf.yaml").write_text(yaml.safe_dump(pipeline))


def run_all(path: str) -> int:
    """Run the jobs of a file one after another, each in a fork of this process; 1 at the first that fails."""
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer  # noqa: F401

    given = json.loads(Path(path).read_text())
    for number, job in enumerate(given["jobs"]):
        log = Path(path).with_name(f"{number:02d}.log")
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(_run(job, given["clone"], log))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{code} after {time.monotonic() - begun:.1f} s: {shlex.join(job['words'])}", flush=True)
        if code:
            print(log.read_text()[-4000:])
            return 1
    return 0


def _run(job: dict, clone: str, log: Path) -> int:
    os.chdir(job["folder"])
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    words = job["words"]
    if words[:2] == ["accelerate", "launch"]:
        at = next(index for index, word in enumerate(words) if word == "-m" or word.startswith("recipes/"))
        words = ["python", *words[at:]]
    elif words[0] == "trl-ext":
        words = ["python", "-m", "trl_ext", *words[1:]]
    assert words.pop(0) == "python"
    sys.path[0] = clone
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        import trl_ext

        assert Path(trl_ext.__file__).is_relative_to(clone)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_all(sys.argv[1]))
