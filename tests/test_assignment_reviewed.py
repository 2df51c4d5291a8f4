"""Assignments: right answers of other forms, wrong ones that passed, names that collide, folders that are kept."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch

from trl_ext.assignment.building import build_cases, docstring_lines
from trl_ext.assignment.catalog import TASKS, task
from trl_ext.assignment.runtime.checks import call
from trl_ext.assignment.runtime.verdicts import LOG_OF_SIGMOID, verdict
from trl_ext.assignment.source import docstring_literal
from trl_ext.assignment.spec import AssignmentSpec, load_spec
from trl_ext.assignment.writing import grader_folder, write_assignment

CLASSES = "trl_ext.losses"


def failures(name: str, function, *, seed: int = 2, count: int = 8) -> list[str]:
    cases = build_cases(task(name), seed, count, nan_padding=True)
    return [found for case in cases if (found := verdict(call(function, case, CLASSES), case)) is not None]


# ---- Right answers ----


def clipped(advantages, policy_log_probs, old_log_probs, cliprange):
    ratio = (policy_log_probs - old_log_probs.detach()).exp()
    near = ratio.clamp(1 - cliprange, 1 + cliprange)
    return -torch.minimum(ratio * advantages, near * advantages), {"ratio": ratio, "parts": [ratio]}


def by_name(policy_log_probs, loss_type, raw_rewards=None, advantages=None, old_log_probs=None, cliprange=None):
    if loss_type == "grpo_clip":
        return clipped(advantages, policy_log_probs, old_log_probs, cliprange)
    weights = raw_rewards if loss_type == "no_baseline" else advantages
    if loss_type != "grpo_no_clip":
        return -weights * policy_log_probs, {}
    ratio = (policy_log_probs - old_log_probs.detach()).exp()
    return -ratio * advantages, {"ratio": ratio}


@pytest.mark.parametrize("function, name", [(clipped, "grpo_clip_loss"), (by_name, "policy_gradient_loss")])
def test_metadata_may_have_a_gradient(function, name):
    """The gradient of the losses counts, and not that of the sum of losses and what else is returned."""
    assert failures(f"course.{name}", function) == []


@pytest.mark.parametrize("detached", [True, False])
def test_entropies_may_have_a_gradient_or_none(detached):
    def response_log_probs(model, input_ids, labels, return_token_entropy=False):
        log_probs = model(input_ids).logits.log_softmax(-1)
        result = {"log_probs": log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), "logits": log_probs}
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return result | ({"token_entropy": entropy.detach() if detached else entropy} if return_token_entropy else {})

    assert failures("models.response_log_probs", response_log_probs) == []


# ---- Wrong answers ----


def cispo(log_ratio, log_probs, advantages, *, ratio_cap):
    return -log_ratio.exp().clamp(max=ratio_cap) * advantages.unsqueeze(1) * log_probs


def kto(log_ratio, desirable, kl_log_ratio, *, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    gain = beta * (log_ratio - kl_log_ratio.mean().clamp(min=0))
    return torch.where(desirable, desirable_weight * (1 - gain.sigmoid()), undesirable_weight * gain.sigmoid())


def dpo(scores, *, beta=0.1):
    return -torch.log(torch.sigmoid(beta * scores.margin))


def bradley_terry(chosen, rejected, *, margin=None, label_smoothing=0.0, centering=0.0):
    """With a term of weight 0, which times infinity is NaN: another outcome than the known mistake's."""
    logits = chosen - rejected - (0 if margin is None else margin)
    losses = -(1 - label_smoothing) * torch.log(torch.sigmoid(logits))
    return losses - label_smoothing * torch.log(torch.sigmoid(-logits)) + centering * (chosen + rejected) ** 2


@pytest.mark.parametrize(
    "function, name, message",
    [
        (cispo, "losses.cispo", "gradient flows through the capped ratio: detach it"),
        (kto, "losses.kto", "gradient flows through the estimate of the divergence"),
        (dpo, "losses.dpo", LOG_OF_SIGMOID),
        (bradley_terry, "losses.bradley_terry", LOG_OF_SIGMOID),
    ],
)
def test_wrong_gradients_and_infinities_are_seen(function, name, message):
    found = failures(name, function)
    assert found and all(message in each for each in found), found


