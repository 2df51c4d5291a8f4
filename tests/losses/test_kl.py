"""Estimates of the KL divergence: values worked by hand, and expected gradients by enumeration of every outcome."""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext.algorithms import PolicyObjective
from trl_ext.losses import PolicyScores, kl_estimate

LOG_PROBS = torch.tensor([[-1.0, -0.5]])
REFERENCE = torch.tensor([[-1.2, -0.4]])


@pytest.mark.parametrize(
    "kind, expected",
    [
        # d = log policy - log reference = 0.2, -0.1.
        ("k1", [0.2, -0.1]),
        # 0.04 / 2, 0.01 / 2.
        ("k2", [0.02, 0.005]),
        # exp(-0.2) - 1 + 0.2 = 0.818731 - 0.8; exp(0.1) - 1 - 0.1 = 1.105171 - 1.1. (Swapped: 0.021403, 0.004837.)
        ("k3", [0.018731, 0.005171]),
    ],
)
def test_values(kind, expected):
    assert kl_estimate(LOG_PROBS, REFERENCE, kind)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'. Known: k1, k2, k3"):
        kl_estimate(LOG_PROBS, REFERENCE, "k4")


def test_the_exponent_is_bounded():
    log_probs = torch.tensor([-200.0, -19.0, 0.0], requires_grad=True)
    k3 = kl_estimate(log_probs, torch.zeros(3), "k3")
    k3.sum().backward()
    # exp(20) - 21 at the bound; exp(19) - 20 below it, where the gradient 1 - exp(19) lowers what is too unlikely.
    assert k3.tolist() == pytest.approx([math.exp(20) - 21, math.exp(19) - 20, 0.0], rel=1e-6)
    assert log_probs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(19), 0.0], rel=1e-6)
    # A reference to which the response is nearly impossible: k3 is near d - 1, with a gradient near 1.
    far = torch.tensor([0.0], requires_grad=True)
    k3 = kl_estimate(far, torch.tensor([-300.0]), "k3")
    k3.sum().backward()
    assert k3.item() == pytest.approx(299.0) and far.grad.item() == pytest.approx(1.0)


# ------------------------------------------------------------------- one token, three outcomes, every outcome counted

LOGITS = (0.5, 0.0, -0.5)
REFERENCE_PROBABILITIES = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
# Component i is p_i (log(p_i / q_i) - KL): 0.506480 (0.929168 - 0.293963) = 0.321719.
REVERSE = [0.321719, -0.083023, -0.238697]
# Component i is p_i - q_i: 0.506480 - 0.2.
FORWARD = [0.306480, 0.007196, -0.313676]


def softmax_policy():
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(0)


def expected_gradient(**settings):
    """Expected gradient, under the policy, of a loss that is nothing but a KL term with coefficient 1."""
    objective = PolicyObjective("grpo", beta=1.0, aggregation="sum", **settings)
    logits, log_probs = softmax_policy()
    reference = REFERENCE_PROBABILITIES.log()
    total = 0.0
    for probability, log_prob, ref in zip(log_probs.detach().exp(), log_probs, reference, strict=True):
        log_prob, ref, mask = log_prob.view(1, 1), ref.view(1, 1), torch.ones(1, 1)
        if settings.get("kl_in") == "reward":
            loss = objective.reward_penalty(log_prob, ref, mask) * log_prob.sum()
        else:
            scores = PolicyScores(log_prob, log_prob.detach(), mask, torch.zeros(1))
            loss = objective(scores, ref_log_probs=ref)
        total = total + probability * loss.sum()
    return torch.autograd.grad(total, logits)[0].tolist()


@pytest.mark.parametrize(
    "settings, expected",
    [
        # The expectation of grad log p is the gradient of the sum of all probabilities, which is 1.
        ({"kl_estimator": "k1"}, [0.0, 0.0, 0.0]),
        ({"kl_estimator": "k2"}, REVERSE),
        ({"kl_estimator": "k3"}, FORWARD),
        ({"kl_estimator": "k3", "kl_ratio_correction": True}, REVERSE),
        ({"kl_estimator": "k1", "kl_ratio_correction": True}, REVERSE),
        ({"kl_estimator": "k1", "kl_in": "reward"}, REVERSE),
    ],
    ids=str,
)
def test_expected_gradients(settings, expected):
    assert expected_gradient(**settings) == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------- two tokens, the second depending on the first


def test_reward_penalty():
    """0.1 times k1 of 0.2 and -0.1, the padded third token left out: 0.02 - 0.01; no gradient flows."""
    objective = PolicyObjective("rloo", beta=0.1)
    log_probs = torch.tensor([[-1.0, -0.5, float("nan")]], requires_grad=True)
    penalty = objective.reward_penalty(log_probs, torch.tensor([[-1.2, -0.4, -9.0]]), torch.tensor([[1, 1, 0]]))
    assert penalty.tolist() == pytest.approx([0.01], abs=1e-7)
    assert not penalty.requires_grad
