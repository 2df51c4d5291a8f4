"""Methods of 2024 to 2026 in numbers: each example gives values and a gradient, to six decimals.

An example is a function of a leaf tensor in float64. Its gradient, where there is one, is also compared with central
differences of its value, which know nothing of the code.
"""

from __future__ import annotations

import pytest
import torch

from trl_ext.advantages import gae
from trl_ext.losses import bco, length_adaptive_lambda, reward_shift
from trl_ext.rewards.shaping_steps import soft_overlong


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gae_with(lam) -> torch.Tensor:
    """Advantages and returns of a response with reward 1 at its end, and values .5, .6, .7."""
    return torch.cat(gae(tensor([0, 0, 1.0]), tensor([0.5, 0.6, 0.7]), torch.ones(1, 3), 1.0, lam))


# Name -> function, leaf, values, gradient of their sum (None where there is none).
EXAMPLES = {
    # Shift (mean of .2, -.1, -.05 and mean of -.1) / 2 = -0.041667, and a constant for the gradient.
    "BCO": (
        lambda ratios: bco(ratios, torch.tensor([1, 1, 1, 0]), reward_shift([0.05, 3, -0.1, 1]), beta=0.1),
        (2.0, -1.0, -0.5, -1.0),
        (0.579596, 0.722739, 0.697323, 0.664406),
        (-0.043988, -0.051458, -0.050208, 0.048542),
    ),
    "BCO, shift without a label": (lambda sums: tensor(reward_shift(sums.tolist())), (0.6, 3, 0, 0), (0.1,), None),
    "DAPO, punishment of long responses": (
        lambda lengths: soft_overlong(lengths, 100, 20),
        (50, 85, 100, 60),
        (0, -0.25, -1, 0),
        None,
    ),
    "VAPO, lambda": (
        lambda lengths: length_adaptive_lambda(lengths),
        (3, 20, 40, 100, 1000, 8000),
        (0, 0, 0.5, 0.8, 0.98, 0.9975),
        None,
    ),
    "VAPO, advantages": (lambda lam: gae_with(lam)[0], (0.8,), (0.372, 0.34, 0.3), None),
    "VAPO, returns": (lambda lam: gae_with(lam)[1], (1.0,), (1, 1, 1), None),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    function, leaf, values, gradient = EXAMPLES[name]
    point = tensor(*leaf).requires_grad_(gradient is not None)
    found = function(point)
    assert found.reshape(-1).tolist() == pytest.approx(values, abs=6e-7)
    assert found.requires_grad == (gradient is not None)
    if gradient is None:
        return
    (slope,) = torch.autograd.grad(found.sum(), point)
    assert slope.tolist() == pytest.approx(gradient, abs=6e-7)
