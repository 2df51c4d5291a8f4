"""SAPO and GMPO: values and gradients of one batch to six decimals, and loops in float64.

The batch: two responses of 3 and 2 tokens, advantages 1 and -1, and two policies.

    log-prob          -1    -0.7  -0.5   |  -2    -0.3
    when sampled      -1.3  -0.6  -0.55  |  -1.6  -0.5
"""

from __future__ import annotations

import pytest
import torch

from tests.support.naive_policy import check_against_loops, evaluate
from trl_ext.algorithms import PolicyObjective

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


# One geometric mean for each response has one advantage.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name, has_token_advantages", [("sapo", False), ("sapo", True), ("gmpo", False)])
def test_value_and_gradient_against_loops(name, has_token_advantages, seed):
    objective = PolicyObjective(name, options=OPTIONS[name])
    check_against_loops(name, objective, OPTIONS[name], has_token_advantages, seed)


def test_gmpo_refuses_the_ratio_of_a_sequence():
    with pytest.raises(ValueError, match="--ratio sequence and --surrogate gmpo contradict.*use --ratio token"):
        PolicyObjective("grpo", surrogate="gmpo", ratio="sequence")
    PolicyObjective("grpo", surrogate="gmpo", ratio="token")
