"""What must not change an online update: padding, a fault on one process, and where its reward models sit."""

from __future__ import annotations

import logging

import pytest

import trl_ext
from tests.support.reward_adapters import save_adapter
from tests.support.rollout_once import DEFAULTS, FixedRollouts, build, train, train_in_processes
from tests.support.train_once import largest_difference, relative_difference, result
from tests.support.trl_private import rollout_batches
from trl_ext import PolicyConfig

pytestmark = pytest.mark.usefixtures("in_float64", "own_tables")

# Two updates on a rollout of 8 responses, all of which each takes; the second is off-policy, with clipped tokens.
UPDATES = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1, "generation_batch_size": 8}
OBJECTIVES = {
    "sequence_mean": {"epsilon": 0.01},
    "token_mean": {"algorithm": "dapo", "epsilon": 0.01, "epsilon_high": 0.02},
    "constant": {"algorithm": "dr_grpo", "epsilon": 0.01, "beta": 0.1},
    "sum": {"algorithm": "rloo", "beta": 0.1},
    "kl token mean": {"epsilon": 0.01, "beta": 0.2, "kl_aggregation": "token_mean"},
}


@pytest.fixture(scope="module")
def reward_path(policy_path, tmp_path_factory) -> str:
    """A reward model that is an adapter on the policy's base."""
    return save_adapter(policy_path, tmp_path_factory.mktemp("reward-adapter"))


def specification(policy_path: str, objective: dict, rows: int, accumulation: int) -> dict:
    split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    return {"model": policy_path, "perturb": 1, "fixed": True, "args": {**UPDATES, **objective, **split}}


def judged(policy_path: str, reward_path: str, rows: int, **settings) -> dict:
    """An adapter under a reward model that may sit on its backbone, whose weights must then be those on disk."""
    spec = specification(policy_path, {"beta": 0.1, **settings}, rows, 1)
    del spec["perturb"]
    spec["args"]["packing"] = "off"
    return {**spec, "lora": True, "rewards": [reward_path]}


# ---- Several processes ----


@pytest.fixture(scope="module")
def two_processes(policy_path, reward_path, tmp_path_factory) -> dict:
    """Runs in two processes by name, all in one launch."""
    specs = {mode: judged(policy_path, reward_path, 4, share_backbone=mode) for mode in ("auto", "never")}
    fault = specification(policy_path, {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 3}, 4, 1)
    specs["fault"] = {**fault, "fault": "loss_on_the_last_rank"}
    specs["bad reward"] = {**fault, "rewards": ["not_a_number"], "prompts": 4}
    specs["bad reward"]["args"] = {**fault["args"], "num_iterations": 1}
    return dict(zip(specs, train_in_processes(list(specs.values()), 2, tmp_path_factory.mktemp("two")), strict=True))


@pytest.mark.slow
def test_a_fault_on_one_rank_skips_the_update_on_all(policy_path, two_processes, tmp_path):
    """The second update's loss is NaN on the last of two ranks: three steps are what two are without it.

    Adam's moments and its step count are unchanged by the skipped step, so the third step is the second of a run in
    which nothing happens at step two; that run is made here in one process.
    """
    run = two_processes["fault"]
    assert all(p.isfinite().all() for p in run.parameters.values())

    class NothingAtTheSecondStep(FixedRollouts, trl_ext.PolicyTrainer):
        def create_optimizer(self, *args, **kwargs):
            optimizer = super().create_optimizer(*args, **kwargs)
            step = optimizer.step

            def skipping(*arguments, **keywords):
                return None if self.state.global_step == 1 else step(*arguments, **keywords)

            optimizer.step = skipping
            return optimizer

    args = {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 3}
    spec = {**specification(policy_path, args, 8, 1), "fixed": False}
    trainer = train(spec, str(tmp_path), trainer_class=NothingAtTheSecondStep)
    assert relative_difference(run.gradient(policy_path), result(trainer).gradient(policy_path)) < 1e-9


@pytest.mark.slow
def test_a_bad_reward_on_one_rank_skips_the_update_on_all(two_processes, policy_path, tmp_path):
    """Rollouts are of rows 0 and 1, then 2 and 3, then 0 and 1; rewards of row 2, all on the first rank, are NaN."""
    args = {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 3, "num_iterations": 1}
    spec = {**specification(policy_path, args, 8, 1), "rewards": ["not_a_number"], "prompts": 4}
    trainer = train(spec, str(tmp_path))
    assert trainer.update_guard.skipped == {"reward": 1, "loss": 0, "gradient": 0}
    run = two_processes["bad reward"]
    assert relative_difference(run.gradient(policy_path), result(trainer).gradient(policy_path)) < 1e-9


