"""What must not change an online update: padding, and where its reward models sit; and where checkpoints fall."""

from __future__ import annotations

import pytest

from tests.support.reward_adapters import save_adapter
from tests.support.rollout_once import DEFAULTS, build, train
from tests.support.train_once import largest_difference, relative_difference, result
from tests.support.trl_private import rollout_batches
from trl_ext import PolicyConfig

pytestmark = pytest.mark.usefixtures("in_float64", "own_tables")


@pytest.fixture(scope="module")
def reward_path(policy_path, tmp_path_factory) -> str:
    """A reward model that is an adapter on the policy's base."""
    return save_adapter(policy_path, tmp_path_factory.mktemp("reward-adapter"))


@pytest.mark.parametrize(
    "objective",
    [
        {"epsilon": 0.01, "beta": 0.2, "kl_aggregation": "token_mean"},
        {"algorithm": "dr_grpo", "epsilon": 0.01, "beta": 0.1},
        {"algorithm": "rloo", "beta": 0.1},
    ],
    ids=str,
)
def test_padding_leaves_the_update_as_it_is(objective, policy_path, tmp_path):
    """Prompts and responses padded to multiples of 32, where the longest response has 8 tokens.

    Of two updates on one rollout, the second is off-policy, with clipped tokens.
    """
    updates = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1, **objective}
    spec = {"model": policy_path, "perturb": 1, "fixed": True}
    expected = result(train({**spec, "args": updates}, str(tmp_path)))
    trainer = train({**spec, "args": {**updates, "pad_to_multiple_of": 32}}, str(tmp_path))
    assert rollout_batches(trainer)[0]["completion_ids"].shape == (8, 32)
    assert relative_difference(result(trainer).gradient(policy_path), expected.gradient(policy_path)) < 1e-9


@pytest.mark.parametrize(("asked", "saved"), [(4, 4), (3, 4), (5, 8), (9, 12)])
def test_checkpoints_fall_between_rollouts(asked, saved, tmp_path):
    """A rollout serves 4 updates."""
    rollouts = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 8}
    saving = {"save_strategy": "steps", "save_steps": asked}
    config = PolicyConfig(**{**DEFAULTS, **rollouts, **saving}, output_dir=str(tmp_path))
    assert config.save_steps == saved


def test_sharing_the_backbone_changes_nothing(policy_path, reward_path, tmp_path):
    """Three updates of an adapter under two reward models, on its backbone and apart from it."""
    second, runs = save_adapter(policy_path, tmp_path / "second", seed=1), []
    for mode in ("auto", "never"):
        args = {"max_steps": 3, "learning_rate": 0.1, "beta": 0.05, "share_backbone": mode, "packing": "off"}
        spec = {"model": policy_path, "lora": True, "rewards": [reward_path, second], "args": args}
        trainer = train(spec, str(tmp_path / mode))
        assert all((model.backbone is not None) == (mode == "auto") for model in trainer._reward_models)
        assert all((model.model is None) == (mode == "auto") for model in trainer._reward_models)
        runs.append(result(trainer))
    assert largest_difference(runs[0].parameters, runs[1].parameters) == 0.0
    for entry, expected in zip(runs[0].logs, runs[1].logs, strict=True):
        rewards = [key for key in entry if key.startswith("reward")]
        assert len(rewards) >= 8
        assert [entry[key] for key in rewards] == pytest.approx([expected[key] for key in rewards], rel=1e-8)
    assert runs[0].logs[2]["reward"] != runs[0].logs[0]["reward"]


def test_the_reward_model_of_a_full_policy_keeps_a_base_of_its_own(policy_path, reward_path, tmp_path):
    """A fully trained policy's weights do not stay the base's: `auto` loads a copy, and `always` refuses."""
    spec = {"model": policy_path, "rewards": [reward_path]}
    assert build(spec, str(tmp_path))._reward_models[0].backbone is None
    with pytest.raises(ValueError, match="cannot sit on the policy's backbone: the policy is fully fine-tuned"):
        build({**spec, "args": {"share_backbone": "always"}}, str(tmp_path))


def test_a_checkpoint_within_a_rollout(policy_path, tmp_path):
    """A rollout serves two steps. Resumed after the first, it is sampled again for the second, and then the next."""
    sampled: list[list[str]] = []

    def thirds(prompts, completions, **kwargs):
        sampled.append(prompts)
        return [len(text) % 3 for text in completions]

    def trained(folder: str, **spec):
        sampled.clear()
        args = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": spec.pop("max_steps", 3)}
        train({"model": policy_path, "args": args, **spec}, str(tmp_path / folder), reward_funcs=thirds)
        return list(sampled)

    straight = trained("straight")
    assert len(straight) == 2
    assert trained("resumed", max_steps=1) == straight[:1]
    assert trained("resumed", resume_from_checkpoint=str(tmp_path / "resumed/checkpoint-1")) == straight
