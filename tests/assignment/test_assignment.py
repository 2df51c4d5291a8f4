"""Assignments: cases and their verdicts, known mistakes and other right answers, docstrings and solved text."""

from __future__ import annotations

import ast
import json
import math
import re
from functools import partial

import pytest
import torch

from tests.support import assignment_answers
from trl_ext.algorithms import PolicyObjective
from trl_ext.assignment.builder.outcomes import CLASSES, build_cases, uncaught
from trl_ext.assignment.builder.package import docstring_lines, package_files
from trl_ext.assignment.builder.spec import load_spec
from trl_ext.assignment.catalog import whole_losses
from trl_ext.assignment.catalog.catalog import TASKS, mistakes_of, task
from trl_ext.assignment.runtime.checks import call
from trl_ext.assignment.runtime.verdicts import LOG_OF_SIGMOID, verdict
from trl_ext.losses import PolicyScores

SPECS = ("rlhf_project", "reasoning")
SHIPPED = [each.function for name in SPECS for _, each in load_spec(name).functions()]


def judged(name: str, function, *, seed: int = 2, count: int = 8) -> list[str | None]:
    """The verdict on each case."""
    cases = build_cases(task(name), seed, count)
    return [verdict(call(function, case, CLASSES), case) for case in cases]


def failures(name: str, function) -> list[str]:
    return [found for found in judged(name, function) if found is not None]


# ---- Cases and mistakes ----


@pytest.mark.parametrize("name", TASKS)
def test_the_library_passes_and_every_mistake_is_caught_and_named(name):
    """For all functions that an assignment can ask for, on the hidden cases that a specification has by default.

    No hidden case is a visible one, and what students read of it has none of its texts.
    """
    given = task(name)
    visible = build_cases(given, 1, 8)
    cases = build_cases(given, 2, 8, others=visible)
    arguments = [json.dumps(case["arguments"], sort_keys=True) for case in (*visible, *cases)]
    assert len(set(arguments)) == len(arguments)
    for case in cases:
        assert verdict(call(given.function, case, CLASSES), case) is None, case["about"]
        for argument, value in case["arguments"].items():
            if isinstance(value, str):
                assert (f"{argument}={value!r}" in case["about"]) == (argument in ("kind", "loss_type"))
    assert uncaught(given, cases) == []
    for message, wrong in mistakes_of(name).items():
        verdicts = [verdict(call(partial(wrong, given.function), case, CLASSES), case) for case in cases]
        assert any(found and message in found for found in verdicts), (message, verdicts)


def test_the_documented_number_of_mistakes():
    """docs/course.md gives the 140 of the shipped assignments; all 68 functions have 187."""
    assert sum(len(mistakes_of(name)) for name in SHIPPED) == 140
    assert (len(TASKS), sum(len(mistakes_of(name)) for name in TASKS)) == (68, 187)


@pytest.mark.parametrize("name", SHIPPED)
def test_other_right_answers_pass(name):
    answer = getattr(assignment_answers, task(name).short_name)
    for seed in (1, 2, 3):
        assert set(judged(name, answer, seed=seed)) == {None}


def log_probs_with_entropy(model, input_ids, labels, return_token_entropy=False):
    log_probs = model(input_ids).logits.log_softmax(-1)
    result = {"log_probs": log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), "all": log_probs}
    return result | ({"token_entropy": -(log_probs.exp() * log_probs).sum(-1)} if return_token_entropy else {})


def test_parts_that_are_not_compared_may_have_a_gradient():
    assert failures("models.response_log_probs", log_probs_with_entropy) == []


# ---- Verdicts ----


def dpo(scores, *, beta=0.1):
    return task("losses.dpo").function(scores, beta=beta)


def in_place(scores, *, beta):
    losses = dpo(scores, beta=beta)
    scores.chosen.sub_(1)
    return losses


def half_detached(scores, *, beta):
    return -torch.nn.functional.logsigmoid(beta * (scores.margin + scores.rejected - scores.rejected.detach()))