def test_the_margin_that_is_far_apart():
    """log sigmoid(-800) is -800, and log of sigmoid(-800), which is 0 in float64 as well, is minus infinity."""
    case = next(c for c in build_cases(task("losses.dpo"), 1, 2, nan_padding=True) if c.get("special") == "far apart")
    fields = {name: value["$tensor"] for name, value in case["arguments"]["scores"]["fields"].items()}
    policy = [fields["chosen"][i] - fields["rejected"][i] for i in (0, 1)]
    margins = [policy[i] - fields["ref_chosen"][i] + fields["ref_rejected"][i] for i in (0, 1)]
    beta = case["arguments"]["beta"]
    assert -beta * margins[0] == pytest.approx(800, abs=40) and beta * margins[1] == pytest.approx(800, abs=40)
    assert case["expected"]["output"]["$tensor"][0] == pytest.approx(-beta * margins[0], rel=1e-9)
    assert math.exp(-800) == 0.0


def test_a_product_with_the_mask_is_told_of_nan_and_not_of_the_mask():
    def aggregate(losses, mask, kind, *, constant=None, token_count=None):
        sums = (losses * mask).sum(1)
        if kind == "token_mean":
            return sums.sum() / (mask.sum() if token_count is None else token_count)
        rows = sums / mask.sum(1).clamp(min=1) if kind == "sequence_mean" else sums
        return rows.mean() / (constant if kind == "constant" else 1)

    found = failures("losses.aggregate", aggregate)
    assert len(found) == 3, "the cases of NaN, and no other"
    assert all("0 times NaN is NaN" in each and "mask is left out" not in each for each in found), found


def test_a_summed_ratio_of_gspo_is_named():
    def gspo_loss(log_probs, old_log_probs, ref_log_probs, mask, advantages, *, clip=0.2, kl_coef=0.0):
        ratio = ((log_probs - old_log_probs.detach()) * mask).sum(1).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        delta = torch.where(mask > 0, ref_log_probs.detach() - log_probs, 0.0)
        return losses.mean() + kl_coef * (delta.exp() - delta - 1).sum() / mask.sum()

    found = failures("assignment.gspo_loss", gspo_loss)
    assert found and all("log-ratios are summed" in each for each in found), found


def test_a_single_value_is_not_called_a_multiple():
    """Of one number every other is a multiple."""

    def grpo_loss(log_probs, old_log_probs, *arguments, **options):
        return task("assignment.grpo_loss").function(log_probs, old_log_probs, *arguments, **options) + 0.1

    found = failures("assignment.grpo_loss", grpo_loss)
    assert found and not any("times the expected" in each for each in found)


def test_values_can_be_left_out():
    """What is wrong is said, and where; neither the expected value nor what the function gave."""
    case = build_cases(task("losses.dpo"), 1, 1, nan_padding=True)[0]
    outcome = call(lambda scores, *, beta: -task("losses.dpo").function(scores, beta=beta), case, CLASSES)
    expected = f"{case['expected']['output']['$tensor'][0]:.6g}"
    assert verdict(outcome, case).startswith(f"expected {expected} at [0], got -{expected}; this is what you get when")
    assert verdict(outcome, case, values=False) == "wrong value at [0]; this is what you get when the sign is flipped"


# ---- Cases ----


@pytest.mark.parametrize("name", TASKS)
def test_no_hidden_case_is_a_visible_one(name):
    """In their arguments, for every function, and also among themselves; texts are drawn as numbers are."""
    visible = build_cases(task(name), 1, 8, nan_padding=True)
    hidden = build_cases(task(name), 2, 8, nan_padding=True, others=visible)
    arguments = [json.dumps(case["arguments"], sort_keys=True) for case in (*visible, *hidden)]
    assert len(set(arguments)) == len(arguments)


@pytest.mark.parametrize("name", ["parse_gsm8k_response", "parse_mmlu_response", "r1_zero_reward", "gsm8k_reward"])
def test_a_table_of_the_visible_answers_earns_nothing(name):
    given = task(f"rewards.{name}")
    visible = build_cases(given, 1, 4, nan_padding=True)
    table = {json.dumps(case["arguments"]): case["expected"]["output"] for case in visible}
    hidden = build_cases(given, 2, 8, nan_padding=True, others=visible)
    assert all(table.get(json.dumps(case["arguments"])) is None for case in hidden)


def test_the_visible_cases_of_parse_mmlu_are_of_all_four_rules():
    """A statement, a letter at the beginning, a letter that is marked, an option's text."""
    cases = build_cases(task("rewards.parse_mmlu_response"), 1, 4, nan_padding=True)
    texts = [case["arguments"]["model_output"] for case in cases]
    assert "answer is" in texts[0] and texts[1].startswith("(") and "option" in texts[2] and " " not in texts[3]


