"""PPO's numbers by hand and by plain sums: advantages, value loss, whitening, token rewards; and a Markov chain."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from trl_ext.advantages import gae
from trl_ext.losses import clipped_value_loss, explained_variance, whiten
from trl_ext.losses.value import is_value_clipped
from trl_ext.trainers.ppo.trainer import adapted_coefficient, token_rewards

# ---- Advantages ----


@pytest.mark.parametrize(
    ("rewards", "values", "gamma", "lam", "expected", "expected_returns"),
    [
        # delta = [0 + .6 - .5, 0 + .7 - .6, 1 - .7] = [.1, .1, .3]; A_3 = .3, A_2 = .1 + .95 x .3 = .385,
        # A_1 = .1 + .95 x .385 = .46575. Returns are A + V.
        ([0.0, 0.0, 1.0], [0.5, 0.6, 0.7], 1.0, 0.95, [0.46575, 0.385, 0.3], [0.96575, 0.985, 1.0]),
        # One-step differences: 1 + 0.75 - 0.5, -2 - 0.5 - 1.5, 4 + 1.
        ([1.0, -2.0, 4.0], [0.5, 1.5, -1.0], 0.5, 0.0, [1.25, -4.0, 5.0], [1.75, -2.5, 4.0]),
        # The rest of the rewards less the value.
        ([1.0, -2.0, 4.0], [0.5, 1.5, -1.0], 1.0, 1.0, [2.5, 0.5, 5.0], [3.0, 2.0, 4.0]),
        # Both discount: 4, then 0 + 0.25 * 4 = 1, then 1 + 0.25 * 1 = 1.25.
        ([1.0, 0.0, 4.0], [0.0, 0.0, 0.0], 0.5, 0.5, [1.25, 1.0, 4.0], [1.25, 1.0, 4.0]),
    ],
)
def test_gae_by_hand(rewards, values, gamma, lam, expected, expected_returns):
    advantages, returns = gae(torch.tensor([rewards]), torch.tensor([values]), torch.ones(1, 3), gamma, lam)
    assert advantages[0].tolist() == pytest.approx(expected)
    assert returns[0].tolist() == pytest.approx(expected_returns)


def test_gae_of_bfloat16_is_in_float32():
    """A_t = 1 + .998 A_{t+1} over 100 tokens; bfloat16 would round .998 to .996."""
    rewards, values, mask = torch.ones(1, 100).bfloat16(), torch.zeros(1, 100).bfloat16(), torch.ones(1, 100)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.998)
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages[0, 0].item() == pytest.approx((1 - 0.998**100) / 0.002, rel=1e-5)


def ragged_batch(rows: int = 7, width: int = 9):
    generator = torch.Generator().manual_seed(3)
    lengths = [width, 1, 0, 4, 7, 2, 8][:rows]
    mask = torch.tensor([[int(column < length) for column in range(width)] for length in lengths])
    return (*torch.randn(2, rows, width, generator=generator, dtype=torch.float64), mask)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.5)])
def test_gae_is_the_double_sum(gamma, lam):
    """A_t = sum_k (gamma lambda)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), each row by itself, without padding."""
    rewards, values, mask = ragged_batch()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row, length in enumerate(mask.sum(1).tolist()):
        r, v = rewards[row, :length].tolist(), [*values[row, :length].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        expected = [math.fsum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns[row, :length].tolist() == pytest.approx([a + v[t] for t, a in enumerate(expected)], abs=1e-12)
        assert not advantages[row, length:].any() and not returns[row, length:].any()


def test_gae_whatever_the_padding_and_the_order_of_rows():
    """What does not count stands before, behind and between the tokens, with values that are no numbers."""
    rewards, values, mask = ragged_batch()
    expected, _ = gae(rewards, values, mask, 0.9, 0.8)
    order, places = torch.tensor([3, 0, 6, 1, 5, 2, 4]), torch.tensor([2, 3, 5, 6, 7, 10, 11, 12, 13])

    def padded(tensor, value):
        wide = torch.full((len(order), 16), value, dtype=tensor.dtype)
        wide[:, places] = tensor[order]
        return wide

    moved, _ = gae(padded(rewards, 7.0), padded(values, math.nan), padded(mask, 0), 0.9, 0.8)
    torch.testing.assert_close(moved[:, places], expected[order], rtol=0, atol=1e-12)
    assert not moved[padded(mask, 0) == 0].any()


# ---- Rewards of tokens ----


def test_token_rewards_by_hand():
    """beta .1, log pi [-1, -.5, -.8], log ref [-1.2, -.4, -.8], R 2: minus .1 x [.2, -.1, 0], plus 2 on the last.

    The second response is cut after two tokens, and the third has none.
    """
    penalties = 0.1 * torch.tensor([[0.2, -0.1, 0.0]] * 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    rewards = token_rewards(torch.tensor([2.0, 3.0, 5.0]), penalties, mask)
    for row, expected in zip(rewards, [[-0.02, 0.01, 2.0], [-0.02, 3.01, 0.0], [0.0, 0.0, 0.0]], strict=True):
        assert row.tolist() == pytest.approx(expected)
    assert token_rewards(torch.tensor([2.0]), None, mask[1:2]).tolist() == [[0.0, 2.0, 0.0]]


def test_a_hole_in_the_mask_does_not_take_the_score():
    """As where a tool's answer stands between the policy's own tokens, and behind them."""
    assert token_rewards(torch.tensor([2.0]), None, torch.tensor([[1, 0, 1, 0]])).tolist() == [[0.0, 0.0, 2.0, 0.0]]


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        # .1 (1 - .2 x 256 / 10000): 3 / 6 - 1 = -.5 is clipped to -.2.
        (3.0, 0.099488),
        (6.0, 0.1),
        # .1 (1 + .1 x .0256)
        (6.6, 0.100256),
        (12.0, 0.100512),
        # .1 (1 - .2 x .0256): an estimate may be negative.
        (-1.0, 0.099488),
    ],
)
def test_adapted_coefficient(divergence, expected):
    assert adapted_coefficient(0.1, divergence, target=6.0, horizon=10_000, count=256) == pytest.approx(expected)


# ---- Whitening ----


def test_whitening_by_hand():
    """[.46575, .385, .3]: mean .3835833, sample deviation .0828842."""
    advantages = torch.tensor([[0.46575, 0.385, 0.3, 99.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert whiten(advantages, mask)[0].tolist() == pytest.approx([0.991344, 0.017092, -1.008436, 0.0], abs=1e-5)
    kept = whiten(advantages, mask, shift_mean=False)
    assert kept[0, :3].tolist() == pytest.approx([1.374927, 0.400675, -0.624853], abs=1e-5) and kept[0, 3] == 0


def test_whitening_is_of_all_processes():
    """Two processes' tokens of unequal number: the statistics are those of both, however they are split."""
    values, _, mask = ragged_batch()
    known = values[mask.bool()].tolist()
    mean, deviation = statistics.fmean(known), statistics.stdev(known)
    expected = ((values - mean) / (deviation + 1e-8)) * mask
    torch.testing.assert_close(whiten(values, mask), expected, rtol=1e-12, atol=1e-12)

    halves = [(values[:2], mask[:2]), (values[2:], mask[2:])]
    count = sum(part.sum() for _, part in halves).double()
    sums = torch.stack([count, torch.tensor(math.fsum(known), dtype=torch.float64)])
    squares = torch.tensor(math.fsum((value - mean) ** 2 for value in known), dtype=torch.float64)
    for (part, part_mask), rows in zip(halves, (expected[:2], expected[2:]), strict=True):
        answers = iter([sums, squares])
        torch.testing.assert_close(whiten(part, part_mask, reduce=lambda _: next(answers)), rows)  # noqa: B023


