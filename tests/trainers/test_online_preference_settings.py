"""`OnlinePreferenceTrainer` across a resumption, and the settings that it refuses."""

from __future__ import annotations

import pytest

from tests.support.rollout_once import REPLAY, online_preference_specification, train
from tests.support.train_once import largest_difference, parameters, result
from trl_ext import OnlinePreferenceConfig
from trl_ext.trainers.online_preference.trainer import REPLAY_FILE

pytestmark = pytest.mark.usefixtures("in_float64")


# ---- Resumption ----


def replaying(policy_path: str, folder, **args) -> dict:
    settings = {"max_steps": 4, "learning_rate": 0.02, "save_strategy": "steps", "save_steps": 2, **REPLAY}
    return online_preference_specification(
        policy_path, replay_weights="sequence", **{**settings, **args}, output_dir=str(folder)
    )


def test_resumes_as_it_would_have_gone_on(policy_path, tmp_path):
    """Sampled, not fixed responses: replay, random state and all are those of the run that was not interrupted."""
    spec = {**replaying(policy_path, tmp_path), "fixed": False, "prompts": 16}
    straight = train(spec, str(tmp_path))
    resumed = train({**spec, "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}, str(tmp_path))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0
    assert list(map(repr, resumed.replay.pairs)) == list(map(repr, straight.replay.pairs))
    assert {pair.version for pair in resumed.replay.pairs} == {1, 2, 3}
    names = [key for key in result(straight).logs[3] if key.startswith(("pairs/", "replay/", "rewards/"))]
    assert len(names) > 10
    for key in names:
        assert result(resumed).logs[3][key] == result(straight).logs[3][key], key


def test_pairs_that_other_rewards_labelled_are_left_out(policy_path, tmp_path, caplog):
    spec = replaying(policy_path, tmp_path)
    train({**spec, "args": {**spec["args"], "max_steps": 2}}, str(tmp_path))
    assert (tmp_path / "checkpoint-2" / REPLAY_FILE).is_file()
    other = {**spec, "rewards": ["evens"], "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    resumed = train({**other, "args": {**spec["args"], "max_steps": 3}}, str(tmp_path))
    assert "8 of 8 replayed pairs were labelled by other rewards" in caplog.text
    assert {pair.reward_version for pair in resumed.replay.pairs} == {"1 evens"}


# ---- What is refused ----


def test_wrong_trainer_arguments(policy_path, tmp_path):
    with pytest.raises(ValueError, match="no reward function"):
        train(online_preference_specification(policy_path), str(tmp_path), reward_funcs=None)


def test_description():
    args = OnlinePreferenceConfig("unused", loss="ipo", per_device_train_batch_size=8, use_cpu=True)
    objective = args.build_objective()
    assert objective.describe().startswith("online ipo (beta 0.1, length_normalized False), pairs best_worst")
    assert objective.to_dict()["loss"] == "ipo"
    assert args.beta == 0.1
    assert OnlinePreferenceConfig("unused", loss="simpo", per_device_train_batch_size=8, use_cpu=True).beta == 2.0
