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

WRONG = {
    "num_generations must be at least 2, got 1: a pair takes two": {"num_generations": 1},
    "temperature must be positive, got -1.0": {"temperature": -1.0},
    "missing_eos_penalty must be a number from 0 up, got -1.0": {"missing_eos_penalty": -1.0},
    "max_steps must be at least 1, got 0": {"max_steps": 0},
    "unknown preference loss 'ipoo'; did you mean 'ipo'": {"loss": "ipoo"},
    "pairs must be one of best_worst, all, got 'best'": {"pairs": "best"},
    "tie_tolerance must be a number from 0 up": {"tie_tolerance": -1.0},
    "epsilon is not used by OnlinePreferenceConfig: a preference loss does not read it": {"epsilon": 0.2},
    "mask_truncated_completions is not used .* missing_eos_penalty": {"mask_truncated_completions": True},
    "is the algorithm 'online_preference' and cannot be 'grpo'": {"algorithm": "grpo"},
    "replay_fraction must lie between 0 and 1, got 1": {"replay_capacity": 8, "replay_fraction": 1.0},
    "replay_max_age 1 leaves nothing to replay: .* 2 updates old": {
        "replay_capacity": 8,
        "replay_max_age": 1,
        "num_iterations": 2,
    },
    "replay_weights must be one of none, sequence": {"replay_capacity": 8, "replay_weights": "token"},
    "replay_weight_cap 3.0 needs a replay: set replay_capacity": {"replay_weight_cap": 3.0},
    "replay_fraction 0.3 needs a replay: set replay_capacity": {"replay_fraction": 0.3},
    "replay_weight_cap 3.0 caps nothing with replay_weights none": {"replay_capacity": 8, "replay_weight_cap": 3.0},
    "replay_weight_cap must be at least 1": {"replay_capacity": 8, "replay_weight_cap": 0.5},
    "replay does not go with sync_ref_model": {"replay_capacity": 8, "sync_ref_model": True},
    "gradient_accumulation_steps 2 does not divide the 1 micro-batches": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
    "reads the column 'p'": {"loss": "sppo", "loss_kwargs": {"chosen_win_probability": "p"}},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_configuration(message, tmp_path):
    settings = {"per_device_train_batch_size": 8, "use_cpu": True, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        OnlinePreferenceConfig(str(tmp_path), **settings)


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


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 1.5), ("missing_eos_penalty", -1.0)]
    + [("reward_timeout", -1.0), ("overlong_share", 2.0), ("max_completion_length", 0), ("reward_errors", "ignore")],
)
def test_settings_of_every_policy_are_checked_here_too(name, value, tmp_path):
    with pytest.raises(ValueError, match=name):
        OnlinePreferenceConfig(str(tmp_path), use_cpu=True, **{name: value})
