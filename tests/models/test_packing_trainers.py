"""This library's trainers on packed passes: the updates and metrics of padded ones, on fewer tokens."""

from __future__ import annotations

import logging

import pytest
import torch
import trl
from datasets import Dataset, load_from_disk

from tests.support import reward_once, rollout_once, tiny, train_once
from tests.support.float64 import float32_again
from tests.support.reward_once import lora, rows_with
from tests.support.train_once import largest_difference, relative_difference, result
from tests.support.trl_private import attention_of, rollout_batches
from trl_ext import PolicyConfig, PreferenceConfig, RewardConfig
from trl_ext.models import packing_of
from trl_ext.trainers.packing import keeps_groups, regroup

pytestmark = pytest.mark.usefixtures("in_float64", "own_tables")

STEPS = {"max_steps": 4, "learning_rate": 0.1}
PREFERENCE = {
    "full": {},
    "lora": {"lora": True},
    "lora given": {"lora": "given"},
    # Where the reference is the policy itself, rounding decides which pairs are in order.
    "precomputed": {"reference_seed": 1, "args": {"precompute_ref_log_probs": True}},
    "aot over a window": {"args": {"loss": "aot", "gradient_accumulation_steps": 2}, "reference_seed": 1},
    "reference free": {"args": {"loss": "simpo"}},
    "checkpointing": {"lora": True, "args": {"gradient_checkpointing": True}},
    "wpo": {"args": {"weighting": ["wpo"]}, "reference_seed": 1},
}


def numbers(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if isinstance(value, float) and not key.endswith("time")}


def assert_same_training(packed, padded, bound: float = 1e-9) -> None:
    assert largest_difference(packed.parameters, padded.parameters) < bound
    for own, expected in zip(packed.logs, padded.logs, strict=True):
        assert numbers(own) == pytest.approx(numbers(expected), rel=100 * bound, abs=10 * bound)


@pytest.mark.parametrize("setup", PREFERENCE)
def test_preference(setup, tiny_model_path, tmp_path):
    spec = {"model": tiny_model_path, "pairs": 16, **PREFERENCE[setup]}
    runs = {}
    for packing in ("auto", "off"):
        args = {**STEPS, "precompute_ref_log_probs": False, **spec.get("args", {}), "packing": packing}
        trainer = train_once.train({**spec, "args": args}, str(tmp_path / packing))
        runs[packing] = result(trainer)
        if packing == "auto":
            assert trainer.packing.active and trainer.packing.packed_tokens < 0.7 * trainer.packing.padded_tokens
        else:
            assert trainer.packing is None and packing_of(trainer.model) is None
    # Values of the reference are kept in float32.
    assert_same_training(runs["auto"], runs["off"], bound=1e-6 if setup == "precomputed" else 1e-9)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@float32_again()
def test_reward(adapter, tiny_model_path, tmp_path):
    rows = rows_with(16, margin=lambda row: row["avg_confidence"])
    runs = []
    for packing in ("auto", "off"):
        trainer = reward_once.train(
            tiny_model_path,
            tmp_path / packing,
            rows,
            packing=packing,
            peft_config=lora() if adapter else None,
            **{**STEPS, "learning_rate": 0.05},
        )
        scores = torch.cat(trainer.score_pairs(trainer.train_dataset))
        runs.append((result(trainer), scores, trainer.packing))
    (packed, scores, packing), (padded, expected, off) = runs
    assert_same_training(packed, padded, bound=1e-6)
    assert (scores - expected).abs().max() < 1e-5
    assert off is None and packing.packed_tokens < 0.7 * packing.padded_tokens


# ---- Policy ----


POLICY = {
    "grpo": {"epsilon": 0.01, "beta": 0.05},
    "dr_grpo": {"algorithm": "dr_grpo", "epsilon": 0.01},
    "gspo": {"algorithm": "gspo", "epsilon": 0.001, "epsilon_high": 0.002},
    "rloo": {"algorithm": "rloo", "beta": 0.1},
    "token mean": {"algorithm": "dapo", "epsilon": 0.01, "epsilon_high": 0.02},
}


