"""The table of algorithms: its rows, what overrides they permit, and the objective against plain loops."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from tests.support.naive_policy import (
    ADVANTAGES,
    MASK,
    NEW,
    OLD,
    REFERENCE,
    G,
    loss_on_the_batch,
    ragged_batch,
)
from trl_ext.algorithms import PolicyObjective, algorithms
from trl_ext.algorithms.__main__ import main
from trl_ext.losses import PolicyScores

NAMES = list(algorithms)


# -------------------------------------------------------------------------------------------------------- the table


ROWS = {
    "grpo": {"advantage": "group_normalized", "std_ddof": 0, "epsilon": 0.2, "epsilon_high": 0.2, "beta": 0.04},
    "dr_grpo": {"advantage": "group_centered", "std_ddof": None, "aggregation": "constant", "beta": 0.0},
    "gspo": {"ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "aggregation": "sequence_mean"},
    "rloo": {"advantage": "leave_one_out", "ratio": "none", "aggregation": "sum", "beta": 0.03, "kl_in": "reward"},
    "remax": {"advantage": "greedy_baseline", "ratio": "none", "kl_estimator": "k1", "aggregation": "sum"},
    "reinforce": {"advantage": "no_baseline", "surrogate": "reinforce", "aggregation": "sequence_mean", "beta": 0.0},
    "reinforce_with_baseline": {"std_ddof": 1, "surrogate": "reinforce", "aggregation": "sequence_mean"},
    "grpo_no_clip": {"surrogate": "no_clip", "ratio": "token", "std_ddof": 1, "aggregation": "sequence_mean"},
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28, "aggregation": "token_mean", "beta": 0.0},
    "dapo_full": {"epsilon": 0.2, "epsilon_high": 0.28, "aggregation": "token_mean", "beta": 0.0},
    "cispo": {"surrogate": "cispo", "ratio_cap": 5.0, "aggregation": "token_mean", "epsilon": None},
    "gopo": {"advantage": "group_rank", "surrogate": "clip", "ratio": "token", "aggregation": "token_mean"},
    "max_rl": {"advantage": "mean_normalized", "surrogate": "clip", "ratio": "token", "aggregation": "token_mean"},
    "opo": {"advantage": "length_weighted", "surrogate": "reinforce", "ratio": "none", "aggregation": "token_mean"},
    "reinforce_plus_plus_baseline": {"advantage": "batch_normalized", "ratio": "token", "aggregation": "token_mean"},
    "sapo": {"surrogate": "sapo", "ratio": "token", "aggregation": "sequence_mean", "advantage": "group_normalized"},
    "gmpo": {"surrogate": "gmpo", "ratio": "token", "aggregation": "sequence_mean", "advantage": "group_normalized"},
    "berkeley_grpo": {"epsilon": 0.2, "beta": 0.01, "kl_aggregation": "token_mean", "advantage_clip": 5.0},
    "berkeley_dr_grpo": {"advantage": "group_centered", "aggregation": "constant", "kl_aggregation": "token_mean"},
    "berkeley_gspo": {"ratio": "sequence", "epsilon": 0.2, "epsilon_high": 0.2, "aggregation": "sequence_mean"},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_its_paper(name):
    settings = PolicyObjective(name).to_dict()
    assert {key: settings[key] for key in ROWS[name]} == ROWS[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_row_describes_itself(name):
    objective = PolicyObjective(name)
    assert json.loads(json.dumps(objective.to_dict())) == objective.to_dict()
    line = objective.describe()
    assert line.startswith(f"{name} (advantage {objective.advantage}") and "\n" not in line
    assert ("beta" in line) == (objective.beta > 0) and "None" not in line
    assert algorithms[name].summary and algorithms[name].paper


def test_what_an_algorithm_needs():
    assert [n for n in NAMES if PolicyObjective(n).reads("greedy_rewards")] == ["remax"]
    assert [n for n in NAMES if not PolicyObjective(n).group_relative] == ["remax", "reinforce"]
    referenced = {n for n in NAMES if PolicyObjective(n).needs_reference}
    assert referenced == {"grpo", "rloo", "remax", "reinforce_plus_plus_baseline"} | {n for n in NAMES if "berk" in n}
    assert not PolicyObjective("grpo", beta=0.0).needs_reference


def test_the_command_lists_every_algorithm():
    code = (
        "import runpy, sys; sys.argv = ['algorithms']; runpy.run_module('trl_ext.algorithms', run_name='__main__'); "
        "assert 'trl' not in sys.modules and 'transformers' not in sys.modules"
    )
    head, *lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert head.split()[0] == "algorithm"
    assert [line.split()[0] for line in lines] == NAMES
    column = head.index("KL")
    assert [line[column:].split()[0] for line in lines][:5] == ["0.04", "none", "none", "0.03", "0.05"]


def test_the_command_as_json(capsys):
    main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["algorithm"] for row in rows] == NAMES
    assert rows[0]["beta"] == 0.04 and rows[0]["paper"] == "2402.03300" and rows[0]["group_size"] == 8


# ------------------------------------------------------------------------------------------------------- advantages


def test_overrides_of_the_advantage():
    sample = PolicyObjective("grpo", std_ddof=1, advantage_eps=1e-4).advantages(G, 4)
    assert sample.tolist() == pytest.approx([1.317388, 0.146376, -0.439129, -1.024635], abs=1e-6)
    # A rank of scale 1: that of 2 belongs to gopo. And 2.25 clipped at 2.
    rank = PolicyObjective("grpo", advantage="group_rank").advantages(G, 4)
    assert rank.tolist() == pytest.approx([1.0, 0.333333, -0.333333, -1.0], abs=1e-6)
    assert PolicyObjective("dr_grpo", advantage_clip=2.0).advantages(G, 4).tolist() == [2.0, 0.25, -0.75, -1.75]
    # The course clips at 5: 100 responses, one of them right, have an advantage of sqrt(99) = 9.95.
    rewards = torch.zeros(100)
    rewards[0] = 1.0
    assert PolicyObjective("berkeley_grpo").advantages(rewards, 100)[0].item() == 5.0


# ------------------------------------------------------------------------------------------- the objective as a loss


@pytest.mark.parametrize(
    "name, overrides, expected",
    [
        # The rows of the batch, worked in the tests of the losses.
        ("grpo", {"beta": 0.0}, -0.020667),
        ("dapo", {}, -0.242941),
        ("dapo", {"epsilon_high": 0.2}, -0.226941),
        ("dr_grpo", {"loss_constant": 4.0}, -0.141838),
        ("dr_grpo", {"aggregation": "sum"}, -0.567353),
        ("gspo", {}, -0.000350),
        ("berkeley_gspo", {"beta": 0.0}, -0.091033),
        ("cispo", {}, 0.160364),
        ("cispo", {"ratio_cap": 1.2}, 0.131676),
        ("grpo_no_clip", {}, -0.078064),
        ("reinforce_with_baseline", {}, -0.208333),
        ("grpo", {"ratio": "sequence", "aggregation": "sum", "beta": 0.0}, -0.725519),
        # k3 of -0.1, 0.2, -0.05 and 0, -0.1: 0.005171, 0.018731, 0.001271, 0, 0.005171. Inside, 0.04 times the mean
        # of their means 0.008391 and 0.002585 is added; weighted by the ratios, 0.040 (0.008422 + 0.003158) / 2.
        ("grpo", {}, -0.020448),
        ("grpo", {"kl_ratio_correction": True}, -0.020436),
        # By itself: 0.04 times the token mean 0.006069.
        ("grpo", {"kl_aggregation": "token_mean"}, -0.020425),
        ("berkeley_grpo", {"beta": 0.04}, -0.020425),
        ("berkeley_grpo", {"beta": 0.04, "kl_aggregation": "inside"}, -0.020448),
    ],
)
def test_values_on_the_batch(name, overrides, expected):
    objective = PolicyObjective(name, **overrides)
    assert loss_on_the_batch(objective, ref_log_probs=REFERENCE) == pytest.approx(expected, abs=1e-6)


def test_the_generation_budget_of_dr_grpo():
    """-1.134705 / (2 C) with C = 4 given, unless a constant of one's own, 2, replaces it."""
    assert loss_on_the_batch(PolicyObjective("dr_grpo"), constant=4) == pytest.approx(-0.141838, abs=1e-6)
    own = PolicyObjective("dr_grpo", loss_constant=2.0)
    assert loss_on_the_batch(own, constant=4) == pytest.approx(-0.283676, abs=1e-6)
    with pytest.raises(ValueError, match="'constant' divides by constant, which must be positive, got None"):
        loss_on_the_batch(PolicyObjective("dr_grpo"))


