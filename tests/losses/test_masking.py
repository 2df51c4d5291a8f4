"""Masked sums and means: values worked by hand, gradients, and what stands where the mask is 0."""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext.losses import masked_mean, masked_normalize, masked_sum

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1, 0, 1], [0, 1, 0]])


@pytest.mark.parametrize(
    "dim, expected",
    [
        # 1 + 3 + 5.
        (None, 9.0),
        # Columns: 1, 5, 3. Rows: 1 + 3, 5.
        (0, [1.0, 5.0, 3.0]),
        (1, [4.0, 5.0]),
        (-1, [4.0, 5.0]),
    ],
)
def test_masked_sum(dim, expected):
    for mask in (MASK, MASK.bool(), MASK.float()):
        assert masked_sum(VALUES, mask, dim).tolist() == expected


def test_masked_mean():
    """All: 9 / 3. Rows: 4 / 2, 5 / 1. Columns: 1, 5, 3, over one each."""
    assert masked_mean(VALUES, MASK).item() == 3.0
    assert masked_mean(VALUES, MASK, 1).tolist() == [2.0, 5.0]
    assert masked_mean(VALUES, MASK, 0).tolist() == [1.0, 5.0, 3.0]


def test_masked_normalize():
    """Sums over 4: 9 / 4, and 4 / 4, 5 / 4."""
    assert masked_normalize(VALUES, MASK, 4.0).item() == 2.25
    assert masked_normalize(VALUES, MASK, 4.0, 1).tolist() == [1.0, 1.25]


def test_a_row_without_tokens():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    mean = masked_mean(VALUES, mask, 1)
    assert mean[0].item() == 1.5 and math.isnan(mean[1].item())
    assert masked_sum(VALUES, mask, 1).tolist() == [3.0, 0.0]
    assert math.isnan(masked_mean(VALUES, torch.zeros(2, 3)).item())


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_values_that_do_not_count_are_never_read(junk):
    values = torch.tensor([[1.0, junk, 3.0]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1]])
    total = masked_sum(values, mask) + masked_mean(values, mask) + masked_normalize(values, mask, 2.0)
    # 4 + 2 + 2; each counted value weighs 1 + 1/2 + 1/2.
    assert total.item() == 8.0
    total.backward()
    assert values.grad.tolist() == [[2.0, 0.0, 2.0]]


def test_one_value_per_row_counts_once_per_token():
    column = torch.tensor([[2.0], [5.0]])
    assert masked_sum(column, MASK, 1).tolist() == [4.0, 5.0]
    assert masked_mean(column, MASK, 1).tolist() == [2.0, 5.0]


def test_a_constant_that_is_not_positive():
    with pytest.raises(ValueError, match="constant, which must be positive, got 0"):
        masked_normalize(VALUES, MASK, 0)
