"""Advantages of steps and of reward functions, worked by hand: arXiv 2402.03300, 2505.11821 and 2601.05242."""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext.advantages import group_normalized, process_normalized, reward_decoupled, turn_level

NAN = math.nan
# The authors' normalisation.
AUTHORS = {"std_ddof": 1, "eps": 1e-4}


def rows_of(values) -> torch.Tensor:
    width = max(map(len, values))
    return torch.tensor([[*row, *[NAN] * (width - len(row))] for row in values], dtype=torch.float64)


@pytest.mark.parametrize(
    "options, expected",
    [
        # The five rewards have mean 0.46 and squared deviations that sum to 0.372: std sqrt(0.372 / 5) = 0.272764.
        # 0.9 is 1.613118 and 0.4 -0.219971, which sum to 1.393148; the others likewise from the end.
        ({"eps": 0.0}, [[1.393148, -0.219971, 0], [-1.393148, -1.906412, -0.586588]]),
        ({"eps": 0.0, "std_ddof": 1}, [[1.246069, -0.196748, 0], [-1.246069, -1.705147, -0.524661]]),
    ],
)
def test_process_rewards(options, expected):
    steps = rows_of([[0.9, 0.4], [0.6, 0.1, 0.3]])
    found = process_normalized(torch.zeros(2), 2, steps, **options)
    assert found.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_a_reward_of_the_whole_response_counts_for_its_last_step():
    steps, whole = rows_of([[0.9, 0.4], [0.6, 0.1, 0.3]]), torch.tensor([1.0, -2.0], dtype=torch.float64)
    together = rows_of([[0.9, 1.4], [0.6, 0.1, -1.7]])
    torch.testing.assert_close(process_normalized(whole, 2, steps), process_normalized(0 * whole, 2, together))


def test_splitting_a_step_keeps_the_signs():
    """A return grows with the number of steps that follow, but a good step stays good and a bad one bad."""
    whole = process_normalized(torch.zeros(2), 2, rows_of([[0.9, 0.4], [0.6, 0.1, 0.3]]))
    parts = process_normalized(torch.zeros(2), 2, rows_of([[0.9, 0.4, 0.4], [0.6, 0.1, 0.3]]))
    assert parts[0, [0, 2]].sign().equal(whole[0, :2].sign()) and parts[1].sign().equal(whole[1].sign())


def test_steps_without_a_signal():
    equal = rows_of([[0.1, 0.1, 0.1], [0.1], [0.1, 0.1], [0.1]])
    assert not process_normalized(torch.zeros(4), 4, equal).any()
    assert not turn_level(torch.full((2,), 0.1), 2, rows_of([[0.3, 0.2], [0.3, 0.2]])).any()
    # A response alone in its group, or left alone by one that could not be scored.
    assert not process_normalized(torch.zeros(2), 1, rows_of([[0.9, 0.4], [0.6, 0.1]])).any()
    assert not process_normalized(torch.tensor([0.0, NAN]), 2, rows_of([[0.9, 0.4], [0.6, 0.1]])).any()


def test_a_response_that_could_not_be_scored_is_left_out():
    steps, whole = [[0.9, 0.4], [0.6, 0.1, 0.3], [0.2]], torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    for function in (process_normalized, turn_level):
        expected = function(whole, 3, rows_of(steps))
        found = function(
            torch.cat([whole[:1], torch.tensor([NAN]), whole[1:]]), 4, rows_of([steps[0], [5.0, 1.0], *steps[1:]])
        )
        assert not found[1].any()
        torch.testing.assert_close(found[[0, 2, 3]], expected)


def test_turns():
    """Rewards of the first turn [1, 1, 0, 1], mean 0.75 and std 0.5; of the outcome [1, 0, 0, 1], std 0.577350."""
    outcome = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    found = turn_level(outcome, 4, rows_of([[1, 0], [1, 0], [0, 0], [1, 0]]), **AUTHORS)
    assert found[:, 0].tolist() == pytest.approx([1.365775, -0.365975, -2.365575, 1.365775], abs=1e-6)
    assert found[:, 1].tolist() == pytest.approx([0.865875, -0.865875, -0.865875, 0.865875], abs=1e-6)
    # Rewards of later turns belong to the outcome.
    later = turn_level(0 * outcome, 4, rows_of([[1, 1], [1, 0], [0, 0, 0], [1, 0, 1]]), **AUTHORS)
    assert later[:, :2].equal(found) and later[2:, 2].tolist() == found[2:, 1].tolist()
    # The third response has one turn, and so the normalised sum of both: 0 among [2, 1, 0, 2], std 0.957427.
    one = turn_level(outcome, 4, rows_of([[1, 0], [1, 0], [0], [1, 0]]), **AUTHORS)
    assert one[2].tolist() == pytest.approx([-1.305446, 0], abs=1e-6)
    assert one[[0, 1, 3]].equal(found[[0, 1, 3]])
    half = turn_level(outcome, 4, rows_of([[1, 0], [1, 0], [0, 0], [1, 0]]), coefficient=0.5, **AUTHORS)
    assert half[:, 0].tolist() == pytest.approx([1.115825, -0.615925, -1.615725, 1.115825], abs=1e-6)


COMPONENTS = torch.tensor(
    [[1, 0.2], [1, 0.8], [0, 0.5], [0, 0.5], [1, 1], [0, 1], [0, 1], [0, 1]], dtype=torch.float64
)


@pytest.mark.parametrize(
    "weights, expected",
    [
        # Sums of the normalised: [-0.358370, 2.090121, -0.865875, -0.865875] and [1.499700, -0.499900 x 3].
        ([1.0, 1.0], [-0.316107, 1.843631, -0.763762, -0.763762, 1.322839, -0.440946, -0.440946, -0.440946]),
        ([1.0, 0.5], [0.258438, 1.505284, -0.881861, -0.881861, 1.527387, -0.509129, -0.509129, -0.509129]),
    ],
)
def test_each_reward_function_normalised_by_itself(weights, expected):
    found = reward_decoupled(COMPONENTS.sum(1), 4, COMPONENTS, torch.tensor(weights), **AUTHORS)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_scale_of_a_reward_function_does_not_matter():
    weights = torch.ones(2)
    scaled = COMPONENTS * torch.tensor([10.0, 1.0])
    one, other = (reward_decoupled(c.sum(1), 4, c, weights, eps=0.0) for c in (COMPONENTS, scaled))
    torch.testing.assert_close(one, other)
    assert not torch.allclose(group_normalized(COMPONENTS.sum(1), 4), group_normalized(scaled.sum(1), 4), atol=0.1)
    # A function that says nothing of a response adds nothing there; equal rewards of every function are no signal.
    missing = COMPONENTS.clone()
    missing[4:, 1] = NAN
    torch.testing.assert_close(reward_decoupled(missing[:, 0], 4, missing, weights, eps=0.0), one)
    equal = torch.cat([COMPONENTS[:4], torch.full((4, 2), 0.1)])
    assert not reward_decoupled(equal.sum(1), 4, equal, weights)[4:].any()
