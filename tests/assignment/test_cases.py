"""The functions of both assignments: the solutions are the library, and every known mistake is named."""

from __future__ import annotations

import math
import runpy
from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.support.naive_policy import algorithm
from trl_ext.assignment import cases
from trl_ext.assignment.cases import TASKS, build_cases
from trl_ext.assignment.checking import call, verdict
from trl_ext.assignment.mistakes import LOG_OF_SIGMOID, mistakes_of
from trl_ext.assignment.write import HERE
from trl_ext.losses import PolicyScores, PreferenceScores

SOLUTIONS = {
    name: value
    for file in sorted((HERE / "packages").glob("*/*/*.py"))
    for name, value in runpy.run_path(str(file)).items()
    if name in TASKS
}


def failures(name: str, function, seed: int = 2, count: int = 8) -> list[str]:
    verdicts = [verdict(call(function, case), case) for case in build_cases(name, seed, count)]
    return [said for said in verdicts if said is not None]


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_is_the_library(name):
    for seed in (1, 2, 3):
        assert failures(name, SOLUTIONS[name], seed) == []


@pytest.mark.parametrize("name", TASKS)
def test_every_mistake_is_named(name):
    """On the hidden cases of the shipped assignments, and none of them is a visible one."""
    built = build_cases(name, 2, 8)
    visible = {str(case["arguments"]) for case in build_cases(name, 1, 4)}
    assert not visible & {str(case["arguments"]) for case in built}
    assert mistakes_of(name)
    for says, wrong in mistakes_of(name):
        outcomes = [call(partial(wrong, TASKS[name].right), case, scores=PreferenceScores) for case in built]
        verdicts = [verdict(outcome, case) for outcome, case in zip(outcomes, built, strict=True)]
        assert any(said and says in said for said in verdicts), (says, verdicts)


# ---- What a test says ----


def in_place(scores, *, beta):
    losses = -logsigmoid(beta * (scores.chosen_log_ratio - scores.rejected_log_ratio))
    scores.chosen.sub_(1)
    return losses


@pytest.mark.parametrize(
    "function, part",
    [
        (lambda scores, *, beta: None, "got None: is there a return?"),
        (lambda scores, *, beta: -logsigmoid(beta * scores.margin.detach()), "the gradient of scores.chosen is 0: is"),
        (lambda scores, *, beta: -logsigmoid(beta * scores.margin)[:, None], "must have the shape [5], got [5, 1]"),
        (lambda scores, *, beta: -logsigmoid(beta * scores.margin).half(), "must have the dtype torch.float64"),
        (in_place, "changes its argument scores.chosen in place"),
        (lambda scores, *, beta: exit(), "ends the program"),
        (lambda scores: scores, "raises TypeError"),
    ],
)
def test_what_a_test_says(function, part):
    assert part in failures("dpo", function, count=1)[0]


def no_backward(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant):
    rows = -(policy_log_probs * response_mask).sum(1) / normalize_constant
    return rows.mean() / gradient_accumulation_steps, {}


@pytest.mark.parametrize(
    "name, function, message, count",
    [
        ("dpo", lambda scores, *, beta: -(beta * scores.margin).sigmoid().log(), LOG_OF_SIGMOID, 3),
        ("bradley_terry", lambda chosen, rejected, **_: (1 + (rejected - chosen).exp()).log(), LOG_OF_SIGMOID, None),
        ("masked_mean", lambda tensor, mask, dim: (tensor * mask).sum(dim) / mask.sum(dim), "0 times NaN is NaN", 3),
        ("sft_microbatch_step", no_backward, "backward() is not called", 9),
    ],
)
def test_mistakes_in_the_students_own_words_are_named(name, function, message, count):
    """An infinity, and a product with the mask, each on the three special cases alone, and a gradient."""
    found = failures(name, function)
    assert any(message in each for each in found), found
    assert count is None or len(found) == count


# ---- Functions that the library has only in parts ----


def test_log_probs_by_hand():
    """Logits 0 and log 3 give probabilities 1/4 and 3/4; log(3/4) + log(1/4) = log(3/16) for tokens 1 and 0."""
    logits = torch.tensor([[[0.0, math.log(3)]] * 3], dtype=torch.float64)
    found = cases.sequence_log_probs(logits, torch.tensor([[0, 1, 0]]), torch.tensor([[0, 1, 1]]))
    assert found.item() == pytest.approx(math.log(3 / 16))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo"])
def test_whole_losses_are_the_algorithms_of_the_table(name):
    """The course's rows have clip 0.2 and a KL term of 0.01 averaged by itself."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = (-3 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    advantages = torch.tensor([1.0, -0.5, 0.3, -2.0], dtype=torch.float64)
    scores = PolicyScores(new, old, mask, advantages, ref_log_probs=ref)
    expected, _ = algorithm(f"berkeley_{name}").loss(scores, constant=7)
    value = TASKS[f"{name}_loss"].right(new, old, ref, mask, advantages, 0.2, 0.01, max_new_tokens=7)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