def test_weights_multiply_the_surrogate_and_not_the_kl_term():
    """Weights of 0 leave 0.04 times the mean k3 per sequence, (0.008391 + 0.002585) / 2."""
    objective = PolicyObjective("grpo")
    nothing = loss_on_the_batch(objective, ref_log_probs=REFERENCE, weights=torch.zeros(2, 1))
    assert nothing == pytest.approx(0.04 * 0.005488, abs=1e-6)
    # The first response alone, and its second token alone: -1.052036 / 2 and -0.904837 / 3 / 2.
    objective = PolicyObjective("grpo", beta=0.0)
    assert loss_on_the_batch(objective, weights=torch.tensor([[1.0], [0.0]])) == pytest.approx(-0.526018, abs=1e-6)
    one = torch.tensor([[0, 1.0, 0], [0, 0, float("nan")]])
    log_probs = NEW.clone().requires_grad_()
    loss = objective(PolicyScores(log_probs, OLD, MASK, ADVANTAGES), weights=one)
    loss.backward()
    assert loss.item() == pytest.approx(-0.150806, abs=1e-6)
    assert log_probs.grad.flatten().tolist() == pytest.approx([0, -0.150806, 0, 0, 0, 0], abs=1e-6)
    # One ratio per response, times a weight per token: -1.086904 / 6 from the first, shared by its three tokens.
    log_probs.grad = None
    loss = PolicyObjective("berkeley_gspo", beta=0.0)(PolicyScores(log_probs, OLD, MASK, ADVANTAGES), weights=one)
    loss.backward()
    assert loss.item() == pytest.approx(-0.181151, abs=1e-6)
    assert log_probs.grad.flatten().tolist() == pytest.approx([-0.060384] * 3 + [0, 0, 0], abs=1e-6)


