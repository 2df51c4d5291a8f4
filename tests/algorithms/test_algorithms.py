"""The table of algorithms, losses against plain loops, refusals, algorithms of a user, and `--explain`."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch

import trl_ext
from tests.support.naive_policy import (
    ADVANTAGES,
    MASK,
    NEW,
    OLD,
    REFERENCE,
    G,
    algorithm,
    loss_on_the_batch,
    ragged_batch,
)
from trl_ext.algorithms import SETTINGS, algorithms, policy_algorithm
from trl_ext.algorithms.__main__ import explain, main
from trl_ext.losses import PolicyScores
from trl_ext.registry import preference_losses

NAMES = list(algorithms)


# -------------------------------------------------------------------------------------------------------- the table


def test_the_command_lists_every_algorithm():
    code = (
        "import runpy, sys; sys.argv = ['algorithms']; runpy.run_module('trl_ext.algorithms', run_name='__main__'); "
        "assert 'trl' not in sys.modules and 'transformers' not in sys.modules"
    )
    head, *lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert head.split()[0] == "algorithm" and [line.split()[0] for line in lines] == NAMES


# ------------------------------------------------------------------------------------------------------- advantages


def test_overrides_of_the_advantage():
    # A rank of scale 1: that of 2 belongs to gopo. And 2.25 clipped at 2.
    rank = algorithm("grpo", advantage="group_rank").advantages(G, 4)
    assert rank.tolist() == pytest.approx([1.0, 0.333333, -0.333333, -1.0], abs=1e-6)
    assert algorithm("dr_grpo", advantage_clip=2.0).advantages(G, 4).tolist() == [2.0, 0.25, -0.75, -1.75]
    # The course clips at 5: 100 responses, one of them right, have an advantage of sqrt(99) = 9.95.
    assert algorithm("berkeley_grpo").advantages(torch.eye(100)[0], 100)[0].item() == 5.0


# ----------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    "name, overrides, expected",
    [
        # The clip's row of the batch, worked in the tests of the losses.
        ("grpo", {"beta": 0.0}, -0.020667),
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
    objective = algorithm(name, **overrides)
    assert loss_on_the_batch(objective, ref_log_probs=REFERENCE) == pytest.approx(expected, abs=1e-6)


def test_the_generation_budget_of_dr_grpo():
    """-1.134705 / (2 C) with C = 4 given, unless a constant of one's own, 2, replaces it."""
    assert loss_on_the_batch(algorithm("dr_grpo"), constant=4) == pytest.approx(-0.141838, abs=1e-6)
    own = algorithm("dr_grpo", loss_constant=2.0)
    assert loss_on_the_batch(own, constant=4) == pytest.approx(-0.283676, abs=1e-6)
    with pytest.raises(ValueError, match="'constant' divides by constant, which must be positive, got None"):
        loss_on_the_batch(algorithm("dr_grpo"))


def test_weights_multiply_the_surrogate_and_not_the_kl_term():
    """Weights of 0 leave 0.04 times the mean k3 per sequence, (0.008391 + 0.002585) / 2."""
    objective = algorithm("grpo")
    nothing = loss_on_the_batch(objective, ref_log_probs=REFERENCE, weights=torch.zeros(2, 1))
    assert nothing == pytest.approx(0.04 * 0.005488, abs=1e-6)
    # The first response alone, and its second token alone: -1.052036 / 2 and -0.904837 / 3 / 2.
    objective = algorithm("grpo", beta=0.0)
    assert loss_on_the_batch(objective, weights=torch.tensor([[1.0], [0.0]])) == pytest.approx(-0.526018, abs=1e-6)
    one = torch.tensor([[0, 1.0, 0], [0, 0, float("nan")]])
    log_probs = NEW.clone().requires_grad_()
    loss, _ = objective.loss(PolicyScores(log_probs, OLD, MASK, ADVANTAGES), weights=one)
    loss.backward()
    assert loss.item() == pytest.approx(-0.150806, abs=1e-6)
    assert log_probs.grad.flatten().tolist() == pytest.approx([0, -0.150806, 0, 0, 0, 0], abs=1e-6)
    # One ratio per response, times a weight per token: -1.086904 / 6 from the first, shared by its three tokens.
    log_probs.grad = None
    scores = PolicyScores(log_probs, OLD, MASK, ADVANTAGES)
    loss, _ = algorithm("berkeley_gspo", beta=0.0).loss(scores, weights=one)
    loss.backward()
    assert loss.item() == pytest.approx(-0.181151, abs=1e-6)
    assert log_probs.grad.flatten().tolist() == pytest.approx([-0.060384] * 3 + [0, 0, 0], abs=1e-6)


