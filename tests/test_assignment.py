"""Assignments: specifications, cases and their verdicts, known mistakes and other right answers, the files' text."""

from __future__ import annotations

import ast
import math
import re
from functools import partial

import pytest
import torch

from tests import assignment_answers
from trl_ext.algorithms import PolicyObjective
from trl_ext.assignment import references
from trl_ext.assignment.building import build_cases, docstring_lines, package_files, uncaught
from trl_ext.assignment.catalog import TASKS, task
from trl_ext.assignment.mistakes import mistakes_of
from trl_ext.assignment.runtime.checks import call, encode
from trl_ext.assignment.runtime.verdicts import verdict
from trl_ext.assignment.spec import AssignmentSpec, load_spec
from trl_ext.losses import PolicyScores

CLASSES = "trl_ext.losses"
SPECS = ("rlhf_project", "reasoning")
SHIPPED = [each.function for name in SPECS for _, each in load_spec(name).functions()]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- Cases and mistakes ----


@pytest.mark.parametrize("name", TASKS)
def test_the_library_passes_and_every_mistake_is_caught_and_named(name):
    """For all functions that an assignment can ask for, on the hidden cases that a specification has by default."""
    given = task(name)
    cases = build_cases(given, 2, 8, nan_padding=True)
    for case in cases:
        assert verdict(call(given.function, case, CLASSES), case) is None, case["about"]
    assert uncaught(given, cases) == []
    for mistake in mistakes_of(name):
        verdicts = [verdict(call(partial(mistake.function, given.function), case, CLASSES), case) for case in cases]
        assert any(found and mistake.message in found for found in verdicts), (mistake.name, verdicts)


@pytest.mark.parametrize("name", SHIPPED)
def test_other_right_answers_pass(name):
    given = task(name)
    answer = getattr(assignment_answers, given.short_name)
    for seed in (1, 2, 3):
        for case in build_cases(given, seed, 8, nan_padding=True):
            assert verdict(call(answer, case, CLASSES), case) is None, (seed, case["about"])


def test_there_are_many_mistakes():
    """The shipped assignments name over 80; among them the six that every course sees."""
    messages = [mistake.message for name in SHIPPED for mistake in mistakes_of(name)]
    assert len(messages) > 80
    for part in (
        "sign is flipped",
        "summed: take their mean",
        "sample's standard deviation",
        "not shifted",
        "minimum is missing",
        "gradient flows through the old log-probabilities",
    ):
        assert any(part in message for message in messages), part


# ---- Verdicts ----


def dpo_case() -> dict:
    return build_cases(task("losses.dpo"), 1, 1, nan_padding=True)[0]


def judged(function, name: str = "losses.dpo", number: int = 0) -> str | None:
    case = build_cases(task(name), 1, 8, nan_padding=True)[number]
    return verdict(call(function, case, CLASSES), case)


def library(name: str):
    return task(name).function


def in_place(scores, *, beta):
    losses = library("losses.dpo")(scores, beta=beta)
    scores.chosen.sub_(1)
    return losses


@pytest.mark.parametrize(
    "function, part",
    [
        (lambda scores, *, beta: None, "got None: is there a return?"),
        (lambda scores, *, beta: library("losses.dpo")(scores, beta=beta).detach(), "has no gradient"),
        (lambda scores, *, beta: library("losses.dpo")(scores, beta=beta).tolist(), "expected a tensor"),
        (
            lambda scores, *, beta: library("losses.dpo")(scores, beta=beta)[:, None],
            "expected the shape [7], got [7, 1]",
        ),
        (lambda scores, *, beta: library("losses.dpo")(scores, beta=beta).half(), "expected the dtype float64"),
        (lambda scores, *, beta: library("losses.dpo")(scores, beta=beta) * 3, "every value is 3 times"),
        (in_place, "changes its argument scores.chosen in place"),
        (lambda scores, *, beta: exit(), "ends the program"),
        (lambda scores, *, beta: 1 / 0, "raises ZeroDivisionError: division by zero"),
        (lambda scores: scores, "raises TypeError"),
    ],
)
def test_what_a_test_says(function, part):
    """The first case has 7 pairs: its arguments' length."""
    assert len(dpo_case()["arguments"]["scores"]["fields"]["chosen"]["$tensor"]) == 7
    assert part in judged(function)


def test_float32_is_enough_where_the_arguments_are_float64():
    def in_float32(scores, *, beta):
        return -torch.nn.functional.logsigmoid(beta * scores.margin.float())

    assert judged(in_float32) is None


