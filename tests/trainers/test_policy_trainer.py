"""`PolicyTrainer` against TRL's own trainers, where both can do the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import trl
from safetensors.torch import load_file

from tests.support.rollout_once import DEFAULTS, build, thirds, train
from tests.support.train_once import relative_difference, result

pytestmark = pytest.mark.usefixtures("in_float64")


# ---- Equality with stock ----

# TRL's conventions, which an algorithm's row can be overridden with.
STOCK = {"std_ddof": 1, "advantage_eps": 1e-4}
KL = {"beta": 0.05, "kl_ratio_correction": True}
# With the random numbers of stock trainers, whose responses transformers samples.
SAME_SAMPLES = {"keep_groups": "off", "fast_rollouts": "off"}
# Each rollout serves four updates: two of its halves, twice. At epsilon 0.001 most tokens are clipped from the second.
OFF_POLICY = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 8,
    "learning_rate": 0.1,
    "epsilon": 1e-3,
}
# The same with both halves in one update, so that TRL's rescaled token count is that of the update.
IN_ONE_UPDATE = {"gradient_accumulation_steps": 2, "max_steps": 4}
ALIGNED = {**OFF_POLICY, **IN_ONE_UPDATE}
PLAIN_GRPO = {"loss_type": "grpo", "beta": 0.0}
GRPO_WITH_KL = {"loss_type": "grpo", "beta": 0.05}
# Off-policy by the learning rate alone.
UNCLIPPED = {name: value for name, value in OFF_POLICY.items() if name != "epsilon"}
BY_SEQUENCE = {"importance_sampling_level": "sequence"}

# name -> (settings of both, of ours, of TRL's, further keys of the specification)
EQUAL = {
    "grpo": (OFF_POLICY, {**STOCK, **KL}, GRPO_WITH_KL, {}),
    "grpo, plain kl": (OFF_POLICY, {**STOCK, "beta": 0.05}, {**GRPO_WITH_KL, "use_bias_correction_kl": False}, {}),
    "dr_grpo": (
        OFF_POLICY, {"algorithm": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}, {},
    ),
    "gspo": (
        {**OFF_POLICY, "epsilon": 1e-4, "epsilon_high": 2e-4},
        {"algorithm": "gspo", **STOCK, **KL}, {**GRPO_WITH_KL, **BY_SEQUENCE}, {},
    ),
    "dapo": ({**ALIGNED, "epsilon_high": 2e-3}, {"algorithm": "dapo", **STOCK}, {"beta": 0.0}, {}),
    # Said to both in TRL's words.
    "dapo, kl, by TRL's names": (
        {**ALIGNED, "epsilon_high": 2e-3, "delta": 1.003, "loss_type": "dapo", "scale_rewards": "batch", "beta": 0.05}
        | {"use_bias_correction_kl": True},
        {}, {}, {},
    ),
    "luspo": (
        {**OFF_POLICY, "epsilon": 1e-4, "loss_type": "luspo", **BY_SEQUENCE, "scale_rewards": "none", "beta": 0.0},
        {}, {}, {},
    ),
    # With a gate so narrow that it shows.
    "sapo": (
        {**UNCLIPPED, "loss_type": "sapo", "beta": 0.0, "scale_rewards": "group"},
        {"algorithm_kwargs": {"temperature_pos": 20.0, "temperature_neg": 30.0}},
        {"sapo_temperature_pos": 20.0, "sapo_temperature_neg": 30.0}, {},
    ),
    # Padded: of ratios that are 1 up to rounding, a cap at 1 counts those that rounding puts above.
    "cispo": (
        {**UNCLIPPED, **IN_ONE_UPDATE, "loss_type": "cispo", "epsilon_high": 1.0, "scale_rewards": "group"}
        | {"beta": 0.0},
        {"packing": "off"}, {}, {},
    ),
    "grpo, adapter": (OFF_POLICY, {**STOCK, **KL}, GRPO_WITH_KL, {"lora": True}),
    "top entropy": ({**OFF_POLICY, "top_entropy_quantile": 0.4}, {**STOCK, **KL}, GRPO_WITH_KL, {}),
    "reference follows": (
        {**OFF_POLICY, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
        {**STOCK, **KL}, GRPO_WITH_KL, {},
    ),
    "two rewards": (
        {**OFF_POLICY, "reward_weights": [1.0, 0.3], "temperature": 0.7, "learning_rate": 0.02},
        {**STOCK, "beta": 0.0}, PLAIN_GRPO, {"rewards": ["thirds", "evens"]},
    ),
}  # fmt: skip
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 5.2, "entropy_coef_delta": 0.05}
EQUAL |= {
    name: ({**OFF_POLICY, **options}, {**STOCK, "beta": 0.0}, PLAIN_GRPO, {})
    for name, options in {
        "entropy bonus": {"entropy_coef": 0.1},
        "adaptive entropy": {"entropy_coef": 0.1, **ADAPTIVE},
        "entropy bonus on top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.1},
        "truncated masked": {"mask_truncated_completions": True, "learning_rate": 0.02},
        "off-policy mask": {"off_policy_mask_threshold": 0.01},
    }.items()
}


def update(run, policy_path: str):
    """How far training moved the parameters; an adapter's own values."""
    initial = load_file(Path(policy_path) / "model.safetensors")
    return torch.cat([(p - initial.get(n, 0)).flatten() for n, p in sorted(run.parameters.items())]).double()