@pytest.mark.parametrize(
    "function, part",
    [
        (lambda scores, *, beta: None, "got None: is there a return?"),
        (
            lambda scores, *, beta: dpo(scores, beta=beta).detach(),
            "no gradient reaches scores.chosen: is there a detach()",
        ),
        (lambda scores, *, beta: dpo(scores, beta=beta).tolist(), "expected a tensor"),
        (lambda scores, *, beta: dpo(scores, beta=beta)[:, None], "expected the shape [7], got [7, 1]"),
        (lambda scores, *, beta: dpo(scores, beta=beta).half(), "expected the dtype float64"),
        (in_place, "changes its argument scores.chosen in place"),
        (half_detached, "scores.rejected"),
        (lambda scores, *, beta: exit(), "ends the program"),
        (lambda scores, *, beta: 1 / 0, "raises ZeroDivisionError: division by zero"),
        (lambda scores: scores, "raises TypeError"),
    ],
)
def test_what_a_test_says(function, part):
    """The first case has 7 pairs."""
    assert part in judged("losses.dpo", function, seed=1, count=1)[0]


def cispo(log_ratio, log_probs, advantages, *, ratio_cap):
    return -log_ratio.exp().clamp(max=ratio_cap) * advantages.unsqueeze(1) * log_probs


def bradley_terry(chosen, rejected, *, margin=None, label_smoothing=0.0, centering=0.0):
    """With a term of weight 0, which times infinity is NaN: another outcome than the known mistake's."""
    logits = chosen - rejected - (0 if margin is None else margin)
    losses = -(1 - label_smoothing) * torch.log(torch.sigmoid(logits))
    return losses - label_smoothing * torch.log(torch.sigmoid(-logits)) + centering * (chosen + rejected) ** 2


def aggregate(losses, mask, kind, *, constant=None, token_count=None):
    sums = (losses * mask).sum(1)
    if kind == "token_mean":
        return sums.sum() / (mask.sum() if token_count is None else token_count)
    rows = sums / mask.sum(1).clamp(min=1) if kind == "sequence_mean" else sums
    return rows.mean() / (constant if kind == "constant" else 1)


@pytest.mark.parametrize(
    "name, function, message",
    [
        ("losses.cispo", cispo, "gradient flows through the capped ratio: detach it"),
        ("losses.dpo", lambda scores, *, beta: -(beta * scores.margin).sigmoid().log(), LOG_OF_SIGMOID),
        ("losses.bradley_terry", bradley_terry, LOG_OF_SIGMOID),
        ("losses.aggregate", aggregate, "0 times NaN is NaN"),
    ],
)
def test_wrong_answers_in_the_students_own_words_are_named(name, function, message):
    """A gradient, an infinity, and a product with the mask, which fails on the three cases of NaN alone."""
    found = failures(name, function)
    assert found and all(message in each for each in found), found
    assert name != "losses.aggregate" or (len(found) == 3 and "mask is left out" not in str(found))


def test_values_can_be_left_out():
    """The verdict says what is wrong and where, but neither the expected value nor the function's."""
    case = build_cases(task("losses.dpo"), 1, 1)[0]
    outcome = call(lambda scores, *, beta: -dpo(scores, beta=beta), case, CLASSES)
    expected = f"{case['expected']['output']['$tensor'][0]:.6g}"
    assert verdict(outcome, case).startswith(f"expected {expected} at [0], got -{expected}; this is what you get when")
    assert verdict(outcome, case, values=False) == "wrong value at [0]; this is what you get when the sign is flipped"


# ---- Functions of assignments alone ----


def test_sequence_log_probs_by_hand():
    """Logits 0 and log 3 give probabilities 1/4 and 3/4; log(3/4) + log(1/4) = log(3/16) for tokens 1 and 0.

    The last position's logits predict no token of the input, and no logits predict the first token.
    """
    logits = torch.tensor([[[0.0, math.log(3)]] * 3], dtype=torch.float64)
    ids, mask = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 1, 1]])
    assert whole_losses.sequence_log_probs(logits, ids, mask).item() == pytest.approx(math.log(3 / 16))