def test_padding_that_is_nan_is_named():
    """0 times NaN is NaN, so that a product with the mask lets it through."""

    def product(values, mask, dim=None):
        return (values * mask).sum() if dim is None else (values * mask).sum(dim)

    given = task("losses.masked_sum")
    ordinary = build_cases(given, 1, 6, nan_padding=False)
    assert all(verdict(call(product, case, CLASSES), case) is None for case in ordinary)
    strict = build_cases(given, 1, 6, nan_padding=True)
    found = [verdict(call(product, case, CLASSES), case) for case in strict if case.get("special") == "nan"]
    assert found and all("0 times NaN is NaN" in each for each in found)


def test_a_gradient_is_compared_and_not_only_the_value():
    """Of DPO, the right value with the reference's part of the margin detached from nothing but the chosen side."""

    def half(scores, *, beta):
        return -torch.nn.functional.logsigmoid(beta * (scores.margin + scores.rejected - scores.rejected.detach()))

    found = judged(half)
    assert "no gradient reaches scores.rejected" in found or "gradient with respect to scores.rejected" in found


def test_values_survive_json():
    values = torch.tensor([1.5, math.nan, math.inf])
    assert encode(values)["$tensor"] == [1.5, "nan", "inf"]
    assert encode({"a": (1, None, math.nan)}) == {"a": [1, None, {"$number": "nan"}]}
    assert encode(object()) == {"$other": "object"}


# ---- The whole steps ----


def test_sequence_log_probs_by_hand():
    """Logits 0 and log 3 give probabilities 1/4 and 3/4; log(3/4) + log(1/4) = log(3/16) for tokens 1 and 0.

    The last position's logits are of no token, and the first token has none about it.
    """
    logits = torch.tensor([[[0.0, math.log(3)]] * 3], dtype=torch.float64)
    ids, mask = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 1, 1]])
    assert references.sequence_log_probs(logits, ids, mask).item() == pytest.approx(math.log(3 / 16))


def test_minibatches_by_hand():
    parts = references.split_minibatches({"x": torch.tensor([10, 11, 12])}, torch.tensor([2, 0, 1]), 2)
    assert [part["x"].tolist() for part in parts] == [[12, 10], [11]]
    with pytest.raises(ValueError, match="minibatch_size must be at least 1, got 0"):
        references.split_minibatches({}, torch.arange(3), 0)


