"""Every recipe that trains: what its run leaves, that its settings read back, and that it resumes to the same end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.support import recipes
from tests.support.recipes import SHORT_PREFERENCE, SHORT_ROLLOUTS, check_run, read, refused, write_rewards
from trl_ext.runs.arguments import toy_config

EVALUATED = ["--num_eval_prompts=8", "--save_steps=2", "--logging_steps=1", "--disable_tqdm=true", "--max_steps=4"]
REWARDED = [*SHORT_ROLLOUTS, "--reward_function=my_rewards.py:known"]
RECIPES = {
    "aot": SHORT_PREFERENCE,
    "kto": SHORT_PREFERENCE,
    "reward_model": ["--max_steps=4", "--eval_steps=2", "--save_steps=2", "--logging_steps=1", "--disable_tqdm=true"],
    "rlhf_sft": [*EVALUATED, "--generation_eval_every=2", "--num_generation_prompts=4"],
    "gspo": REWARDED,
    # The running mean of the rewards is resumed with the run.
    "dr_grpo": [*REWARDED, '--reward_shaping=["center", {"kind": "clip", "limit": 0.25}]'],
    "ppo": [*REWARDED, "--num_generations=1", "--generation_batch_size=8", "--num_iterations=1"],
    "online_preference": REWARDED,
    "sft": [*EVALUATED, "--generation_eval_every=2", "--num_generation_prompts=4"],
    "online_preference_replay": [*REWARDED, f"--config={toy_config('online_preference_replay')}"],
    "grpo_math": [*EVALUATED, "--rollout_batch_size=8", "--train_batch_size=8", "--per_device_train_batch_size=8"]
    + ["--group_size=4", "--eval_every=2", "--num_validation_prompts=4"],
}
COMMON = ["--learning_rate=1e-3", "--save_total_limit=3"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_and_its_resumption(recipe, tmp_path, monkeypatch, capsys):
    """Four steps, and two and two from a checkpoint: the same settings, figures, responses and weights."""
    monkeypatch.chdir(tmp_path)
    write_rewards(tmp_path)
    flags = [*RECIPES[recipe], *COMMON]
    recipes.run(monkeypatch, recipe, *flags, "--output_dir=straight")
    straight, broken = Path("straight"), Path("broken")
    results = check_run(straight, 4)
    printed = capsys.readouterr().out
    assert "in straight: config.yaml, metrics.jsonl" in printed and "{" not in printed, "no dictionaries"
    assert "--resume_from_checkpoint" in refused(monkeypatch, capsys, recipe, *flags, "--output_dir=straight")

    shutil.copytree(straight, broken)
    shutil.rmtree(broken / "checkpoint-4")
    (broken / "results.json").unlink()
    # By the settings that were written.
    settings = ["--config=straight/config.yaml", "--output_dir=broken", "--resume_from_checkpoint"]
    recipes.run(monkeypatch, recipe, *settings)
    # The times differ.
    assert check_run(broken, 4) | {"run": None} == results | {"run": None}
    one, other = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (straight, broken))
    assert one == other | {"output_dir": "straight"}
    one, other = (load_file(folder / "model.safetensors") for folder in (straight, broken))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    rows = "scores.jsonl" if recipe == "reward_model" else "generations.jsonl"
    assert read(straight, rows) == read(broken, rows)