def test_token_count_serves_both_terms():
    """Two parts, divided by the whole batch's 5 tokens and summed, are the whole batch."""
    objective = algorithm("dapo", beta=0.1, kl_aggregation="token_mean")
    whole = loss_on_the_batch(objective, REFERENCE)
    parts = []
    for i in range(2):
        part = [values[i : i + 1] for values in (NEW, OLD, MASK, ADVANTAGES, REFERENCE)]
        scores = PolicyScores(*part[:-1], ref_log_probs=part[-1])
        parts.append(objective.loss(scores, token_count=5)[0].item())
    assert sum(parts) == pytest.approx(whole, abs=1e-7)


@pytest.mark.parametrize("kl_aggregation", ["inside", "token_mean"])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_kl_term_and_its_gradient(ratio, correction, kl_aggregation):
    """The gradient of k3 = exp(-d) - 1 + d is 1 - exp(-d); times the token's ratio r, r (1 - exp(-d) + k3)."""
    new, old, reference, mask, advantages = ragged_batch(seed=11)
    log_probs, padding = new.clone().requires_grad_(), mask == 0
    overrides = {"kl_ratio_correction": correction, "kl_aggregation": kl_aggregation, "ratio": ratio, "beta": 0.3}
    objective = algorithm("grpo", **overrides)
    shown = reference.masked_fill(padding, float("nan"))
    loss, _ = objective.loss(PolicyScores(log_probs, old, mask, torch.zeros_like(advantages), ref_log_probs=shown))
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
    objective = algorithm("rloo")
    assert loss_on_the_batch(objective) == pytest.approx(loss_on_the_batch(algorithm("rloo", beta=0.0)))
    with pytest.raises(ValueError, match="--beta 0.04 needs the reference's log-probabilities"):
        loss_on_the_batch(algorithm("grpo"))


# ---- Refusals ----


@pytest.mark.parametrize(
    "name, overrides, flags",
    [
        ("gspo", {"epsilon": 0.2}, "--algorithm gspo and --epsilon 0.2"),
        ("grpo", {"surrogate": "reinforce"}, "--surrogate reinforce and --ratio token"),
        ("grpo", {"ratio": "sequence", "aggregation": "token_mean"}, "--ratio sequence and --aggregation token_mean"),
        ("grpo", {"ratio_cap": 5.0}, "--ratio_cap 5.0 and --surrogate clip"),
        ("cispo", {"epsilon": 0.2}, "--epsilon 0.2 and --surrogate cispo"),
        ("grpo_no_clip", {"dual_clip": 3.0}, "--dual_clip 3.0 and --surrogate no_clip"),
        ("dr_grpo", {"std_ddof": 1}, "--std_ddof 1 and --advantage group_centered"),
        ("grpo", {"loss_constant": 256}, "--loss_constant 256 and --aggregation sequence_mean"),
        ("dr_grpo", {"kl_in": "reward"}, "--kl_in reward and --beta 0.0"),
        ("dapo", {"kl_ratio_correction": True}, "--kl_ratio_correction True and --beta 0.0"),
        ("grpo", {"beta": 0.0, "kl_estimator": "k2"}, "--kl_estimator k2 and --beta 0.0"),
        ("rloo", {"beta": 0.0, "kl_in": "reward"}, "--kl_in reward and --beta 0.0"),
        ("grpo", {"kl_in": "reward"}, "--kl_in reward and --kl_estimator k3"),
        ("grpo", {"kl_estimator": "k2", "kl_ratio_correction": True}, "--kl_ratio_correction True and --kl_estimator"),
    ],
)
def test_contradictions_name_both_flags(name, overrides, flags):
    with pytest.raises(ValueError) as refusal:
        algorithm(name, **overrides)
    assert str(refusal.value).startswith(flags)


