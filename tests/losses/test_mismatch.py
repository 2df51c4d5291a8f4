"""Importance weights for a sampler that disagrees with the trainer: hand-worked numbers, the metrics, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.rollout_once import build, prompts
from trl_ext import PolicyConfig
from trl_ext.losses import PolicyLoss, PolicyScores, mismatch_weights
from trl_ext.losses.mismatch import CORRECTIONS, disagreement
from trl_ext.trainers.policy import sampler_weights

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOG_PROBS = torch.tensor([[-1.0, -0.7, -0.5], [-2.0, -0.3, -0.9]], dtype=torch.float64)
OLD = torch.tensor([[-1.3, -0.6, -0.55], [-1.6, -0.5, -0.9]], dtype=torch.float64)
# Log-ratios: 0.5, -0.2, 0.1 and -1.0, 0.9.
SAMPLER = torch.tensor([[-1.8, -0.4, -0.65], [-0.6, -1.4, math.nan]], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)

# (correction, low, high) -> weights by row, loss by the mean over tokens and by the mean of means, and the gradient of
# the first; the clip is at 0.8 and 1.2, and weights have six decimals.
WORKED = {
    ("token_truncate", None, 2.0): (
        [[1.648721, 0.818731, 1.105171], [0.367879, 2.0]],
        (-0.228802, 0.037424),
        [0, -0.148164, -0.232367, 0, 0.488561, 0],
    ),
    ("token_truncate", 0.5, 2.0): (
        [[1.648721, 0.818731, 1.105171], [0.5, 2.0]],
        (-0.207662, 0.063848),
        [0, -0.148164, -0.232367, 0, 0.488561, 0],
    ),
    ("token_mask", None, None): (
        [[1.648721, 0.818731, 1.105171], [0.0, 2.459603]],
        (-0.175390, 0.104189),
        [0, -0.148164, -0.232367, 0, 0.600833, 0],
    ),
    ("sequence_truncate", None, 3.0): (
        [[1.491825], [0.904837]],
        (-0.575864, -0.327467),
        [0, -0.269972, -0.313662, 0, 0.221034, 0],
    ),
    ("sequence_truncate", None, 1.2): (
        [[1.2], [0.904837]],
        (-0.391658, -0.173961),
        [0, -0.217161, -0.252305, 0, 0.221034, 0],
    ),
    ("sequence_mask", None, 1.2): ([[0.0], [0.904837]], (0.365808, 0.457260), [0, 0, 0, 0, 0.221034, 0]),
    ("geometric_mask", 0.94, 1.06): ([[0.0], [0.951229]], (0.384564, 0.480704), [0, 0, 0, 0, 0.232367, 0]),
}


@pytest.mark.parametrize("case", WORKED, ids=lambda case: "-".join(map(str, case)))
def test_worked_numbers(case):
    kind, low, high = case
    expected, losses, gradient = WORKED[case]
    weights = mismatch_weights(OLD, SAMPLER, MASK, kind, low=low, high=high)
    assert not weights.requires_grad
    for row, known in zip(weights.tolist(), expected, strict=True):
        assert row[: len(known)] == pytest.approx(known, abs=6e-7)
    for aggregation, loss in zip(("token_mean", "sequence_mean"), losses, strict=True):
        log_probs = LOG_PROBS.clone().requires_grad_()
        scores = PolicyScores(log_probs, OLD, MASK, ADVANTAGES)
        value = PolicyLoss(aggregation=aggregation, epsilon=0.2)(scores, weights=weights)
        assert value.item() == pytest.approx(loss, abs=6e-7)
        if aggregation == "token_mean":
            value.backward()
            assert log_probs.grad.flatten().tolist() == pytest.approx(gradient, abs=6e-7)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_samplers_that_agree_weigh_nothing(kind):
    bounds = {"low": 0.999, "high": 1.001} if kind == "geometric_mask" else {}
    assert mismatch_weights(OLD, OLD, MASK, kind, **bounds).eq(1).all()
    # Where nothing was recorded, as for the results of tools, the ratio is 1.
    assert mismatch_weights(OLD, torch.full_like(OLD, math.nan), MASK, kind, **bounds).eq(1).all()


def test_an_infinite_log_ratio_is_clamped():
    weights = mismatch_weights(OLD, torch.full_like(OLD, -math.inf), MASK, "token_truncate", high=1e9)
    assert weights[0].tolist() == pytest.approx([math.exp(20)] * 3)


def test_disagreement_is_summed_over_the_tokens_that_count():
    found = disagreement(OLD, SAMPLER, MASK)
    ratios = [math.exp(value) for value in (0.5, -0.2, 0.1, -1.0, 0.9)]
    expected = {"tokens": 5, "absolute": 2.7, "largest": 1.0}
    expected |= {"weights": sum(ratios), "squared_weights": sum(ratio**2 for ratio in ratios)}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)


# ---- In a trainer ----


def rollout(policy_path, tmp_path, **args):
    trainer = build({"model": policy_path, "args": args}, str(tmp_path))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])


def test_the_disagreement_of_our_sampler_is_logged(policy_path, tmp_path):
    trainer, output = rollout(policy_path, tmp_path)
    trainer._compute_loss(trainer.model, output)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("sampling/")}
    difference = "sampling/sampling_logp_difference"
    assert 0 <= metrics[f"{difference}/mean"] <= metrics[f"{difference}/max"] < 1e-5
    assert metrics["sampling/effective_sample_size"] == pytest.approx(1, abs=1e-8)


def test_a_sampler_that_disagrees_is_told_once(policy_path, tmp_path, caplog):
    trainer, output = rollout(policy_path, tmp_path)
    output["sampling_per_token_logps"] = output["sampling_per_token_logps"] - torch.arange(8.0)[:, None] / 4
    for _ in range(2):
        trainer._compute_loss(trainer.model, output)
    assert caplog.text.count("sampler_correction token_truncate weighs by the ratio") == 1


def test_weights_of_a_correction_are_logged(policy_path, tmp_path, monkeypatch):
    """Half of the responses have a ratio of e at each token, which the default bounds of IcePop allow, half one of
    e^2, which they do not."""
    trainer, output = rollout(policy_path, tmp_path, sampler_correction="token_mask")
    calls = []
    monkeypatch.setattr(
        sampler_weights, "mismatch_weights", lambda *a, **k: calls.append(a) or mismatch_weights(*a, **k)
    )
    output["sampling_per_token_logps"] = output["sampling_per_token_logps"] - torch.tensor([1.0, 2.0] * 4)[:, None]
    trainer._compute_loss(trainer.model, output)
    tokens = output["completion_mask"].sum(dim=1)
    dropped = (tokens[1::2].sum() / tokens.sum()).item()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert len(calls) == 1, "one computation serves the loss and the metrics"
    assert metrics["sampling/dropped"] == pytest.approx(dropped)
    assert metrics["sampling/weight_mean"] == pytest.approx((1 - dropped) * math.e, rel=1e-4)


def test_nothing_recorded_is_told(policy_path, tmp_path, caplog):
    trainer, output = rollout(policy_path, tmp_path, sampler_correction="token_truncate", top_k=5)
    loss = trainer._compute_loss(trainer.model, output)
    assert "sampler_correction token_truncate does nothing" in caplog.text
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sampler_correction": "token_trunkate"}, "token_truncate"),
        ({"sampler_correction": "geometric_mask"}, "geometric_mask has no default bounds"),
        ({"sampler_correction": "token_mask", "sampler_correction_min": 6.0}, "give 0 <= lower bound < upper bound"),
        ({"sampler_correction_max": 2.0}, "need sampler_correction: name one"),
        ({"sampler_correction": "token_mask", "fast_rollouts": "off"}, "transformers records nothing"),
    ],
)
def test_what_is_refused(settings, expected, tmp_path):
    with pytest.raises(ValueError, match=expected):
        PolicyConfig(str(tmp_path), report_to=[], **settings)