def policy(policy_path: str, folder, **args):
    """Two updates on one rollout of 16 responses in 4 micro-batches; the second is off-policy."""
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "generation_batch_size": 16}
    args = {**split, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.1, **args}
    trainer = rollout_once.train({"model": policy_path, "perturb": 1, "fixed": True, "args": args}, str(folder))
    return trainer, result(trainer)


@pytest.mark.parametrize("name", POLICY)
def test_policy(name, policy_path, tmp_path):
    padded, expected = policy(policy_path, tmp_path / "off", **POLICY[name], packing="off")
    dealt, run = policy(policy_path, tmp_path / "dealt", **POLICY[name], keep_groups="off")
    whole, grouped = policy(policy_path, tmp_path / "whole", **POLICY[name])
    assert padded.packing is None and not keeps_groups(padded)
    assert not keeps_groups(dealt) and keeps_groups(whole)
    update = expected.gradient(policy_path)
    assert update.norm() > 0.01
    assert relative_difference(run.gradient(policy_path), update) < 1e-9
    assert relative_difference(grouped.gradient(policy_path), update) < 1e-9
    assert run.losses == pytest.approx(expected.losses, rel=1e-8, abs=1e-9)
    for entry, other in zip(run.logs, expected.logs, strict=True):
        for key in ("kl", "entropy", "clip_ratio/region_mean", "reward"):
            value = other.get(key)
            assert entry.get(key) == (None if value is None else pytest.approx(value, rel=1e-8, abs=1e-9)), key
    assert whole.packing.packed_tokens < dealt.packing.packed_tokens < dealt.packing.padded_tokens


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        ({}, True),
        ({"keep_groups": "off"}, False),
        # A loss of one's own may compare the responses of a micro-batch.
        ({"algorithm": f"{rollout_once.OWN_RECIPES}/kl_cov.py:kl_cov"}, False),
        ({"packing": "off"}, False),
        ({"packing": "off", "keep_groups": "on"}, True),
        # Two optimizer steps to a rollout: which responses each sees would change.
        ({"gradient_accumulation_steps": 2}, False),
        ({"gradient_accumulation_steps": 2, "keep_groups": "on"}, True),
        # Averaged within micro-batches.
        ({"entropy_coef": 0.1}, False),
        ({"top_entropy_quantile": 0.5}, False),
    ],
)
def test_when_groups_are_kept_whole(args, kept, policy_path, tmp_path):
    args = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "generation_batch_size": 16,
        "max_steps": 1,
        **args,
    }
    trainer = rollout_once.build({"model": policy_path, "args": args}, str(tmp_path))
    assert keeps_groups(trainer) == kept
    trainer.train()
    groups = [batch["group"].tolist() for batch in rollout_batches(trainer)]
    assert sorted(sum(groups, [])) == [group for group in range(4) for _ in range(4)]
    assert all(len(set(batch)) == 1 for batch in groups) == kept


def test_regroup_by_hand():
    """Rows 0 to 5 of groups 1 0 1 | 2 0 2 become 1 1 0 | 0 2 2: rows 0 2 1 | 4 3 5."""
    batches = [
        {"group": torch.tensor([1, 0, 1]), "text": ["a", "b", "c"], "count": torch.tensor(6), "none": None},
        {"group": torch.tensor([2, 0, 2]), "text": ["d", "e", "f"], "count": torch.tensor(6), "none": None},
    ]
    first, second = regroup(batches, "group")
    assert first["group"].tolist() == [1, 1, 0] and second["group"].tolist() == [0, 2, 2]
    assert first["text"] == ["a", "c", "b"] and second["text"] == ["e", "d", "f"]
    assert first["count"] == 6 and second["none"] is None


# ---- Settings ----


@pytest.mark.parametrize("config", [PreferenceConfig, RewardConfig, PolicyConfig])
def test_unknown_setting(config, tmp_path):
    with pytest.raises(ValueError, match="packing must be one of auto, off, got 'of'; did you mean 'off'"):
        config(output_dir=str(tmp_path), packing="of")


