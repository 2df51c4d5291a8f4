"""Algorithms of a user: registered in a notebook or a file, refused where they cannot train, and explained."""

from __future__ import annotations

import math

import pytest
import torch

import trl_ext
from tests.support.naive_policy import REFERENCE, G, loss_on_the_batch
from tests.support.rollout_once import build, save_policy
from trl_ext.algorithms import PolicyObjective
from trl_ext.registry import policy_algorithm

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
        objective = PolicyObjective(f"{path}:{name}", beta=0.0)
        assert loss_on_the_batch(objective) == pytest.approx(-0.481745, abs=1e-6)
    assert objective.algorithm.name == "soft_gate" and objective.algorithm.group_size == 2
    assert objective.algorithm.summary == "A smooth gate in place of a clip."
    assert objective.advantages(torch.tensor([1.0, 3.0]), 2).tolist() == [0.5, 1.5]
    assert objective.surrogate == "own" and objective.group_relative is None
    assert PolicyObjective("soft_gate").needs_reference
    hot = PolicyObjective("soft_gate", options={"temperature": 3.0})
    assert "temperature 3.0" in hot.describe() and hot.to_dict()["options"] == {"temperature": 3.0}
    # Its KL term is the library's: 0.02 times the token mean of k3.
    plain = loss_on_the_batch(PolicyObjective("soft_gate", beta=0.0))
    with_kl = loss_on_the_batch(PolicyObjective("soft_gate"), ref_log_probs=REFERENCE)
    assert with_kl - plain == pytest.approx(0.02 * 0.006069, abs=1e-6)
    assert trl_ext.policy_algorithm is policy_algorithm


def test_one_loss_per_response():
    @policy_algorithm("per_sequence", ratio="sequence")
    def per_sequence(scores):
        return -scores.log_ratio.exp() * scores.advantages

    assert loss_on_the_batch(PolicyObjective("per_sequence")) == pytest.approx(-0.091033, abs=1e-6)


@pytest.mark.parametrize(
    "function, settings, message",
    [
        (lambda scores, *, power: scores.log_probs, {}, "'mine' needs the option 'power'"),
        (lambda scores: scores.log_ratio, {"ratio": "tokens"}, "unknown --ratio 'tokens'"),
        (lambda scores: scores.log_ratio, {"advantage": "nope"}, "unknown --advantage 'nope'"),
        (
            lambda scores: scores.log_ratio,
            {"ratio": "sequence", "aggregation": "token_mean"},
            "--ratio sequence and --aggregation token_mean",
        ),
    ],
)
def test_functions_that_cannot_train_are_refused(function, settings, message):
    policy_algorithm("mine", **settings)(function)
    with pytest.raises(ValueError, match=message):
        PolicyObjective("mine")


@pytest.mark.parametrize(
    "function, settings, message",
    [
        (lambda scores: -scores.log_probs.mean(), {}, r"'mine' returned shape \[\] for 2 responses of 3 tokens"),
        (lambda scores: 1.0, {}, "'mine' returned a float"),
        (lambda scores: scores.log_ratio, {"ratio": "none"}, "this algorithm has no importance ratio"),
    ],
)
def test_a_loss_is_one_per_token_or_per_response(function, settings, message):
    policy_algorithm("mine", **settings)(function)
    with pytest.raises(ValueError, match=message):
        loss_on_the_batch(PolicyObjective("mine"))


def test_masked_positions_may_be_infinite():
    policy_algorithm("mine")(lambda scores: scores.log_probs.masked_fill(scores.mask == 0, float("inf")))
    assert math.isfinite(loss_on_the_batch(PolicyObjective("mine")))


def test_overrides_of_ones_own():
    policy_algorithm("mine")(lambda scores, *, width=0.2: -scores.log_ratio * scores.advantages * width)
    with pytest.raises(ValueError, match="--algorithm mine and --surrogate clip contradict.*leave --surrogate out"):
        PolicyObjective("mine", surrogate="clip")
    with pytest.raises(ValueError, match="--epsilon 0.3 and --surrogate own contradict.*give your function an option"):
        PolicyObjective("mine", epsilon=0.3)
    with pytest.raises(ValueError, match="'mine' has no option 'widht': it takes width; did you mean 'width'"):
        PolicyObjective("mine", options={"widht": 0.3})
    assert PolicyObjective("mine", aggregation="sum", options={"width": 0.3}).aggregation == "sum"


def test_options_of_an_advantage_belong_to_it():
    settings = {"advantage": "group_rank", "advantage_options": {"scale": 3.0}}
    policy_algorithm("mine", **settings)(lambda scores: -scores.log_ratio * scores.advantages)
    assert PolicyObjective("mine").advantages(G, 4).tolist() == [3.0, 1.0, -1.0, -3.0]
    other = PolicyObjective("mine", advantage="group_centered")
    assert other.advantages(G, 4).tolist() == [2.25, 0.25, -0.75, -1.75]


def test_the_decorator_refuses():
    with pytest.raises(ValueError, match="'mine' has no setting 'advantages'.*did you mean 'advantage'"):
        policy_algorithm("mine", advantages="group_rank")
    with pytest.raises(ValueError, match="'mine' has no setting 'epsilon'"):
        policy_algorithm("mine", epsilon=0.2)
    with pytest.raises(ValueError, match="'grpo' is already defined"):
        policy_algorithm("grpo")(lambda scores: scores.log_ratio)


def test_training_on_an_algorithm_from_a_file(tiny_model_path, tmp_path):
    """`file.py:name` with a JSON option: `-A ratio` times 3 has three times the gradient of `grpo_no_clip` centred."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from trl_ext import policy_algorithm\n\n"
        '@policy_algorithm("scaled", advantage="group_centered")\n'
        "def scaled(scores, *, factor=1.0):\n"
        '    """Scaled."""\n'
        "    return -factor * scores.advantages * scores.log_ratio.exp()\n"
    )
    policy_path = save_policy(tiny_model_path, tmp_path / "policy")
    gradients = []
    for args in (
        {"algorithm": f"{path}:scaled", "algorithm_kwargs": '{"factor": 3}'},
        {"algorithm": "grpo_no_clip", "advantage": "group_centered"},
    ):
        trainer = build({"model": policy_path, "args": args}, str(tmp_path))
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        after = trainer.model.parameters()
        gradients.append(torch.cat([(old - new).flatten() for old, new in zip(before, after, strict=True)]).detach())
    assert ((gradients[0] - 3 * gradients[1]).norm() / gradients[0].norm()).item() < 1e-5
