"""The Bradley-Terry loss against values worked by hand, its gradient, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext.losses import bradley_terry


@pytest.mark.parametrize(
    "options, expected",
    [
        # l(u) = log(1 + exp(-u)). Scores 1.2 and 0.4: l(0.8) = log(1 + 0.449329).
        ({}, 0.371101),
        # l(0.8 - 1) = l(-0.2) = 0.2 + log(1 + 0.818731).
        ({"margin": 1.0}, 0.798139),
        # l(0.8 - 1/3) = l(0.466667).
        ({"margin": 1 / 3}, 0.486793),
        # 0.9 l(0.8) + 0.1 l(-0.8) = 0.371101 + 0.1 * 0.8, as l(-u) = l(u) + u.
        ({"label_smoothing": 0.1}, 0.451101),
        # A judge that agrees with probability 0.7: 0.371101 + 0.3 * 0.8.
        ({"label_smoothing": 0.3}, 0.611101),
        # 0.371101 + 0.01 (1.2 + 0.4)^2.
        ({"centering": 0.01}, 0.396701),
        # l(-0.2) + 0.1 * -0.2 with the margin inside both logistics, + 0.01 * 2.56.
        ({"margin": 1.0, "label_smoothing": 0.1, "centering": 0.01}, 0.798139 - 0.02 + 0.0256),
    ],
    ids=str,
)
def test_values(options, expected):
    losses = bradley_terry(torch.tensor([1.2]), torch.tensor([0.4]), **options)
    assert losses.tolist() == pytest.approx([expected], abs=1e-6)


def test_gradient():
    """d/d chosen of (1-e) l(d) + e l(-d) is sigmoid(d) - (1 - e); of the centering 2 c (chosen + rejected).
    sigmoid(0.3) = 0.574443 with d = 0.8 - 0.5."""
    chosen, rejected = torch.tensor([1.2], requires_grad=True), torch.tensor([0.4], requires_grad=True)
    bradley_terry(chosen, rejected, margin=0.5, label_smoothing=0.1, centering=0.01).sum().backward()
    slope, pull = 1 / (1 + math.exp(-0.3)) - 0.9, 2 * 0.01 * 1.6
    assert chosen.grad.item() == pytest.approx(slope + pull, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(-slope + pull, abs=1e-6)


def test_far_scores_stay_finite():
    """l(-2000) = 2000, l(2000) = 0."""
    losses = bradley_terry(torch.tensor([-1000.0, 1000.0]), torch.tensor([1000.0, -1000.0]))
    assert losses.tolist() == [2000.0, 0.0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"label_smoothing": 0.5}, r"label_smoothing must lie in \[0, 0.5\), got 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"centering": -1.0}, "centering must be a number from 0 up, got -1.0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        bradley_terry(torch.zeros(2), torch.zeros(2), **options)


def test_scores_of_different_shapes():
    with pytest.raises(ValueError, match=r"shapes \[2\] for chosen and \[2, 1\] for rejected"):
        bradley_terry(torch.zeros(2), torch.zeros(2, 1))