def test_minibatches_by_hand():
    parts = whole_losses.split_minibatches({"x": torch.tensor([10, 11, 12])}, torch.tensor([2, 0, 1]), 2)
    assert [part["x"].tolist() for part in parts] == [[12, 10], [11]]


@pytest.mark.parametrize("name, options", [("grpo", {}), ("dr_grpo", {"max_new_tokens": 7}), ("gspo", {})])
def test_whole_losses_are_the_algorithms_of_the_table(name, options):
    """The course's rows have clip 0.2 and a KL term of 0.01 averaged by itself."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = (-3 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    advantages = torch.tensor([1.0, -0.5, 0.3, -2.0], dtype=torch.float64)
    scores = PolicyScores(new, old, mask, advantages)
    expected = PolicyObjective(f"berkeley_{name}")(scores, ref_log_probs=ref, constant=7)
    function = getattr(whole_losses, f"{name}_loss")
    value = function(new, old, ref, mask, advantages, clip=0.2, kl_coef=0.01, **options)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


# ---- Text ----


@pytest.mark.parametrize("name", SPECS)
def test_starter_is_blank_and_solution_is_the_library(name):
    spec = load_spec(name)
    blank, given = package_files(spec, solution=False)
    solved, _ = package_files(spec, solution=True)
    assert set(given) <= {"trl_ext.data.packed_sft.encode_documents"}
    for module, each in spec.functions():
        node = {n.name: n for n in ast.parse(blank[module]).body if isinstance(n, ast.FunctionDef)}[each.name]
        assert len(node.body) == 2 and isinstance(node.body[1], ast.Raise)
        message = node.body[1].exc.args[0].value
        assert message.startswith(f"implement {each.name} in {spec.package}/{module}.py: ")
        docstring = ast.get_docstring(node)
        assert "Shapes: " in docstring
        assert re.search(r"arXiv|Williams|CS336|Shannon", docstring), each.function
        own = {n.name: n for n in ast.parse(solved[module]).body if isinstance(n, ast.FunctionDef)}[each.name]
        assert ast.dump(own.args) == ast.dump(node.args), "the signature is that of the starter"
        assert not any(isinstance(n, ast.Raise) and "implement" in ast.dump(n) for n in ast.walk(own))
    for text in (*blank.values(), *solved.values()):
        assert "preference_loss" not in text
        assert not re.search(r"(?m)^(from|import) trl_ext", text), "nothing of the library at the top of a file"


@pytest.mark.parametrize(
    "name, formula, kept",
    [
        ("losses.ipo", "1 / (2 beta)", ("arXiv 2310.12036", "The margin uses summed log-probabilities")),
        ("losses.cispo", "min(ratio", ("no gradient through the capped ratio",)),
        ("assignment.dr_grpo_loss", None, ("old_log_probs", "kl_coef is the coefficient", "max_new_tokens is")),
        ("rewards.r1_zero_reward", None, ("`</think> <answer>` with one space",)),
    ],
)
def test_docstrings_without_formulas_keep_the_conventions(name, formula, kept):
    full, shapes = (" ".join(" ".join(docstring_lines(task(name), s, "think")).split()) for s in ("full", "shapes"))
    assert formula is None or (formula in full and formula not in shapes)
    assert all(part in shapes for part in (*kept, "Hint: think")), shapes


@pytest.mark.parametrize("name", TASKS)
def test_docstrings_refer_to_no_other_docstring(name):
    """Students have this docstring alone, and perhaps not the function that it would send them to."""
    text = " ".join(docstring_lines(task(name), "full", ""))
    assert not re.search(r"see the module|are those of `(masked_sum|grpo_loss|r1_zero_reward)`", text), text
