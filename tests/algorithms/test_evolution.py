"""`recipes/own/evolution.py`: its update against the definition, and a run of two updates."""

from __future__ import annotations

import copy
import runpy
import statistics

import pytest
import torch

from tests.support import REPOSITORY

SEEDS = [3, 1, 4]


@pytest.fixture
def recipe():
    """The recipe's globals, which its functions read."""
    found = runpy.run_path(str(REPOSITORY / "recipes" / "own" / "evolution.py"))
    return found["main"].__globals__


def policy() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def distance(model: torch.nn.Linear) -> float:
    """A reward: how near the parameters are to 1."""
    return -sum((parameter - 1).square().sum().item() for parameter in model.parameters())


def test_an_update_is_that_of_its_definition(recipe):
    """theta + learning_rate / N sum z_n e_n, on copies and in float64."""
    recipe |= {"PERTURBATION": 0.1, "LEARNING_RATE": 0.5}
    model, before = policy(), policy()
    rewards = recipe["update"](model, lambda: distance(model), SEEDS)
    noises = [recipe["noise"](before, seed) for seed in SEEDS]
    perturbed = []
    for noise in noises:
        member = copy.deepcopy(before)
        for parameter, step in zip(member.parameters(), noise, strict=True):
            parameter.data += 0.1 * step
        perturbed.append(distance(member))
    assert rewards.tolist() == pytest.approx(perturbed, rel=1e-6)
    mean, deviation = statistics.fmean(perturbed), statistics.pstdev(perturbed)
    weights = [(reward - mean) / deviation for reward in perturbed]
    for index, (own, start) in enumerate(zip(model.parameters(), before.parameters(), strict=True)):
        total = sum(weight * noise[index].double() for weight, noise in zip(weights, noises, strict=True))
        torch.testing.assert_close(own.double(), start.double() + 0.5 / 3 * total, rtol=0, atol=2e-6)


def test_equal_rewards_leave_the_parameters_as_they_were(recipe):
    model = policy()
    recipe["update"](model, lambda: 0.3, SEEDS)
    assert all(own.equal(start) for own, start in zip(model.parameters(), policy().parameters(), strict=True))


def test_parameters_of_one_shape_get_different_noise(recipe):
    first, second = recipe["noise"](torch.nn.ParameterList([torch.zeros(3, 4), torch.zeros(3, 4)]), 0)
    assert not first.equal(second)


def test_it_runs(recipe, capsys):
    recipe |= {"UPDATES": 2, "POPULATION": 2, "PROMPTS_PER_UPDATE": 2, "MAX_NEW_TOKENS": 4}
    recipe["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("/")[0] for line in lines] == ["update  1", "update  2"]