# ---- Docstrings ----


@pytest.mark.parametrize(
    "name, parts",
    [
        ("losses.aggregate", ("sequence_mean", "token_mean", "constant", "sum", "token_count")),
        ("rewards.parse_mmlu_response", ("in this order", "option's text")),
        ("course.policy_microbatch_step", ("row's mean", "divided by gradient_accumulation_steps")),
        ("assignment.grpo_loss", ("k3 estimate, averaged over all tokens",)),
        ("assignment.dr_grpo_loss", ("old_log_probs", "kl_coef the coefficient", "max_new_tokens")),
        ("advantages.group_normalized", ("eps is added to the standard deviation",)),
        ("losses.cispo", ("No gradient flows through the capped ratio",)),
        ("models.tokenize_prompt_and_output", ("input_ids", "labels", "response_mask")),
    ],
)
def test_docstrings_without_formulas_keep_the_conventions(name, parts):
    text = " ".join(" ".join(docstring_lines(task(name), "shapes", "")).split())
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("name", TASKS)
def test_docstrings_refer_to_no_other_docstring(name):
    """A student has this one alone, and perhaps not the function that it would send them to."""
    for style in ("full", "shapes"):
        text = " ".join(docstring_lines(task(name), style, ""))
        assert not re.search(r"see the module|are those of `(masked_sum|grpo_loss|r1_zero_reward)`", text), text


# ---- Names and texts of a specification ----


def specification(**changes) -> dict:
    module = {"description": "Losses.", "functions": [{"function": "losses.dpo", "points": 5}]}
    return {"title": "T", "package": "my_course", "modules": {"losses": module}, **changes}


def named(function: str, name: str) -> AssignmentSpec:
    functions = [{"function": function, "name": name, "points": 1}, {"function": "losses.ipo", "points": 1}]
    return AssignmentSpec.model_validate(specification(modules={"one": {"description": "D", "functions": functions}}))


HARD_TEXTS = ('What is called a "loss"', 'three """ of them', "a \\ and \\", 'ends with \\"', "two\nlines", "\\n")


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_any_text_is_a_docstring(text, tmp_path):
    assert eval(docstring_literal(text)) == text
    module = {"description": text, "functions": [{"function": "losses.dpo", "points": 5, "hint": text}]}
    spec = AssignmentSpec.model_validate(specification(title=text, modules={"losses": module}))
    write_assignment(spec, tmp_path / "course")
    module = ast.parse((tmp_path / "course" / "my_course" / "losses.py").read_text())
    assert ast.get_docstring(module, clean=False) == text
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef))
    assert text.strip("\n").splitlines()[0] in ast.get_docstring(function)


@pytest.mark.parametrize(
    "content, part",
    [
        (specification(modules={"class": specification()["modules"]["losses"]}), "'class' is a word of Python's"),
        (specification(package="json"), "'json' is the name of something else"),
        (specification(package="torch"), "'torch' is the name of something else"),
        (specification(package="pydantic"), "'pydantic' is the name of something else"),
        (
            specification(
                modules={
                    "a": {
                        "description": "A",
                        "functions": [{"function": "losses.dpo", "name": "lambda", "points": 1}],
                    }
                }
            ),
            "'lambda' is a word of Python's",
        ),
        (
            specification(recipes={"a": {"kind": "policy", "loss": "dpo"}}),
            "recipes.a: 'dpo' is of the kind 'preference loss', and a whole loss is needed",
        ),
        (
            specification(
                recipes={"a": {"kind": "preference", "loss": "dpo"}},
                thresholds=[{"recipe": "a", "measure": "win_rat.half.rate", "at_least": 0.5, "points": 1}],
            ),
            r"thresholds\[0\]\.measure: no figure 'win_rat.half.rate'; did you mean 'win_rate.half.rate'",
        ),
        (specification(submission={"foo": 0.5}), "submission: no method 'foo'"),
        (specification(submission={"dpo": 1.5}), "must be a rate between 0 and 1"),
        (
            specification(submission={"dpo": 0.6}, submission_zero_at=0.6),
            "submission_zero_at must be below 0.6, which earns all points, got 0.6",
        ),
        ({**specification(), "titel": "x", "title": None}, "titel: no such key"),
    ],
)
def test_specifications_that_cannot_work_are_refused(content, part, tmp_path):
    path = tmp_path / "course.yaml"
    content = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=part) as error:
        load_spec(path)
    assert "\n" not in str(error.value)