@pytest.mark.slow
def test_a_shared_reward_model_in_two_processes(two_processes, policy_path, reward_path, tmp_path):
    trainer = train(judged(policy_path, reward_path, 8), str(tmp_path))
    assert trainer._reward_models[0].backbone is not None
    expected = result(trainer)
    shared, apart = two_processes["auto"], two_processes["never"]
    assert largest_difference(shared.parameters, apart.parameters) == 0.0
    assert largest_difference(shared.parameters, expected.parameters) < 1e-9
    assert shared.logs[0]["reward"] == pytest.approx(expected.logs[0]["reward"], rel=1e-8)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_leaves_the_update_as_it_is(name, policy_path, tmp_path):
    """Prompts and responses padded to multiples of 32, where the longest response has 8 tokens."""
    objective = OBJECTIVES[name]
    expected = result(train(specification(policy_path, objective, 8, 1), str(tmp_path)))
    trainer = train(specification(policy_path, {**objective, "pad_to_multiple_of": 32}, 8, 1), str(tmp_path))
    assert rollout_batches(trainer)[0]["completion_ids"].shape == (8, 32)
    assert relative_difference(result(trainer).gradient(policy_path), expected.gradient(policy_path)) < 1e-9


# ---- Checkpoints ----

RESUMED = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 4,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
}


@pytest.mark.parametrize(
    "asked, saved, said",
    [(4, 4, False), (8, 8, False), (3, 4, True), (5, 8, True), (9, 12, False)],
)
def test_checkpoints_fall_between_rollouts(asked, saved, said, tmp_path, caplog):
    """A rollout serves 4 updates; where the first checkpoint would come after the end, nothing is said."""
    caplog.set_level(logging.WARNING)
    config = PolicyConfig(**{**DEFAULTS, **RESUMED, "save_steps": asked}, output_dir=str(tmp_path))
    assert config.updates_per_rollout == 4
    assert config.save_steps == saved
    lines = [record.getMessage() for record in caplog.records if "not part of a checkpoint" in record.getMessage()]
    assert len(lines) == said
    if said:
        assert f"saving every {saved} steps instead of every {asked}" in lines[0]


# ---- Where reward models sit ----


@pytest.fixture(scope="module")
def placed(policy_path, reward_path, tmp_path_factory) -> dict:
    """Three updates of an adapter under two reward models, on its backbone and apart from it."""
    second = save_adapter(policy_path, tmp_path_factory.mktemp("second-adapter"), seed=1)
    trainers = {}
    for mode in ("auto", "never"):
        spec = {"model": policy_path, "lora": True, "rewards": [reward_path, second]}
        spec["args"] = {"max_steps": 3, "learning_rate": 0.1, "beta": 0.05, "share_backbone": mode, "packing": "off"}
        spec["args"] |= {"save_strategy": "steps", "save_steps": 3}
        trainers[mode] = train(spec, str(tmp_path_factory.mktemp(mode)))
    return trainers


def test_sharing_the_backbone_changes_nothing(placed):
    shared, apart = (placed[mode] for mode in ("auto", "never"))
    assert all(model.backbone is not None and model.model is None for model in shared._reward_models)
    assert all(model.backbone is None for model in apart._reward_models)
    runs = [result(trainer) for trainer in (shared, apart)]
    assert largest_difference(runs[0].parameters, runs[1].parameters) == 0.0
    for entry, expected in zip(runs[0].logs, runs[1].logs, strict=True):
        rewards = [key for key in entry if key.startswith("reward")]
        assert len(rewards) >= 8
        assert [entry[key] for key in rewards] == pytest.approx([expected[key] for key in rewards], rel=1e-8)
    assert runs[0].logs[2]["reward"] != runs[0].logs[0]["reward"]


def test_the_reward_model_of_a_full_policy_keeps_a_base_of_its_own(policy_path, reward_path, tmp_path, caplog):
    """A fully trained policy's weights do not stay the base's: `auto` says so and loads a copy, `always` refuses."""
    caplog.set_level(logging.WARNING)
    spec = {"model": policy_path, "rewards": [reward_path]}
    trainer = build(spec, str(tmp_path))
    assert trainer._reward_models[0].backbone is None
    assert "the policy is fully fine-tuned" in caplog.text
    spec["args"] = {"share_backbone": "always"}
    with pytest.raises(ValueError, match="cannot sit on the policy's backbone: the policy is fully fine-tuned"):
        build(spec, str(tmp_path))