@pytest.mark.parametrize(
    "function, algorithm, options",
    [
        (references.grpo_loss, "berkeley_grpo", {}),
        (references.dr_grpo_loss, "berkeley_dr_grpo", {"max_new_tokens": 7}),
        (references.gspo_loss, "berkeley_gspo", {}),
    ],
)
def test_whole_losses_are_the_algorithms_of_the_table(function, algorithm, options):
    """The course's rows have clip 0.2 and a KL term of 0.01 averaged by itself."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = (-3 * torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    advantages = torch.tensor([1.0, -0.5, 0.3, -2.0], dtype=torch.float64)
    scores = PolicyScores(new, old, mask, advantages)
    expected = PolicyObjective(algorithm)(scores, ref_log_probs=ref, constant=7)
    assert function(new, old, ref, mask, advantages, clip=0.2, kl_coef=0.01, **options).item() == pytest.approx(
        expected.item(), rel=1e-12
    )


# ---- Text ----


@pytest.mark.parametrize("name", SPECS)
def test_starter_is_blank_and_solution_is_the_library(name):
    spec = load_spec(name)
    blank, given = package_files(spec, solution=False)
    solved, _ = package_files(spec, solution=True)
    assert set(given) <= {"trl_ext.data.packed_sft.encode_documents"}
    for module, each in spec.functions():
        node = {n.name: n for n in ast.parse(blank[module]).body if isinstance(n, ast.FunctionDef)}[each.known_as]
        assert len(node.body) == 2 and isinstance(node.body[1], ast.Raise)
        message = node.body[1].exc.args[0].value
        assert message.startswith(f"implement {each.known_as} in {spec.package}/{module}.py: ")
        docstring = ast.get_docstring(node)
        assert "Shapes: " in docstring
        assert re.search(r"arXiv|Williams|CS336|Shannon", docstring), each.function
        own = {n.name: n for n in ast.parse(solved[module]).body if isinstance(n, ast.FunctionDef)}[each.known_as]
        assert ast.dump(own.args) == ast.dump(node.args), "the signature is that of the starter"
        assert not any(isinstance(n, ast.Raise) and "implement" in ast.dump(n) for n in ast.walk(own))
    for text in (*blank.values(), *solved.values()):
        assert "preference_loss" not in text
        assert not re.search(r"(?m)^(from|import) trl_ext", text), "nothing of the library at the top of a file"


def test_docstrings_without_formulas():
    """`shapes` keeps arguments, shapes and the paper, and no formula."""
    full = "\n".join(docstring_lines(task("losses.ipo"), "full", ""))
    shapes = "\n".join(docstring_lines(task("losses.ipo"), "shapes", "think"))
    assert "1 / (2 beta)" in full and "1 / (2 beta)" not in shapes
    assert "arXiv 2310.12036" in shapes and "Hint: think" in shapes
    normalized = "\n".join(docstring_lines(task("advantages.group_normalized"), "shapes", ""))
    assert "(r - mean)" not in normalized and "sqrt(" not in normalized and "group_size: responses" in normalized


# ---- Specifications ----


def specification(**changes) -> dict:
    functions = [{"function": "losses.dpo", "points": 5}]
    module = {"description": "Losses.", "functions": functions}
    return {"title": "T", "package": "my_course", "modules": {"losses": module}, **changes}


def test_a_specification_of_one_function():
    spec = AssignmentSpec.model_validate(specification())
    assert [(module, each.known_as) for module, each in spec.functions()] == [("losses", "dpo")]


def with_function(**function) -> dict:
    return specification(modules={"losses": {"description": "L", "functions": [{"points": 1, **function}]}})


@pytest.mark.parametrize(
    "content, part",
    [
        (
            with_function(function="losses.ipoo"),
            r"modules\.losses\.functions\[0\]\.function: unknown function 'losses\.ipoo'; did you mean 'losses\.ipo'",
        ),
        (with_function(function="dpo"), "did you mean 'losses.dpo'"),
        (with_function(function="losses.masked_meen"), "did you mean 'losses.masked_mean'"),
        (with_function(function="losses.dpo", hints="x"), "no such key; did you mean 'hint'.*Allowed: function, name"),
        (with_function(function="losses.dpo", points=0), "points: Input should be greater than 0, got 0"),
        (specification(titel="x"), "titel: no such key; did you mean 'title'"),
        (specification(package="trl_ext"), "'trl_ext' is the name of something else"),
        (specification(package="My-Course"), "package: String should match"),
        (specification(docstring="none"), "docstring: Input should be 'full' or 'shapes', got 'none'"),
        (specification(tests={"visible": 0}), "tests.visible: Input should be greater than or equal to 1, got 0"),
        (specification(tests={"visible_seed": 2, "hidden_seed": 2}), "visible_seed and hidden_seed must differ"),
        (
            specification(recipes={"a": {"kind": "preference", "loss": "dop"}}),
            "recipes.a: no function 'dop'; did you mean 'dpo'",
        ),
        (
            specification(thresholds=[{"recipe": "dpo", "measure": "x", "at_least": 1, "points": 1}]),
            r"thresholds\[0\]: no recipe 'dpo'",
        ),
        (
            specification(
                modules={
                    "a": {"description": "A", "functions": [{"function": "losses.masked_mean", "points": 1}]},
                    "b": {"description": "B", "functions": [{"function": "course.masked_mean", "points": 1}]},
                }
            ),
            "modules.b: 'masked_mean' is also in a; give one of them another name",
        ),
    ],
)
def test_errors_name_the_file_the_key_and_what_may_stand_there(content, part, tmp_path):
    import yaml

    path = tmp_path / "course.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=part) as error:
        load_spec(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_specification_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no specification 'reasonin'; did you mean 'reasoning'"):
        load_spec("reasonin")
    with pytest.raises(FileNotFoundError, match="no file"):
        load_spec(tmp_path / "none.yaml")


def test_too_few_hidden_cases_are_refused(tmp_path):
    """One case of `aggregate` is of one kind, and says nothing of mistakes in another."""
    from trl_ext.assignment.writing import write_assignment

    content = with_function(function="losses.aggregate")
    spec = AssignmentSpec.model_validate({**content, "tests": {"hidden": 1, "nan_padding": False}})
    with pytest.raises(ValueError, match="tests.hidden: 1 cases of losses.aggregate do not show the mistake"):
        write_assignment(spec, tmp_path / "course")
    assert not (tmp_path / "course").exists()


def test_folders_that_are_something_else_are_left_alone(tmp_path):
    from trl_ext.assignment.writing import write_assignment

    spec = AssignmentSpec.model_validate(specification())
    out = tmp_path / "course"
    write_assignment(spec, out)
    assert not list(out.rglob("*grad*")), "nothing of the grader is in the starter"
    with pytest.raises(ValueError, match="is there already"):
        write_assignment(spec, out)
    write_assignment(spec, out, replace=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="holds something else"):
        write_assignment(spec, other, replace=True)
    assert (other / "thesis.tex").is_file()
