"""SAPO and GMPO: values and gradients of one batch to six decimals, and loops in float64.

The batch: two responses of 3 and 2 tokens, advantages 1 and -1, and two policies.

    log-prob          -1    -0.7  -0.5   |  -2    -0.3
    when sampled      -1.3  -0.6  -0.55  |  -1.6  -0.5
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.naive_policy import check_against_loops, check_padding_and_order, evaluate, ragged_batch
from trl_ext.algorithms import PolicyObjective
from trl_ext.losses import PolicyLoss, sapo

NEW = torch.tensor([[-1.0, -0.7, -0.5], [-2.0, -0.3, -0.9]], dtype=torch.float64)
OLD = torch.tensor([[-1.3, -0.6, -0.55], [-1.6, -0.5, -0.9]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)
# name -> options that make each branch occur on a few tokens.
OPTIONS = {"sapo": {"temperature_pos": 0.7, "temperature_neg": 1.9}, "gmpo": {"log_clip": 0.2}}


@pytest.mark.parametrize(
    "name, options, value, gradient",
    [
        ("sapo", {}, -0.124540, [-0.218230, -0.150465, -0.175097, 0.162658, 0.301262]),
        ("gmpo", {}, -0.091033, [-0.181151, -0.181151, -0.181151, 0.226209, 0.226209]),
        ("gmpo", {"log_clip": 0.1}, 0.017232, [0, -0.169468, -0.169468, 0, 0.262818]),
    ],
)
def test_value_and_gradient_on_the_batch(name, options, value, gradient):
    objective = PolicyObjective(name, options=options)
    loss, found = evaluate(objective, NEW, old=OLD, mask=MASK, advantages=ADVANTAGES)
    assert loss == pytest.approx(value, abs=6e-7)
    assert found.flatten().tolist() == pytest.approx([*gradient, 0], abs=6e-7)


@pytest.mark.parametrize(
    "tau, ratio, weight",
    [(1.0, 1.0, 1.0), (1.0, 2.0, 0.786448), (1.0, 0.5, 0.940015), (1.05, 2.0, 0.768110), (1.05, 0.5, 0.934140)],
)
def test_the_gate_of_sapo(tau, ratio, weight):
    """What it leaves of the gradient of -ratio A."""
    log_ratio = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    sapo(log_ratio, torch.ones(1, dtype=torch.float64), temperature_pos=tau).backward()
    assert log_ratio.grad.item() == pytest.approx(-ratio * weight, abs=6e-7 * ratio)


# One geometric mean for each response has one advantage.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name, has_token_advantages", [("sapo", False), ("sapo", True), ("gmpo", False)])
def test_value_and_gradient_against_loops(name, has_token_advantages, seed):
    objective = PolicyObjective(name, options=OPTIONS[name])
    check_against_loops(name, objective, OPTIONS[name], has_token_advantages, seed)


@pytest.mark.parametrize("name", OPTIONS)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """-A at each token, times the weight of the reduction."""
    _, old, _, mask, advantages = ragged_batch(seed=4)
    _, gradient = evaluate(PolicyObjective(name), old, old=old, mask=mask, advantages=advantages)
    plain = PolicyLoss(surrogate="reinforce", ratio="none", aggregation="sequence_mean")
    _, expected = evaluate(plain, old, old=old, mask=mask, advantages=advantages)
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_padding_and_the_order_of_rows_change_nothing(name):
    check_padding_and_order(PolicyObjective(name, options=OPTIONS[name]))


def test_gmpo_refuses_the_ratio_of_a_sequence():
    with pytest.raises(ValueError, match="--ratio sequence and --surrogate gmpo contradict.*use --ratio token"):
        PolicyObjective("grpo", surrogate="gmpo", ratio="sequence")
    PolicyObjective("grpo", surrogate="gmpo", ratio="token")