@pytest.mark.parametrize("name", EQUAL)
def test_equals_stock(name, policy_path, tmp_path):
    """Same seed, same rollouts, same updates: TRL's own objective, selected by name, and our metrics hold TRL's."""
    both, own, stock, further = EQUAL[name]
    spec = {"model": policy_path, "perturb": 1, **further}
    ours = result(train({**spec, "args": {**both, **own, **SAME_SAMPLES}}, str(tmp_path / "ours")))
    expected = result(
        train({**spec, "trainer": "trl.GRPOTrainer", "args": {**both, **stock}}, str(tmp_path / "stock"))
    )
    assert relative_difference(update(ours, policy_path), update(expected, policy_path)) < 1e-9
    assert ours.losses == pytest.approx(expected.losses, rel=1e-8, abs=1e-9)
    corrected = own.get("kl_ratio_correction") or both.get("use_bias_correction_kl")
    averaged = set()
    if both.get("gradient_accumulation_steps", 1) > 1:
        # Over a step's tokens here, and means of its micro-batches' means with TRL.
        averaged = {
            "kl",
            "entropy",
            *(key for key in expected.logs[0] if key.startswith(("clip_ratio", "cispo"))),
        }
    for own_entry, entry in zip(ours.logs, expected.logs, strict=True):
        for key in entry.keys() - {"step_time"} - ({"kl"} if corrected else set()) - averaged:
            # None where a mean has nothing to be of.
            expected_value = None if entry[key] is None else pytest.approx(entry[key], rel=1e-8, abs=1e-9)
            assert own_entry[key] == expected_value, key
    clipped = "cispo_clip_ratio" if "cispo" in name else "clip_ratio/region_mean"
    if name != "sapo":
        assert max(entry[clipped] for entry in ours.logs) > 0.05, "no token was clipped: the comparison shows little"
    assert 0 < ours.logs[0]["completions/clipped_ratio"] < 1, "all responses end alike"


def test_truncated_and_off_policy_masks_take_effect(policy_path, tmp_path):
    """The comparisons above would hold as well if neither trainer read these options."""
    updates = [
        update(result(train({"model": policy_path, "args": {**OFF_POLICY, **options}}, str(tmp_path))), policy_path)
        for options in ({}, {"mask_truncated_completions": True}, {"off_policy_mask_threshold": 0.01})
    ]
    assert relative_difference(updates[1], updates[0]) > 0.01
    assert relative_difference(updates[2], updates[0]) > 0.01


def test_the_population_deviation_is_the_default_and_differs(policy_path, tmp_path):
    """For groups of 4, sample over population deviation is sqrt(4/3) = 1.1547, and the gradient grows by it."""
    spec = {"model": policy_path, "args": {"beta": 0.0, **SAME_SAMPLES}}
    ours = result(train(spec, str(tmp_path / "ours"))).gradient(policy_path)
    stock = {**spec, "trainer": "trl.GRPOTrainer", "args": {"loss_type": "grpo", "beta": 0.0}}
    expected = result(train(stock, str(tmp_path / "stock"))).gradient(policy_path)
    assert (ours.norm() / expected.norm()).item() == pytest.approx(math.sqrt(4 / 3), rel=2e-3)
    own_deviation = {**spec, "args": {"beta": 0.0, **STOCK, **SAME_SAMPLES}}
    assert relative_difference(result(train(own_deviation, str(tmp_path))).gradient(policy_path), expected) < 1e-9


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo_equals_the_stock_rloo_trainer(beta, policy_path, tmp_path):
    """On-policy, TRL's product ratio is 1 and its gradient that of the log-probability: `sum` without a ratio."""
    spec = {"model": policy_path, "perturb": 1, "args": {"max_steps": 3, "learning_rate": 0.1, "beta": beta}}
    own = {"trainer": "RLOOTrainer", "args": {**spec["args"], "fast_rollouts": "off"}}
    ours = result(train({**spec, **own}, str(tmp_path / "ours")))
    reference = build({**spec, "trainer": "trl.GRPOTrainer"}, str(tmp_path / "unused"))
    trainer = trl.RLOOTrainer(
        reference.model,
        [thirds],
        args=trl.RLOOConfig(**{**DEFAULTS, **spec["args"]}, output_dir=str(tmp_path / "stock")),
        train_dataset=reference.train_dataset,
        processing_class=reference.processing_class,
    )
    trainer.train()
    expected = result(trainer)
    assert relative_difference(update(ours, policy_path), update(expected, policy_path)) < 1e-9
    if beta:
        assert [entry["shaped_reward"] for entry in ours.logs] != [entry["reward"] for entry in ours.logs]
