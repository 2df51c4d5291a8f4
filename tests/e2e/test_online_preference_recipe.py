"""The recipe of online preference optimisation with replay, from its arguments to its results."""

from __future__ import annotations

import json

import pytest

from tests.support import recipes
from tests.support.files import read_rows

REWARD = """def few(completion_ids, **_):
    return [-float(len(ids)) for ids in completion_ids]
"""


@pytest.mark.slow
def test_run(tmp_path, monkeypatch):
    """Three updates under a reward for brevity: replayed pairs from the second on, and the loss in the results."""
    (tmp_path / "rewards.py").write_text(REWARD)
    config = recipes.RECIPES / "configs" / "toy" / "online_preference_replay.yaml"
    short = ["--max_steps", "3", "--generation_eval_every", "0", "--num_eval_prompts", "8", "--logging_steps", "1"]
    short += ["--per_device_train_batch_size", "16", "--save_strategy", "no", "--config", str(config)]
    rewards = ["--reward_function", f"{tmp_path / 'rewards.py'}:few"]
    recipes.run(monkeypatch, "online_preference", "--output_dir", str(tmp_path / "run"), *rewards, *short)
    described = json.loads((tmp_path / "run" / "results.json").read_text())["run"]
    assert described["objective"].startswith("online dpo (beta 0.1), pairs best_worst, group_size 4")
    assert described["settings"]["replay_weights"] == "length_normalized"
    assert described["sampled_responses"] == 48
    logs = read_rows(tmp_path / "run" / "metrics.jsonl")
    logs = [entry for entry in logs if "loss" in entry]
    assert [entry["replay/fraction"] > 0 for entry in logs] == [False, True, True]
    assert all(0 < entry["replay/ess"] <= 1.0001 for entry in logs)