def test_a_name_of_what_the_text_uses_is_refused(tmp_path):
    """A solution of the name `logsigmoid` would call itself; `gamma` is an argument, which no function calls."""
    with pytest.raises(ValueError, match="modules.one.functions: name: 'logsigmoid' is the name of what the text use"):
        write_assignment(named("losses.dpo", "logsigmoid"), tmp_path / "course")
    assert not list(tmp_path.iterdir())
    write_assignment(named("losses.simpo", "gamma"), tmp_path / "course")


def test_a_name_of_a_variable_where_the_function_is_called_is_refused(tmp_path):
    """`policy_gradient_loss` calls the naive loss and has an argument `advantages`, which the call would be of."""
    functions = [
        {"function": "course.naive_policy_gradient_loss", "name": "advantages", "points": 1},
        {"function": "course.policy_gradient_loss", "points": 1},
    ]
    modules = {"one": {"description": "D", "functions": functions}}
    spec = AssignmentSpec.model_validate(specification(modules=modules))
    with pytest.raises(ValueError, match="'advantages' is another thing inside policy_gradient_loss"):
        write_assignment(spec, tmp_path / "course")


def test_settings_are_those_of_the_loop():
    from trl_ext.assignment.recipe_rules import check_settings
    from trl_ext.assignment.spec import RecipeSpec

    recipe = RecipeSpec(kind="sft_loop", settings={"learning_rat": 1e-3})
    with pytest.raises(ValueError, match="recipes.sft.settings: no setting 'learning_rat'; did you mean 'learning_ra"):
        check_settings({"sft": recipe})


# ---- Folders ----


def test_what_is_there_stays_until_all_is_written(tmp_path, monkeypatch):
    """A failure at any file leaves both folders as they were, and nothing beside them."""
    from trl_ext.assignment import writing

    spec = AssignmentSpec.model_validate(specification())
    out = tmp_path / "course"
    write_assignment(spec, out)
    (out / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    real, written = writing.write_text, []

    def fails(path, text):
        written.append(path)
        if len(written) == 20:
            raise OSError("no space left on device")
        real(path, text)

    monkeypatch.setattr(writing, "write_text", fails)
    with pytest.raises(OSError, match="no space left"):
        write_assignment(spec, out, replace=True)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    monkeypatch.undo()
    renames = []

    def fails_to_rename(self, target):
        renames.append(target)
        if len(renames) == 4:
            raise OSError("renamed no more")
        os.rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_to_rename)
    with pytest.raises(OSError, match="renamed no more"):
        write_assignment(spec, out, replace=True)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
    monkeypatch.undo()
    kept = write_assignment(spec, out, replace=True)
    assert not (out / "notes.txt").exists()
    # What was there is beside it, byte for byte, and once more the next time.
    moved = {
        Path(str(path).replace(str(each), f"{each}.old-1")): path
        for each in (out, grader_folder(out))
        for path in before
        if path.is_relative_to(each)
    }
    assert len(moved) == len(before) and all(path.read_bytes() == before[was] for path, was in moved.items())
    assert kept == [Path(f"{out}.old-1"), Path(f"{out}_grader.old-1")]
    assert write_assignment(spec, out, replace=True) == [Path(f"{out}.old-2"), Path(f"{out}_grader.old-2")]
    names = {f"course{part}{old}" for part in ("", "_grader") for old in ("", ".old-1", ".old-2")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_grading_json_of_another_is_no_assignment(tmp_path):
    other = tmp_path / "course"
    other.mkdir()
    (other / "grading.json").write_text('{"students": []}')
    with pytest.raises(ValueError, match="holds something else"):
        write_assignment(AssignmentSpec.model_validate(specification()), other, replace=True)
    assert (other / "grading.json").is_file()


def test_the_root_is_no_folder_to_write():
    with pytest.raises(ValueError, match="--out / is no folder that can be written"):
        write_assignment(AssignmentSpec.model_validate(specification()), "/")


def test_hidden_cases_are_drawn_anew_and_stand_in_the_grader_alone(tmp_path):
    """Without a hidden_seed two assignments share their visible cases and no hidden one."""
    spec = AssignmentSpec.model_validate(specification())
    for name in ("one", "two"):
        write_assignment(spec, tmp_path / name)
    read = [json.loads((grader_folder(tmp_path / name) / "cases" / "dpo.json").read_text()) for name in ("one", "two")]
    assert not any(case["arguments"] in [other["arguments"] for other in read[1]] for case in read[0])
    visible = [(tmp_path / name / "tests" / "cases" / "dpo.json").read_text() for name in ("one", "two")]
    assert visible[0] == visible[1]