def test_one_line_at_start(tiny_model_path, tmp_path, caplog):
    def lines():
        return [record.message for record in caplog.records if record.message.startswith("packing: ")]

    with caplog.at_level(logging.WARNING):
        train_once.train({"model": tiny_model_path, "args": {"max_steps": 2}}, str(tmp_path / "on"))
        assert len(lines()) == 1 and "on, without padding and with common prefixes encoded once" in lines()[0]
        caplog.clear()
        train_once.train({"model": tiny_model_path, "args": {"packing": "off"}}, str(tmp_path / "off"))
        assert lines() == ["packing: off, rows are padded: as asked"]


def test_a_reward_trainer_takes_an_earlier_hook_off(tiny_model_path, tmp_path):
    trainer = reward_once.build(tiny_model_path, tmp_path / "first")
    model, forward = trainer.model, type(trainer.model).forward
    assert model.forward.__func__ is not forward
    reward_once.build(model, tmp_path / "second", packing="off")
    assert model.forward.__func__ is forward and attention_of(model) == "sdpa"


def test_dropout_of_an_adapter_keeps_rows_apart(tiny_model_path, tmp_path):
    """With dropout each row draws its own: padding is left out, prefixes are encoded for each row."""
    options = {"lora": True, "lora_dropout": 0.5}
    args = {"max_steps": 2, "disable_dropout": False, "loss": "simpo"}
    dropping = train_once.train({"model": tiny_model_path, **options, "args": args}, str(tmp_path / "a")).packing
    args["disable_dropout"] = True
    sharing = train_once.train({"model": tiny_model_path, **options, "args": args}, str(tmp_path / "b")).packing
    assert dropping.padded_tokens == sharing.padded_tokens
    assert sharing.packed_tokens < dropping.packed_tokens < dropping.padded_tokens


# ---- Reference log-probabilities once ----


@pytest.mark.parametrize(
    ("args", "precomputed"),
    [
        ({"num_train_epochs": 1, "max_steps": -1}, False),
        ({"num_train_epochs": 2, "max_steps": -1}, True),
        # 8 pairs, 2 to a step.
        ({"max_steps": 4}, False),
        ({"max_steps": 5}, True),
        ({"max_steps": 5, "precompute_ref_log_probs": False}, False),
        ({"max_steps": 5, "sync_ref_model": True}, False),
        ({"max_steps": 5, "loss": "simpo"}, False),
    ],
)
def test_when_they_are_precomputed(args, precomputed, tiny_model_path, tmp_path):
    configuration = dict(args)
    # TRL moves no reference towards an adapter.
    spec = {"model": tiny_model_path, "args": args, "lora": "sync_ref_model" not in args}
    trainer = train_once.build(spec, str(tmp_path))
    assert trainer.precompute_ref_logps == precomputed
    assert ("ref_chosen_logps" in trainer.train_dataset.column_names) == precomputed
    # The configuration stays as it was given: it may be used for other data.
    assert trainer.args.precompute_ref_log_probs == configuration.get("precompute_ref_log_probs")


@float32_again()
def test_they_come_from_the_cache_the_second_time(tiny_model_path, tmp_path, monkeypatch):
    """Of pairs on disk; other pairs, another model and padded passes are other values."""
    passes = []
    stock = trl.DPOTrainer.compute_ref_log_probs
    monkeypatch.setattr(trl.DPOTrainer, "compute_ref_log_probs", lambda *args: passes.append(1) or stock(*args))
    for seed in (0, 1):
        Dataset.from_list(tiny.pairs(8, seed=seed)).save_to_disk(tmp_path / f"pairs-{seed}")

    def values(name: str, data: int = 0, **spec) -> tuple[bool, list]:
        """Whether a trainer makes passes, and its reference log-probabilities."""
        passes.clear()
        spec = {"model": tiny_model_path, "dtype": "float32", "reference_seed": 1, **spec}
        spec["args"] = {"max_steps": 8, **spec.get("args", {})}
        pairs = load_from_disk(tmp_path / f"pairs-{data}")
        dataset = train_once.build(spec, str(tmp_path / name), train_dataset=pairs).train_dataset
        return bool(passes), [dataset[f"ref_{side}_logps"] for side in ("chosen", "rejected")]

    computed, found = values("first")
    assert computed and values("second") == (False, found)
    for name, spec in {"pairs": {"data": 1}, "model": {"reference_seed": 3}}.items():
        computed, others = values(name, **spec)
        assert computed and others != found
    assert values("padded", args={"packing": "off"})[0]