UP_TO_A_FACTOR = [("group_centered", "leave_one_out"), ("constant", "sum")]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_defined_by_its_settings(name):
    """Those that differ from its own by a factor only are the same algorithm."""
    choices = {
        "advantage": ["group_normalized", "group_centered", "leave_one_out", "no_baseline"],
        "ratio": ["token", "sequence", "none"],
        "surrogate": ["clip", "no_clip", "cispo", "reinforce"],
        "aggregation": ["sequence_mean", "token_mean", "constant", "sum"],
    }
    for flag in algorithms[name].defined_by:
        own = getattr(algorithms[name], flag)
        equal = next((pair for pair in UP_TO_A_FACTOR if own in pair), (own,))
        for value in equal:
            assert getattr(algorithm(name, **{flag: value}), flag) == value
        for value in {*choices[flag]} - {*equal}:
            with pytest.raises(ValueError, match=f"--algorithm {name} and --{flag} {value} contradict.*use --{flag} "):
                algorithm(name, **{flag: value})


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"epsilon": -0.1}, "--epsilon must be a number from 0 up, got -0.1"),
        ({"dual_clip": 1.0}, "--dual_clip must be above 1.*got 1.0"),
        ({"surrogate": "cispo", "ratio_cap": 0.2}, "--ratio_cap must be at least 1: it is the cap itself.*got 0.2"),
        ({"std_ddof": 2}, "--std_ddof must be 0 .population. or 1 .sample., got 2"),
        ({"advantage_clip": 0.0}, "--advantage_clip must be positive"),
        ({"advantage": "group_normalised"}, "unknown --advantage .* did you mean 'group_normalized'"),
        ({"ratio": "tokens"}, "unknown --ratio 'tokens'; did you mean 'token'"),
        ({"epsilonn": 0.1}, "no setting 'epsilonn'; did you mean 'epsilon'"),
        ({"surrogate_options": {"clip_high": 0.5}}, "no option .clip_high.: its settings are flags"),
        ({"surrogate_options": {"strength": 1.0}}, "'clip' has no option 'strength'"),
    ],
)
def test_values_out_of_range_and_unknown_names(overrides, message):
    with pytest.raises(ValueError, match=message):
        algorithm("grpo", **overrides)


def test_combinations_that_no_name_rules_out():
    """RLOO with PPO's clip, RLOO without KL, GRPO as REINFORCE, and what a replaced row keeps and drops."""
    clipped = algorithm("rloo", ratio="token", surrogate="clip")
    assert (clipped.epsilon, clipped.epsilon_high) == (0.2, 0.2)
    assert not algorithm("rloo", beta=0.0).needs_reference
    assert algorithm("dr_grpo", beta=0.01, kl_in="reward", kl_estimator="k1").kl_in == "reward"
    assert algorithm("grpo", surrogate="cispo").ratio_cap == 5.0
    assert algorithm("grpo", epsilon=0.1).epsilon_high == 0.1
    assert algorithm("dapo", epsilon=0.1).epsilon_high == 0.28
    assert algorithm("grpo", surrogate="reinforce", ratio="none").epsilon is None
    # What the first surrogate read is not refused under the second.
    assert algorithm("grpo", epsilon=0.1).replace(surrogate="cispo").epsilon is None
    once = algorithm("dapo", epsilon=0.1, beta=0.2, kl_estimator="k2")
    assert algorithm("dapo", epsilon=0.1).replace(beta=0.2).replace(kl_estimator="k2") == once


# ---- Algorithms of a user ----


pytestmark = pytest.mark.usefixtures("registries_as_before")


FILE = '''
import torch
from trl_ext import policy_algorithm

def halves(rewards, group_size):
    return rewards / 2

@policy_algorithm("soft_gate", advantage=halves, aggregation="token_mean", beta=0.02, group_size=2)
def gate(scores, *, temperature=1.0):
    """A smooth gate in place of a clip.

    More words.
    """
    ratio = scores.log_ratio.exp()
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * scores.advantages
'''


def test_an_algorithm_from_a_file(tmp_path):
    """The smooth gate 4 sigmoid(ratio - 1), with a gradient of 1 at ratio 1. For the ratios of the batch
    sigmoid(0.349859) = 0.586583, 0.476227, 0.512815 and 0.418318, 0.555126: 4 (-1.575625 + 0.973444) / 5."""
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    for name in ("gate", "soft_gate"):
        objective = algorithm(f"{path}:{name}", beta=0.0)
        assert loss_on_the_batch(objective) == pytest.approx(-0.481745, abs=1e-6)
    assert objective.name == "soft_gate" and objective.group_size == 2
    assert objective.summary == "A smooth gate in place of a clip."
    assert objective.advantages(torch.tensor([1.0, 3.0]), 2).tolist() == [0.5, 1.5]
    assert objective.surrogate == "own" and objective.group_relative is None
    assert algorithm("soft_gate").needs_reference
    hot = algorithm("soft_gate", surrogate_options={"temperature": 3.0})
    assert "temperature 3.0" in hot.describe() and hot.to_dict()["options"] == {"temperature": 3.0}
    # Its KL term is the library's: 0.02 times the token mean of k3.
    plain = loss_on_the_batch(algorithm("soft_gate", beta=0.0))
    with_kl = loss_on_the_batch(algorithm("soft_gate"), ref_log_probs=REFERENCE)
    assert with_kl - plain == pytest.approx(0.02 * 0.006069, abs=1e-6)
    assert trl_ext.policy_algorithm is policy_algorithm


def test_one_loss_per_response():
    @policy_algorithm("per_sequence", ratio="sequence")
    def per_sequence(scores):
        return -scores.log_ratio.exp() * scores.advantages

    assert loss_on_the_batch(algorithm("per_sequence")) == pytest.approx(-0.091033, abs=1e-6)