def test_whitening_what_does_not_vary():
    assert whiten(torch.full((1, 3), 0.7), torch.ones(1, 3)).abs().max() < 1e-5
    assert whiten(torch.tensor([[3.0, 5.0]]), torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whiten(torch.tensor([[3.0]]), torch.zeros(1, 1)).tolist() == [[0.0]]


def test_whitening_keeps_digits_far_from_zero():
    """Float32 sums of squares of 10000 + x would have lost x."""
    values = torch.tensor([[10000.0, 10000.5, 10001.0]])
    assert whiten(values, torch.ones(1, 3))[0].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_explained_variance_by_hand():
    """Returns [1, 2, 3, 6], mean 3, squares 4 + 1 + 0 + 9 = 14. Values 1 too low throughout explain all of it.

    Values [1, 2, 3, 3] leave [0, 0, 0, 3], mean .75, squares 3 x .5625 + 5.0625 = 6.75: 1 - 6.75 / 14 = .517857.
    """
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 6.0, 50.0]]), torch.tensor([[1, 1, 1, 1, 0]])
    assert explained_variance(returns - 1, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 5), returns, mask) == 0.0
    assert explained_variance(torch.tensor([[1.0, 2, 3, 3, 9]]), returns, mask) == pytest.approx(0.517857)
    assert math.isnan(explained_variance(returns, torch.ones(1, 5), mask))


# ---- The value loss ----


def test_value_loss_by_hand():
    """V .9, V_old .5, target 1, c .2: the clipped value .7 errs by .3, 1/2 x .09 = .045; alone 1/2 x .01 = .005.

    V .3 has moved away from the target: 1/2 x .7^2 = .245 is the larger, against .245 at .3 itself, which the clip
    allows. V .1: 1/2 x .9^2 = .405 against 1/2 x .7^2.
    """
    values = torch.tensor([[0.9, 0.3, 0.1]], requires_grad=True)
    old, returns = torch.full((1, 3), 0.5), torch.ones(1, 3)
    losses = clipped_value_loss(values, old, returns, clip=0.2)
    assert losses[0].tolist() == pytest.approx([0.045, 0.245, 0.405])
    assert clipped_value_loss(values, old, returns, clip=None)[0].tolist() == pytest.approx([0.005, 0.245, 0.405])
    losses.sum().backward()
    assert values.grad[0].tolist() == pytest.approx([0.0, -0.7, -0.9])
    assert is_value_clipped(values, old, returns, clip=0.2).tolist() == [[True, False, False]]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: clipped_value_loss(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2)), "of one shape, got"),
        (lambda: clipped_value_loss(*torch.zeros(3, 1, 2), clip=0.0), "must be positive, got 0.0"),
    ],
)
def test_refusals(run, message):
    with pytest.raises(ValueError, match=message):
        run()