def test_token_count_serves_both_terms():
    """Two parts, divided by the whole batch's 5 tokens and summed, are the whole batch."""
    objective = PolicyObjective("dapo", beta=0.1, kl_aggregation="token_mean")
    whole = objective(PolicyScores(NEW, OLD, MASK, ADVANTAGES), ref_log_probs=REFERENCE)
    parts = [
        objective(
            PolicyScores(NEW[i : i + 1], OLD[i : i + 1], MASK[i : i + 1], ADVANTAGES[i : i + 1]),
            ref_log_probs=REFERENCE[i : i + 1],
            token_count=5,
        )
        for i in range(2)
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-7)


@pytest.mark.parametrize("kl_aggregation", ["inside", "token_mean"])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_kl_term_and_its_gradient(ratio, correction, kl_aggregation):
    """The gradient of k3 = exp(-d) - 1 + d is 1 - exp(-d); times the token's ratio r, r (1 - exp(-d) + k3)."""
    new, old, reference, mask, advantages = ragged_batch(seed=11)
    log_probs, padding = new.clone().requires_grad_(), mask == 0
    overrides = {"kl_ratio_correction": correction, "kl_aggregation": kl_aggregation, "ratio": ratio, "beta": 0.3}
    objective = PolicyObjective("grpo", **overrides)
    scores = PolicyScores(log_probs, old, mask, torch.zeros_like(advantages))
    loss = objective(scores, ref_log_probs=reference.masked_fill(padding, float("nan")))
    loss.backward()

    k3 = (reference - new).exp() - 1 + new - reference
    slope = 1 - (reference - new).exp()
    count, ratios = mask.double(), (new - old).exp()
    length = count.sum(1, keepdim=True).clamp(min=1)
    if ratio == "sequence":
        ratios = (((new - old) * mask).sum(1, keepdim=True) / length).exp()
    weight = 0.3 / count.sum() if kl_aggregation == "token_mean" else 0.3 / (length * len(mask))
    if not correction:
        expected, expected_slope = k3, slope
    elif ratio == "token":
        expected, expected_slope = ratios * k3, ratios * (slope + k3)
    else:
        # A token moves the ratio of every token of its response by 1 / L of it.
        expected, expected_slope = ratios * k3, ratios * (slope + (k3 * mask).sum(1, keepdim=True) / length)
    assert loss.item() == pytest.approx((weight * expected * mask).sum().item(), abs=1e-12)
    assert torch.allclose(log_probs.grad, weight * expected_slope * mask, atol=1e-12)


def test_no_kl_in_the_loss_where_it_is_in_the_reward():
    objective = PolicyObjective("rloo")
    assert loss_on_the_batch(objective) == pytest.approx(loss_on_the_batch(PolicyObjective("rloo", beta=0.0)))
    with pytest.raises(ValueError, match="--beta 0.04 needs the reference's log-probabilities"):
        loss_on_the_batch(PolicyObjective("grpo"))


def test_the_reference_may_come_with_the_scores():
    """0.1 times k3, `e^-0.5 + 0.5 - 1` for the first token and 0 for the second."""
    log_probs, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
    scores = PolicyScores(log_probs, log_probs, torch.ones(1, 2), torch.zeros(1, 1), ref_log_probs=reference)
    objective = PolicyObjective("grpo", beta=0.1)
    expected = 0.1 * (math.exp(-0.5) - 0.5) / 2
    assert objective(scores).item() == pytest.approx(expected, rel=1e-5)
    assert objective(scores, ref_log_probs=log_probs).item() == 0
    assert not objective.clamped(scores).any()
