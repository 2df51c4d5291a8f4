"""Trainers on packed passes, this library's and TRL's: the updates and metrics of padded ones, on fewer tokens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import trl
from datasets import Dataset, load_from_disk

from tests.support import rollout_once, tiny, train_once
from tests.support.float64 import float32_again
from tests.support.train_once import largest_difference, parameters, result
from tests.support.trl_private import rollout_batches
from trl_ext.models import packing_of, share_prefixes
from trl_ext.trainers.packing import keeps_groups, regroup
from trl_ext.trainers.preference.trainer import reference_key

pytestmark = pytest.mark.usefixtures("in_float64", "own_tables")

STEPS = {"max_steps": 4, "learning_rate": 0.1}
# Two updates on one rollout of 16 responses in 4 micro-batches; the second is off-policy.
SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "generation_batch_size": 16}
SPLIT |= {"num_iterations": 2, "max_steps": 2}
LABELLED = [
    {"row_id": row["row_id"], "prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in tiny.pairs(4)
    for side in ("chosen", "rejected")
]
# TRL's trainer passes the column on, which no model reads.
SCORED = {"dtype": "float32", "rows": [{**row, "margin": row["avg_confidence"]} for row in tiny.pairs(16)]}
PRECOMPUTED = {"args": {"precompute_ref_log_probs": True}}
ACCUMULATED = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}


def policy(algorithm: str | None = None, **args) -> dict:
    args = args if algorithm is None else {"algorithm": algorithm, **args}
    return {"trainer": "PolicyTrainer", "args": {**SPLIT, "learning_rate": 0.1, **args}}


TRAINERS = {
    "preference": {},
    "preference, new adapter": {"lora": True},
    "preference, adapter given": {"lora": "given"},
    # Where the reference is the policy itself, rounding decides which pairs are in order.
    "preference, precomputed": {"reference_seed": 1, **PRECOMPUTED},
    "AOT over a window": {"reference_seed": 1, "args": {"loss": "aot", "gradient_accumulation_steps": 2}},
    "SimPO": {"args": {"loss": "simpo"}},
    "preference, checkpointing": {"lora": True, "args": {"gradient_checkpointing": True}},
    "WPO": {"reference_seed": 1, "args": {"weighting": ["wpo"]}},
    "SFT": {"trainer": "SFTTrainer", "rows": [{**row, "chosen": row["completion"]} for row in LABELLED]},
    "reward": {"trainer": "RewardTrainer", **SCORED},
    "reward, adapter": {"trainer": "RewardTrainer", "lora": True, **SCORED, "args": {"learning_rate": 0.05}},
    "GRPO": policy(epsilon=0.01, beta=0.05),
    "Dr. GRPO": policy("dr_grpo", epsilon=0.01),
    "RLOO": policy("rloo", beta=0.1),
    "DAPO": policy("dapo", epsilon=0.01, epsilon_high=0.02),
    "trl.DPO": {"trainer": "trl.DPOTrainer", "reference_seed": 1, "args": ACCUMULATED},
    "trl.DPO, adapter": {"trainer": "trl.DPOTrainer", "lora": True},
    "trl.DPO, precomputed": {"trainer": "trl.DPOTrainer", "reference_seed": 1, **PRECOMPUTED},
    "trl.KTO": {"trainer": "trl.KTOTrainer", "reference_seed": 1, "rows": LABELLED},
    "trl.GRPO": {**policy(epsilon=0.01, beta=0.1), "trainer": "trl.GRPOTrainer"},
    "trl.RLOO": {**policy(epsilon=0.01, beta=0.1), "trainer": "trl.RLOOTrainer", "fixed": False},
    "trl.Reward": {"trainer": "trl.RewardTrainer", **SCORED},
    "trl.Reward, adapter": {"trainer": "trl.RewardTrainer", "lora": True, **SCORED, "args": {"learning_rate": 0.05}},
}


def numbers(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if isinstance(value, float) and not key.endswith("time")}


@pytest.mark.parametrize("name", TRAINERS)
def test_updates_and_metrics_are_those_of_padded_passes(name, tiny_model_path, policy_path, tmp_path):
    """Of gradient descent at a rate of 0.1, in float64 but for reward models, with every step packed.

    A policy's loss is the same whatever the log-probabilities are where it is taken at ratio 1; its gradient norm,
    which is compared with all else, is not.
    """
    spec, stock = TRAINERS[name], name.startswith("trl.")
    is_policy, is_reward = "generation_batch_size" in spec.get("args", {}), "RewardTrainer" in spec.get("trainer", "")
    if is_policy:
        spec = {"model": policy_path, "perturb": 1, "fixed": True, **spec}
    else:
        spec = {"model": tiny_model_path, "pairs": 16, **spec, "args": {**STEPS, **spec.get("args", {})}}
    # In float32 are reward models, and values of a reference that are kept.
    bound = 1e-6 if is_reward or "precomputed" in name else 1e-9

    def run(packed: bool, **args):
        folder = str(tmp_path / f"{packed} {args}")
        own = {} if stock else {"packing": "auto" if packed else "off"}
        own = {"share_prefixes": packed} if name == "SFT" else own
        trainer = train_once.build({**spec, "args": {**spec["args"], **own, **args}}, folder)
        if stock and packed:
            share_prefixes(trainer.model, getattr(trainer, "ref_model", None))
        initial = parameters(trainer)
        trainer.train()
        trained = result(trainer)
        moved = largest_difference(trained.parameters, initial)
        if is_reward and not stock:
            trained.parameters["scores"] = torch.cat(trainer.score_pairs(trainer.train_dataset))
        return trainer, moved, trained

    with float32_again() if is_reward else nullcontext():
        padded, moved, expected = run(packed=False)
        # With the responses to a prompt apart as in padded passes, and together.
        variants = [{"keep_groups": "off"}, {}] if is_policy and not stock else [{}]
        runs = [run(packed=True, **args) for args in variants]
    assert packing_of(padded.model) is None and moved > 1e-3
    assert all(entry["grad_norm"] > 1e-3 for entry in expected.logs)
    for trainer, _, got in runs:
        packing = packing_of(trainer.model)
        assert packing.active and not packing.left_padded, packing.left_padded
        assert 0 < packing.packed_tokens < 0.7 * packing.padded_tokens
        # Stock TRL has computed the kept values of a reference before its passes are packed.
        packed_later = getattr(trainer, "ref_model", None) is not None and name != "trl.DPO, precomputed"
        reference = packing_of(trainer.ref_model) if packed_later else packing
        assert reference.active and reference.packed_tokens > 0 and not reference.left_padded
        assert largest_difference(got.parameters, expected.parameters) < bound
        assert [entry.keys() for entry in got.logs] == [entry.keys() for entry in expected.logs]
        for entry, other in zip(got.logs, expected.logs, strict=True):
            assert numbers(entry) == pytest.approx(numbers(other), rel=100 * bound, abs=10 * bound)


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
    args = {**SPLIT, "num_iterations": 1, "max_steps": 1, **args}
    trainer = rollout_once.build({"model": policy_path, "args": args}, str(tmp_path))
    assert keeps_groups(trainer) == kept
    trainer.train()
    groups = [batch["group"].tolist() for batch in rollout_batches(trainer)]
    assert sorted(sum(groups, [])) == [group for group in range(4) for _ in range(4)]
    assert all(len(set(batch)) == 1 for batch in groups) == kept


def test_regroup_by_hand():
    """Rows 0 to 5 of groups 1 0 1 | 2 0 2 become 1 1 0 | 0 2 2: rows 0 2 1 | 4 3 5."""
    batches = [
        {"group": torch.tensor([1, 0, 1]), "count": torch.tensor(6), "none": None},
        {"group": torch.tensor([2, 0, 2]), "count": torch.tensor(6), "none": None},
    ]
    first, second = regroup(batches)
    assert first["group"].tolist() == [1, 1, 0] and second["group"].tolist() == [0, 2, 2]
    assert first["count"] == 6 and second["none"] is None


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
    # TRL moves no reference towards an adapter.
    spec = {"model": tiny_model_path, "args": args, "lora": "sync_ref_model" not in args}
    trainer = train_once.build(spec, str(tmp_path))
    assert ("ref_chosen_logps" in trainer.train_dataset.column_names) == precomputed
    # The configuration stays as it was given: it may be used for other data.
    assert trainer.args.precompute_ref_log_probs == args.get("precompute_ref_log_probs")


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


def test_the_key_of_the_reference_holds_its_configuration(tiny_model_path, tmp_path):
    """The same weights with other rotary angles, packed and padded, or in mixed precision are other references."""

    def trainer(name: str, **spec):
        args = {"precompute_ref_log_probs": True, **spec.get("args", {})}
        return train_once.build({"model": tiny_model_path, "args": args}, str(tmp_path / name))

    plain = trainer("plain")
    key = reference_key(plain)
    assert reference_key(trainer("again")) == key
    assert reference_key(trainer("padded", args={"packing": "off"})) != key
    assert reference_key(trainer("mixed", args={"bf16": True})) != key
    plain.model.config.rope_parameters = {**plain.model.config.rope_parameters, "rope_theta": 100.0}
    assert reference_key(plain) != key