@pytest.mark.parametrize(
    "function, settings, message",
    [
        (lambda scores, *, power: scores.log_probs, {}, "'mine' needs the option 'power'"),
        (lambda scores: scores.log_ratio, {"ratio": "tokens"}, "unknown --ratio 'tokens'"),
        (lambda scores: -scores.log_probs.mean(), {}, r"'mine' returned shape \[\] for 2 responses of 3 tokens"),
        (lambda scores: scores.log_ratio, {"ratio": "none"}, "this algorithm has no importance ratio"),
    ],
)
def test_functions_that_are_refused(function, settings, message):
    with pytest.raises(ValueError, match=message):
        policy_algorithm("mine", **settings)(function)
        loss_on_the_batch(algorithm("mine"))


def test_masked_positions_may_be_infinite():
    policy_algorithm("mine")(lambda scores: scores.log_probs.masked_fill(scores.mask == 0, float("inf")))
    assert math.isfinite(loss_on_the_batch(algorithm("mine")))


def test_options_of_an_advantage_belong_to_it():
    settings = {"advantage": "group_rank", "advantage_options": {"scale": 3.0}}
    policy_algorithm("mine", **settings)(lambda scores: -scores.log_ratio * scores.advantages)
    assert algorithm("mine").advantages(G, 4).tolist() == [3.0, 1.0, -1.0, -3.0]
    other = algorithm("mine", advantage="group_centered")
    assert other.advantages(G, 4).tolist() == [2.25, 0.25, -0.75, -1.75]


def own(**settings):
    """The algorithm `mine` with settings of its own; its function has an option."""
    function = lambda scores, *, width=0.2: -scores.log_ratio * scores.advantages * width  # noqa: E731
    return policy_algorithm(settings.pop("name", "mine"), **settings)(function)


@pytest.mark.parametrize(
    ("registered", "overrides", "message"),
    [
        ({"epsilon": 0.2}, {}, "--epsilon 0.2 and --surrogate own contradict.*give your function an option"),
        ({"surrogate": "clip"}, {}, "--surrogate clip contradict.*a surrogate of its own"),
        ({"name": "grpo"}, {}, "'grpo' is already defined"),
        ({}, {"surrogate": "clip"}, "--algorithm mine and --surrogate clip contradict.*leave --surrogate out"),
        ({}, {"epsilon": 0.3}, "--epsilon 0.3 and --surrogate own contradict.*give your function an option"),
        ({}, {"surrogate_options": {"widht": 0.3}}, "it takes width; did you mean 'width'"),
    ],
)
def test_settings_that_ones_own_algorithm_does_not_take(registered, overrides, message):
    with pytest.raises(ValueError, match=message):
        own(**registered)
        algorithm("mine", **overrides)


# ---- Explanations ----


OWN = """
from trl_ext import policy_algorithm, preference_loss

@policy_algorithm("explained_gate", advantage="group_rank", beta=0.02)
def gate(scores, *, strength, width=0.5):
    return -scores.log_ratio * scores.advantages * strength

@preference_loss("explained_square", needs_reference=False, columns=("sure",), paper="2401.00001")
def square(scores, *, beta, tau=2.0, power):
    return (1 - beta * scores.margin).square()
"""


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", list(algorithms))
def test_an_algorithm_is_explained_with_the_settings_that_run(name):
    text, row = explain(name), algorithms[name]
    for flag in SETTINGS:
        value = getattr(row, flag)
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
        assert (f"\n--{flag} {shown}\n" in text) == (value is not None), flag
    for function in (row.advantage_function, row.function):
        assert inspect.getsource(function) in text + "\n"
    assert ("def kl_estimate(" in text) == row.needs_reference
    for flag in row.defined_by:
        assert f"defined by --{flag} {getattr(row, flag)}" in text


def test_a_preference_loss_is_explained_by_its_source():
    assert all(inspect.getsource(e.function).rstrip() in explain(n) for n, e in preference_losses.items())


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("gate", ["explained_gate: ", "--advantage group_rank", "--beta 0.02", "def gate(", "def kl_estimate("]),
        ("square", ["paper 2401.00001", "option tau 2", "option power (required)", "('sure',)"]),
    ],
)
def test_your_own(function, parts, own_file):
    text = explain(f"{own_file}:{function}")
    assert f"# {own_file}:" in text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", "no algorithm and no preference loss is called 'grop'; did you mean 'grpo'?"),
        ("{own}:squar", "did you mean 'square'?"),
    ],
)
def test_an_unknown_name_is_one_line(name, message, own_file, capsys):
    with pytest.raises(SystemExit):
        main(["--explain", name.format(own=own_file)])
    assert message in capsys.readouterr().err
