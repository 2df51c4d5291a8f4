"""Advantages: values worked by hand, rewards that could not be scored, invariances, and expected updates.

The group g = [3, 1, 0, -1]: mean 0.75, deviations 2.25, 0.25, -0.75, -1.75 with squares that sum to 8.75, so that the
standard deviation is sqrt(8.75 / 4) = 1.479020 (population) or sqrt(8.75 / 3) = 1.707825 (sample).
"""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext.advantages import (
    ADVANTAGES,
    batch_normalized,
    clip_advantages,
    gae,
    greedy_baseline,
    group_centered,
    group_normalized,
    leave_one_out,
    length_weighted,
    mean_normalized,
    no_baseline,
)
from trl_ext.algorithms import PolicyObjective

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
    # Mean 0.25; std sqrt(0.25 * 0.75) = 0.433013, or 0.5 of the sample.
    ("group_normalized", [1, 0, 0, 0], {}, [1.732047, -0.577349, -0.577349, -0.577349]),
    ("group_normalized", [1, 0, 0, 0], {"std_ddof": 1, "eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
    # 0.75 / 0.250001.
    ("mean_normalized", [1, 0, 0, 0], {}, [2.999988, -0.999996, -0.999996, -0.999996]),
    # Mean 0.275, deviations -0.075, 0.225, -0.275, 0.125; squares sum to 0.1475; std 0.221736, or 0.192029.
    ("group_normalized", [0.2, 0.5, 0, 0.4], {"std_ddof": 1}, [-0.338239, 1.014718, -1.240210, 0.563732]),
    ("group_normalized", [0.2, 0.5, 0, 0.4], {}, [-0.390565, 1.171694, -1.432071, 0.650941]),
]


@pytest.mark.parametrize("name, rewards, options, expected", TABLE)
def test_values(name, rewards, options, expected):
    assert call(name, rewards, 4, **options).tolist() == pytest.approx(expected, abs=1e-6)


def test_every_estimator_has_values_worked_by_hand():
    assert {name for name, *_ in TABLE} | {"batch_normalized"} == set(ADVANTAGES)


@pytest.mark.parametrize(
    "group_size, options, expected",
    [
        # The 8 rewards have mean 0.625 and squared deviations 9.875: sqrt(9.875 / 7) + 1e-4 = 1.187834 divides the
        # centred rewards 2.25, 0.25, -0.75, -1.75, 0.5, 0.5, -0.5, -0.5.
        (
            4,
            {"std_ddof": 1, "eps": 1e-4},
            [1.894203, 0.210467, -0.631401, -1.473269, 0.420934, 0.420934, -0.420934, -0.420934],
        ),
        # The centred rewards' own squares are 8.75 + 1: sqrt(9.75 / 8) = 1.103970.
        (
            4,
            {"std_of": "advantages", "eps": 0.0},
            [2.038099, 0.226455, -0.679366, -1.585188, 0.452911, 0.452911, -0.452911, -0.452911],
        ),
        # Deviations from 0.625 over sqrt(9.875 / 8) = 1.111024.
        (
            1,
            {"baseline": "batch", "eps": 0.0},
            [2.137667, 0.337526, -0.562544, -1.462614, 0.337526, 0.337526, -0.562544, -0.562544],
        ),
    ],
)
def test_batch_normalized(group_size, options, expected):
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


def test_equal_rewards_where_responses_are_not_compared():
    """ReMax has no signal where all are equal to the greedy response; REINFORCE++ where the whole batch is equal."""
    rewards = torch.full((4,), 0.1)
    assert greedy_baseline(rewards, 2, torch.full((2,), 0.1)).tolist() == [0.0] * 4
    assert batch_normalized(rewards, 2, baseline="batch").tolist() == [0.0] * 4
    assert no_baseline(torch.zeros(4), 2).tolist() == [0.0] * 4


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
    "name, options",
    [*((name, {}) for name in COMPARING), ("group_normalized", SAMPLE), ("batch_normalized", SAMPLE)],
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


# ------------------------------------------------------------------- expected updates for rewards of 0 and 1, exactly


# --------------------------------------------------------------------------------------------- clipping and refusals


def test_clip_advantages():
    assert clip_advantages(torch.tensor([-7.0, 0.5, 9.0]), 5.0).tolist() == [-5.0, 0.5, 5.0]
    with pytest.raises(ValueError, match="limit, which must be positive, got 0"):
        clip_advantages(torch.zeros(2), 0)


@pytest.mark.parametrize(
    "run, message",
    [
        (lambda: group_centered(torch.zeros(6), 4), "6 rewards do not divide into groups of 4"),
        (lambda: group_normalized(torch.zeros(4), 4, std_ddof=2), "std_ddof must be 0 .* or 1 .*got 2"),
        (lambda: greedy_baseline(torch.zeros(4), 2, torch.zeros(4)), r"one reward per group, \[2\], got shape \[4\]"),
        (lambda: length_weighted(torch.zeros(4), 2, torch.zeros(2)), r"the rewards' shape \[4\], got \[2\]"),
        (lambda: mean_normalized(torch.tensor([1.0, -0.5]), 2), "rewards from 0 up, got -0.5"),
        (lambda: batch_normalized(torch.zeros(4), 2, baseline="grup"), "'group' or 'batch', got 'grup'"),
        (lambda: gae(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 3), 1, 1), r"one shape \[B, T\]"),
        (lambda: gae(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), 1.1, 1), r"lie in \[0, 1\], got 1.1"),
        (lambda: PolicyObjective("remax").advantages(torch.zeros(2), 1), "needs greedy_rewards, and there are none"),
        (
            lambda: PolicyObjective("grpo", advantage=lambda r, size: r.sum()).advantages(torch.zeros(4), 2),
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

    objective = PolicyObjective("grpo", advantage=others, advantage_clip=4.0)
    assert objective.advantages(torch.tensor([1.0, 2.0]), 2).tolist() == [-3.0, 3.0]
    assert objective.advantages(torch.tensor([1.0, 4.0]), 2).tolist() == [-4.0, 4.0]
    assert objective.advantage == "others" and objective.group_relative is None
    assert not objective.reads("greedy_rewards")
