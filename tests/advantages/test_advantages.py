"""Advantages: values worked by hand, rewards that could not be scored, invariances, and expected updates.

The group g = [3, 1, 0, -1]: mean 0.75, deviations 2.25, 0.25, -0.75, -1.75 with squares that sum to 8.75, so that the
standard deviation is sqrt(8.75 / 4) = 1.479020 (population) or sqrt(8.75 / 3) = 1.707825 (sample).
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from tests.support.naive_policy import algorithm
from trl_ext.advantages import (
    ADVANTAGES,
    clip_advantages,
    gae,
    greedy_baseline,
    group_centered,
    group_normalized,
    leave_one_out,
    length_weighted,
    mean_normalized,
)
from trl_ext.losses import clipped_value_loss, explained_variance, whiten
from trl_ext.losses.value import is_value_clipped
from trl_ext.trainers.ppo.trainer import adapted_coefficient, token_rewards

G = [3.0, 1.0, 0.0, -1.0]
TIES = [1.0, 1.0, 0.0, 0.0]
NAN, INF = float("nan"), float("inf")


def lengths_of(count):
    return torch.arange(count) % 5 + 1


def call(name, rewards, group_size, **options):
    """An estimator by name, with lengths and greedy rewards of 0.25 where it takes them."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if name == "length_weighted":
        options.setdefault("lengths", lengths_of(len(rewards)))
    if name == "greedy_baseline":
        options.setdefault("greedy_rewards", torch.full((len(rewards) // group_size,), 0.25))
    return ADVANTAGES[name](rewards, group_size, **options)


# Those that compare a group's responses with one another.
COMPARING = [
    "group_normalized",
    "group_centered",
    "leave_one_out",
    "group_rank",
    "batch_normalized",
    "mean_normalized",
    "length_weighted",
]
TABLE = [
    # 2.25 / 1.479020 and so on.
    ("group_normalized", G, {}, [1.521277, 0.169031, -0.507092, -1.183215]),
    # 2.25 / 1.707825; TRL's eps takes 0.006 % off.
    ("group_normalized", G, {"std_ddof": 1}, [1.317464, 0.146385, -0.439155, -1.024694]),
    ("group_normalized", G, {"std_ddof": 1, "eps": 1e-4}, [1.317388, 0.146376, -0.439129, -1.024635]),
    ("group_centered", G, {}, [2.25, 0.25, -0.75, -1.75]),
    # 4/3 of the centred ones: 3 - (1 + 0 - 1) / 3 and so on.
    ("leave_one_out", G, {}, [3.0, 0.333333, -1.0, -2.333333]),
    ("greedy_baseline", G, {"greedy_rewards": torch.tensor([0.8])}, [2.2, 0.2, -0.8, -1.8]),
    # (3 below - 0 above) / 3, (2 - 1) / 3, ...
    ("group_rank", G, {}, [1.0, 0.333333, -0.333333, -1.0]),
    ("group_rank", G, {"scale": 2.0}, [2.0, 0.666667, -0.666667, -2.0]),
    # Two above or below, none of the other kind: 2 / 3, times 2.
    ("group_rank", TIES, {"scale": 2.0}, [1.333333, 1.333333, -1.333333, -1.333333]),
    # Baseline (2 * 3 + 4 * 1 + 3 * 0 - 1) / 10 = 0.9.
    ("length_weighted", G, {"lengths": torch.tensor([2, 4, 3, 1])}, [2.1, 0.1, -0.9, -1.9]),
    ("no_baseline", G, {}, G),
    # Mean 0.25; std sqrt(0.75 / 3) = 0.5 of the sample.
    ("group_normalized", [1, 0, 0, 0], {"std_ddof": 1, "eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
    # 0.75 / 0.250001.
    ("mean_normalized", [1, 0, 0, 0], {}, [2.999988, -0.999996, -0.999996, -0.999996]),
    # Mean 0.275, deviations -0.075, 0.225, -0.275, 0.125; squares sum to 0.1475; std 0.221736.
    ("group_normalized", [0.2, 0.5, 0, 0.4], {"std_ddof": 1}, [-0.338239, 1.014718, -1.240210, 0.563732]),
]


@pytest.mark.parametrize("name, rewards, options, expected", TABLE)
def test_values(name, rewards, options, expected):
    assert call(name, rewards, 4, **options).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "group_size, options, group, ties",
    [
        # The 8 rewards have mean 0.625 and squared deviations 9.875: sqrt(9.875 / 7) + 1e-4 = 1.187834 divides the
        # centred rewards 2.25, 0.25, -0.75, -1.75, 0.5, 0.5, -0.5, -0.5.
        (4, {"std_ddof": 1, "eps": 1e-4}, [1.894203, 0.210467, -0.631401, -1.473269], (0.420934, -0.420934)),
        # The centred rewards' own squares are 8.75 + 1: sqrt(9.75 / 8) = 1.103970.
        (4, {"std_of": "advantages", "eps": 0.0}, [2.038099, 0.226455, -0.679366, -1.585188], (0.452911, -0.452911)),
        # Deviations from 0.625 over sqrt(9.875 / 8) = 1.111024.
        (1, {"baseline": "batch", "eps": 0.0}, [2.137667, 0.337526, -0.562544, -1.462614], (0.337526, -0.562544)),
    ],
)
def test_batch_normalized(group_size, options, group, ties):
    expected = [*group, ties[0], ties[0], ties[1], ties[1]]
    assert call("batch_normalized", G + TIES, group_size, **options).tolist() == pytest.approx(expected, abs=1e-6)


# -------------------------------------------------------------------------------------------------------- no signal


# Values of which the mean in floating point is not always the value.
@pytest.mark.parametrize("constant", [0.1, 1.0, 0.7, 1e-8, 3.3e5])
@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_equal_rewards_has_no_signal(name, constant):
    for dtype in (torch.float32, torch.float64):
        group = torch.full((3,), constant, dtype=dtype)
        other = torch.tensor([0.0, 0.5, 1.0], dtype=dtype)
        advantages = call(name, torch.cat([group, other]).to(dtype), 3)
        assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
        assert advantages[3:].any()
        alone = call(name, group, 3)
        assert alone.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_what_could_not_be_scored_is_left_out(name, junk):
    """The other three responses have the advantages that a group of three has, and it has 0."""
    options, three = {}, {}
    if name == "length_weighted":
        options, three = {"lengths": torch.tensor([2, 9, 3, 1])}, {"lengths": torch.tensor([2, 3, 1])}
    advantages = call(name, [3.0, junk, 0.5, 1.0], 4, **options)
    assert advantages[1].item() == 0.0
    expected = call(name, [3.0, 0.5, 1.0], 3, **three)
    assert torch.allclose(advantages[[0, 2, 3]], expected, atol=1e-12)


SAMPLE = {"std_ddof": 1}


@pytest.mark.parametrize(
    "name, options", [*((name, {}) for name in COMPARING), ("group_normalized", SAMPLE), ("batch_normalized", SAMPLE)]
)
def test_groups_that_leave_nothing_to_compare(name, options):
    """No reward at all, one among two that could not be scored, and groups of one."""
    assert call(name, [NAN] * 3 + [NAN, 2.0, NAN], 3, **options).tolist() == [0.0] * 6
    assert call(name, [2.0, 5.0], 1, **options).tolist() == [0.0, 0.0]


def test_a_greedy_response_that_could_not_be_scored():
    advantages = greedy_baseline(torch.tensor([1.0, 2.0, 3.0, 4.0]), 2, torch.tensor([NAN, 0.5]))
    assert advantages.tolist() == [0.0, 0.0, 2.5, 3.5]


def test_responses_without_tokens_have_no_weight():
    assert length_weighted(torch.tensor([1.0, 3.0]), 2, torch.tensor([0, 4])).tolist() == [-2.0, 0.0]
    assert length_weighted(torch.tensor([1.0, 3.0]), 2, torch.tensor([0, 0])).tolist() == [0.0, 0.0]


# ------------------------------------------------------------------------------------------------------- invariances

SEVERAL = torch.tensor([0.3, 1.2, 0.3, 2.0, 5.0, 0.1, 0.2, 4.0, 1.0, 1.0, 0.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"batch_normalized"}))
def test_groups_do_not_see_one_another(name):
    lengths = {"lengths": lengths_of(4)} if name == "length_weighted" else {}
    first = call(name, SEVERAL[:4], 4, **lengths)
    assert torch.equal(call(name, SEVERAL, 4)[:4], first)


def test_leave_one_out_keeps_double_precision():
    """0.1, 0.2 and 0.7 less the means of the others; 3 / 2 is exact in float32, but 7 / 6 of a group of 7 is not."""
    rewards = torch.tensor([0.1, 0.2, 0.7, 0.3, 0.9, 0.4, 0.6], dtype=torch.float64)
    expected = [reward - (math.fsum(rewards.tolist()) - reward) / 6 for reward in rewards.tolist()]
    assert leave_one_out(rewards, 7).tolist() == pytest.approx(expected, abs=1e-15)


def test_dtypes():
    """Half precision is computed in single, where 1000.5 and 1000 differ; whole numbers become floats."""
    low = group_centered(torch.tensor([1.0, 2.0, 4.0, 4.5], dtype=torch.bfloat16), 4)
    assert low.dtype == torch.float32 and low.tolist() == [-1.875, -0.875, 1.125, 1.625]
    assert group_centered(torch.tensor([1, 2]), 2).tolist() == [-0.5, 0.5]
    assert not group_centered(torch.tensor([1.0, 2.0], requires_grad=True), 2).requires_grad


# --------------------------------------------------------------------------------------------- clipping and refusals


def test_clip_advantages():
    assert clip_advantages(torch.tensor([-7.0, 0.5, 9.0]), 5.0).tolist() == [-5.0, 0.5, 5.0]


@pytest.mark.parametrize(
    "run, message",
    [
        (lambda: group_centered(torch.zeros(6), 4), "6 rewards do not divide into groups of 4"),
        (lambda: group_normalized(torch.zeros(4), 4, std_ddof=2), "std_ddof must be 0 .* or 1 .*got 2"),
        (lambda: greedy_baseline(torch.zeros(4), 2, torch.zeros(4)), r"one reward per group, \[2\], got shape \[4\]"),
        (lambda: length_weighted(torch.zeros(4), 2, torch.zeros(2)), r"the rewards' shape \[4\], got \[2\]"),
        (lambda: mean_normalized(torch.tensor([1.0, -0.5]), 2), "rewards from 0 up, got -0.5"),
        (lambda: gae(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 3), 1, 1), r"one shape \[B, T\]"),
        (lambda: gae(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), 1.1, 1), r"lie in \[0, 1\], got 1.1"),
        (lambda: clip_advantages(torch.zeros(2), 0), "limit, which must be positive, got 0"),
        (lambda: clipped_value_loss(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2)), "of one shape, got"),
        (lambda: algorithm("remax").advantages(torch.zeros(2), 1), "needs greedy_rewards, and there are none"),
        (
            lambda: algorithm("grpo", advantage=lambda r, size: r.sum()).advantages(torch.zeros(4), 2),
            r"returned shape \[\] for 4 rewards",
        ),
    ],
)
def test_refusals(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_estimator_of_ones_own():
    def others(rewards, group_size, strength=3.0):
        groups = rewards.reshape(-1, group_size)
        return (strength * (groups - (groups.sum(1, keepdim=True) - groups) / (group_size - 1))).reshape(-1)

    objective = algorithm("grpo", advantage=others, advantage_clip=4.0)
    assert objective.advantages(torch.tensor([1.0, 2.0]), 2).tolist() == [-3.0, 3.0]
    assert objective.advantages(torch.tensor([1.0, 4.0]), 2).tolist() == [-4.0, 4.0]
    assert objective.advantage == "others" and objective.group_relative is None
    assert not objective.reads("greedy_rewards")


# ---- Advantages and rewards of PPO's tokens ----


def test_gae_by_hand():
    """delta = [0 + .6 - .5, 0 + .7 - .6, 1 - .7] = [.1, .1, .3]; A_3 = .3, A_2 = .1 + .95 x .3 = .385,
    A_1 = .1 + .95 x .385 = .46575. Returns are A + V.
    """
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), 1.0, 0.95)
    assert advantages[0].tolist() == pytest.approx([0.46575, 0.385, 0.3])
    assert returns[0].tolist() == pytest.approx([0.96575, 0.985, 1.0])


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
