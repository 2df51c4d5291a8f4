"""The methods of recipes/own: values and gradients of one batch to six decimals.

The batch: two responses of 3 and 2 tokens, advantages 1 and -1, and three policies.

    log-prob          -1    -0.7  -0.5   |  -2    -0.3
    when sampled      -1.3  -0.6  -0.55  |  -1.6  -0.5
    by the sampler    -1.8  -0.4  -0.65  |  -0.6  -1.4
"""

from __future__ import annotations

import copy
import math
import runpy
import statistics

import pytest
import torch

from tests.support import REPOSITORY
from tests.support.naive_policy import algorithm
from tests.support.rollout_once import OWN_RECIPES
from trl_ext.losses import PolicyScores, PreferenceObjective, PreferenceScores
from trl_ext.names import load_function, load_module

pytestmark = pytest.mark.usefixtures("own_tables")

NEW = torch.tensor([[-1.0, -0.7, -0.5], [-2.0, -0.3, -0.9]], dtype=torch.float64)
OLD = torch.tensor([[-1.3, -0.6, -0.55], [-1.6, -0.5, -0.9]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)
SAMPLER = torch.tensor([[-1.8, -0.4, -0.65], [-0.6, -1.4, -0.9]], dtype=torch.float64)
# name -> its file
FILES = {
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "vespo": "vespo",
    "luspo": "luspo",
    "a_star_po": "a_star_po",
}


def place(name: str) -> str:
    return f"{OWN_RECIPES / FILES.get(name, name)}.py:{name}"


def function(name: str, file: str | None = None):
    return load_function(f"{OWN_RECIPES / (file or FILES.get(name, name))}.py:{name}", "function")


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def evaluate(algorithm, new, *, old, mask, advantages, sampler=None):
    """The loss and its gradient."""
    log_probs = new.clone().requires_grad_()
    loss, _ = algorithm.loss(PolicyScores(log_probs, old, mask, advantages, sampler_log_probs=sampler), constant=7.0)
    loss.backward()
    return loss.item(), log_probs.grad


# ---- Surrogates ----


@pytest.mark.parametrize(
    "name, options, value, gradient",
    [
        ("luspo", {"clip_low": 0.2, "clip_high": 0.2}, -0.725519, [*[-0.543452] * 3, 0.452419, 0.452419]),
        ("luspo", {}, -0.505750, [0] * 5),
        # The sampler's ratios of the first response are 5/3 and less, and of the second 1.35 and 2.46, of which 2 is
        # left: w is exp(0.65) and exp(-0.506853).
        ("vespo", {}, -0.119154, [*[-0.047073] * 3, 0.096832, 0.096832]),
        # The reference's values are of a mean over tokens.
        ("dppo_tv", {}, 0.039648, [0, -0.148164, -0.232367, 0, 0.600833]),
        ("dppo_kl", {}, 0.039648, [0, -0.148164, -0.232367, 0, 0.600833]),
        ("clip_cov", {}, -0.416913, [-0.269972, -0.180967, -0.210254, 0, 0.244281]),
        # The only token in the window of covariances is clipped already: PPO.
        ("clip_cov", {"clip_low": 0.2, "clip_high": 0.2}, -0.226941, [0, -0.180967, -0.210254, 0, 0.244281]),
        ("kl_cov", {}, -0.202849, [-0.269972, -0.180967, -0.210254, -0.065936, 0.244281]),
    ],
)
def test_value_and_gradient_on_the_batch(name, options, value, gradient):
    changed = {"aggregation": "token_mean"} if name.startswith("dppo") else {}
    objective = algorithm(place(name), surrogate_options=options, **changed)
    loss, found = evaluate(objective, NEW, old=OLD, mask=MASK, advantages=ADVANTAGES, sampler=SAMPLER)
    assert loss == pytest.approx(value, abs=6e-7)
    assert found.flatten().tolist() == pytest.approx([*gradient, 0], abs=6e-7)


def test_vespo_without_a_record_of_the_sampler():
    expected = [*[-0.140645] * 3, 0.157725, 0.157725, 0]
    for sampler in (None, torch.full_like(OLD, math.nan), OLD):
        objective = algorithm(place("vespo"))
        loss, found = evaluate(objective, NEW, old=OLD, mask=MASK, advantages=ADVANTAGES, sampler=sampler)
        assert loss == pytest.approx(-0.053349, abs=6e-7)
        assert found.flatten().tolist() == pytest.approx(expected, abs=6e-7)


def test_dppo_of_certain_tokens_is_finite():
    """Probabilities that round to 1."""
    new = torch.tensor([[0.0, -1e-9, -2.0, 0.0]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0, 0.0, -2.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    loss = function("dppo_kl")(PolicyScores(new, old, torch.ones(1, 4), advantages)).sum()
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()
    assert new.grad[0, :2].tolist() == pytest.approx([-1.0, -1.0]) and new.grad[0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_is_of_the_old_policy_where_the_sampler_recorded_nothing(name):
    def found(sampler):
        return evaluate(algorithm(place(name)), NEW, old=OLD, mask=MASK, advantages=ADVANTAGES, sampler=sampler)[0]

    partly = SAMPLER.clone()
    partly[0, 1:] = float("nan")
    assert found(None) == found(OLD) == found(torch.full_like(OLD, float("nan"))) != found(SAMPLER)
    assert found(partly) == found(torch.where(partly.isnan(), OLD, SAMPLER))


def test_clip_cov_draws_with_the_seed():
    """Of 40 candidates, those with advantage 1 and a log-probability above the mean, 5 are drawn among 100 tokens."""
    values, mask = torch.full((10, 10), -2.0), torch.ones(10, 10)
    values[:4] = -1.0
    scores = PolicyScores(values, values, mask, torch.tensor([1.0] * 4 + [-1.0] * 6))

    def drawn(seed):
        torch.manual_seed(seed)
        # Covariances of 1.2 * 0.6 = 0.72 for the candidates and 0.8 * 0.4 = 0.32 for the others.
        return function("clip_cov")(scores, share=0.05, cov_low=0.5, cov_high=1.0) == 0

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    counts = sum(drawn(seed).long() for seed in range(50))
    assert counts[4:].sum() == 0 and counts[:4].sum() == 250 and counts[:4].min() > 0


# ---- GDPO ----

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
def test_gdpo_normalises_each_reward_function_by_itself(weights, expected):
    found = function("gdpo")(COMPONENTS.sum(1), 4, COMPONENTS, torch.tensor(weights))
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    objective = algorithm("grpo", advantage=place("gdpo"))
    known = {"components": COMPONENTS, "weights": torch.tensor(weights)}
    assert torch.equal(objective.advantages(COMPONENTS.sum(1), 4, **known), found)


def test_what_changes_nothing_in_gdpo():
    gdpo, weights = function("gdpo"), torch.ones(2)
    scaled = COMPONENTS * torch.tensor([1e4, 1.0])
    one, other = (gdpo(c.sum(1), 4, c, weights) for c in (COMPONENTS, scaled))
    # But for the 1e-4 that is added to a deviation.
    torch.testing.assert_close(one, other, atol=5e-4, rtol=0)
    # A function that says nothing of a response adds nothing there, and a response that could not be scored has 0.
    missing = COMPONENTS.clone()
    missing[4:, 1] = math.nan
    torch.testing.assert_close(gdpo(missing[:, 0], 4, missing, weights), one)
    unscored = COMPONENTS.index_fill(0, torch.tensor([1]), math.nan)
    assert gdpo(unscored.sum(1), 4, unscored, weights)[1] == 0


# ---- BCO ----


def test_bco():
    """Rewards .2, -.1 chosen and -.05, -.1 rejected: the shift is (0.05 - 0.075) / 2 = -0.0125, and a constant."""
    leaf = tensor(2.0, -1.0, -0.5, -1.0).requires_grad_()
    zero = torch.zeros(2, dtype=torch.float64)
    scores = PreferenceScores(*leaf.split(2), zero, zero)
    losses = function("bco")(scores, beta=0.1)
    logits = [0.2125, -0.0875, 0.0375, 0.0875]
    softplus = [math.log1p(math.exp(-x)) for x in logits]
    assert losses.tolist() == pytest.approx([softplus[0] + softplus[2], softplus[1] + softplus[3]], abs=1e-12)
    losses.sum().backward()
    slopes = [0.1 / (1 + math.exp(x)) for x in logits]
    assert leaf.grad.tolist() == pytest.approx([-slopes[0], -slopes[1], slopes[2], slopes[3]], abs=1e-12)
    objective = PreferenceObjective(place("bco"))
    assert objective.batch_coupled and objective.beta == 0.01


# ---- A*-PO ----


@pytest.mark.parametrize("beta, value", [(0.5, 0.477229), (0.05, 0.930685), (50.0, 0.251881)])
def test_the_optimal_value(beta, value):
    soft_value = function("soft_value", "a_star_po")
    assert soft_value([1, 0, 0, 1, 0, 0, 0, 0], 8, beta).item() == pytest.approx(value, abs=6e-7)
    # A reward that is missing is left out.
    both = soft_value([1.0, 0, math.nan, 0.5, 0.5, 0.5], 3, beta)
    assert both.tolist() == pytest.approx([soft_value([1.0, 0], 2, beta).item(), 0.5])


def test_the_loss_of_a_star_po():
    """The log-ratio is 5 and A is 0.28311: 2 (0.001 5 - 0.28311) 0.001 = -0.000556."""
    log_ratios = tensor([2.0, 3.0]).requires_grad_()
    scores = PolicyScores(
        log_ratios, None, torch.ones(1, 2), tensor(0.28311), ratio="none", ref_log_probs=0 * log_ratios.detach()
    )
    loss, _ = algorithm(place("a_star_po")).loss(scores)
    loss.backward()
    assert loss.item() == pytest.approx(0.077345, abs=6e-7)
    assert log_ratios.grad.flatten().tolist() == pytest.approx([-0.000556, -0.000556], abs=6e-7)


def test_the_reward_less_the_optimal_value():
    """A response whose reward or value is missing has no advantage."""
    reward = load_module(str(OWN_RECIPES / "a_star_po.py")).less_optimal_value(lambda scores: scores)
    assert reward([0.25, 0.5, None], scores=[1.0, None, 0.5]) == [0.75, None, None]


# ---- Evolution strategies ----


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


def test_it_runs(recipe, capsys):
    recipe |= {"UPDATES": 2, "POPULATION": 2, "PROMPTS_PER_UPDATE": 2, "MAX_NEW_TOKENS": 4}
    recipe["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("/")[0] for line in lines] == ["update  1", "update  2"]
