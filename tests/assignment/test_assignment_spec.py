"""Specifications of assignments, what is wrong with them, and the folders that are written from them."""

from __future__ import annotations

import ast
import json

import pytest
import yaml

from trl_ext.assignment.builder import writing
from trl_ext.assignment.builder.source import docstring_literal
from trl_ext.assignment.builder.spec import AssignmentSpec, load_spec
from trl_ext.assignment.builder.writing import grader_folder, write_assignment
from trl_ext.assignment.train.recipe import RecipeSpec, check_settings


def specification(*functions: dict, **changes) -> dict:
    listed = [{"points": 5, **each} for each in functions or ({"function": "losses.dpo"},)]
    return {"title": "T", "package": "my_course", "modules": {"losses": module(listed)}, **changes}


def module(functions: list[dict], description: str = "Losses.") -> dict:
    return {"description": description, "functions": functions}


def spec_of(*functions: dict, **changes) -> AssignmentSpec:
    return AssignmentSpec.model_validate(specification(*functions, **changes))


def recipe(**changes) -> dict:
    return {"recipes": {"a": {"kind": "preference", "loss": "dpo", **changes}}}


def threshold(**changes) -> dict:
    return {"thresholds": [{"recipe": "a", "measure": "score.policy", "at_least": 0.5, "points": 1, **changes}]}


MEAN = {"function": "losses.masked_mean", "points": 1}


@pytest.mark.parametrize(
    "content, part",
    [
        (
            specification({"function": "losses.ipoo"}),
            r"modules\.losses\.functions\[0\]\.function: unknown function 'losses\.ipoo'; did you mean 'losses\.ipo'",
        ),
        (specification({"function": "dpo"}), "did you mean 'losses.dpo'"),
        (
            specification({"function": "losses.dpo", "hints": "x"}),
            "no such key; did you mean 'hint'",
        ),
        (specification(titel="x"), "titel: no such key; did you mean 'title'"),
        (specification(package="json"), "'json' is the name of something else"),
        (specification(docstring="none"), "docstring: Input should be 'full' or 'shapes', got 'none'"),
        (specification(tests={"visible": 0}), "tests.visible: Input should be greater than or equal to 1, got 0"),
        (specification(**recipe(loss="dop")), "recipes.a: no function 'dop'; did you mean 'dpo'"),
        (specification(**recipe(kind="policy")), "recipes.a: 'dpo' is of the kind 'preference loss', and a whole"),
        (
            specification(**recipe(), **threshold(measure="win_rat.half.rate")),
            r"thresholds\[0\]\.measure: no figure 'win_rat.half.rate'; did you mean 'win_rate.half.rate'",
        ),
        (specification(submission={"foo": 0.5}), "submission: no method 'foo'"),
        (specification(submission={"dpo": 1.5}), "dpo: Input should be less than or equal to 1"),
        (
            specification(submission={"dpo": 0.6}, submission_zero_at=0.6),
            "submission_zero_at must be below 0.6, which earns all points, got 0.6",
        ),
        (
            specification(modules={"a": module([MEAN]), "b": module([{**MEAN, "function": "course.masked_mean"}])}),
            "modules.b: course.masked_mean has the name of losses.masked_mean",
        ),
    ],
)
def test_errors_name_the_file_the_key_and_what_may_stand_there(content, part, tmp_path):
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


def test_settings_are_those_of_the_loop():
    recipe = RecipeSpec(kind="sft_loop", settings={"learning_rat": 1e-3})
    with pytest.raises(ValueError, match="recipes.sft.settings: no setting 'learning_rat'; did you mean 'learning_ra"):
        check_settings({"sft": recipe})


def test_too_few_hidden_cases_are_not_written(tmp_path):
    """One case is of one kind, and shows no mistake in another."""
    spec = spec_of({"function": "losses.aggregate"}, tests={"hidden": 1})
    with pytest.raises(ValueError, match="tests.hidden: 1 cases of losses.aggregate do not show the mistake"):
        write_assignment(spec, tmp_path / "course")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_solution_that_would_not_pass_is_not_written(tmp_path, monkeypatch):
    """The text is made to differ from the library: the sign of the loss."""
    real = writing.package_files

    def wrong(*arguments, **options):
        files, allowed = real(*arguments, **options)
        files["losses"] = files["losses"].replace("return -logsigmoid", "return logsigmoid")
        return files, allowed

    monkeypatch.setattr(writing, "package_files", wrong)
    with pytest.raises(ValueError, match="modules.losses: the solution of dpo would not pass: .*sign is flipped"):
        write_assignment(spec_of(), tmp_path / "course", solution=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ['What is called a "loss"', 'three """ of them', "a \\ and \\", "two\nlines", "\\n"])
def test_any_text_is_a_docstring(text, tmp_path):
    assert eval(docstring_literal(text)) == text
    losses = module([{"function": "losses.dpo", "points": 5, "hint": text}], text)
    write_assignment(spec_of(title=text, modules={"losses": losses}), tmp_path / "course")
    written = ast.parse((tmp_path / "course" / "my_course" / "losses.py").read_text())
    assert ast.get_docstring(written, clean=False) == text
    function = next(node for node in written.body if isinstance(node, ast.FunctionDef))
    assert text.strip("\n").splitlines()[0] in ast.get_docstring(function)


def test_folders_are_kept_and_never_lost(tmp_path):
    out = tmp_path / "course"
    write_assignment(spec_of(), out)
    assert not list(out.rglob("*grad*")), "nothing of the grader is in the starter"
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        write_assignment(spec_of(), out)
    for number in (1, 2):
        kept = write_assignment(spec_of(), out, replace=True)
        assert kept == [tmp_path / f"course.old-{number}", tmp_path / f"course_grader.old-{number}"]
    assert (tmp_path / "course.old-1" / "notes.txt").read_text() == "mine" and not (out / "notes.txt").exists()
    names = {f"course{part}{old}" for part in ("", "_grader") for old in ("", ".old-1", ".old-2")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_folders_of_something_else_are_left_alone(tmp_path):
    (tmp_path / "course").mkdir()
    (tmp_path / "course" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="holds something other than an assignment"):
        write_assignment(spec_of(), tmp_path / "course", replace=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["course", "thesis.tex"]


def test_a_full_disk_leaves_all_as_it_was(tmp_path, monkeypatch):
    out = tmp_path / "course"
    write_assignment(spec_of(), out)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    real, written = writing.write_text, []

    def fails(path, text):
        written.append(path)
        if len(written) == 20:
            raise OSError("no space left on device")
        real(path, text)

    monkeypatch.setattr(writing, "write_text", fails)
    with pytest.raises(OSError, match="no space left"):
        write_assignment(spec_of(), out, replace=True)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


def test_hidden_cases_are_drawn_anew_and_are_in_the_grader_alone(tmp_path):
    """Without a hidden_seed two assignments share their visible cases and no hidden one."""
    for name in ("one", "two"):
        write_assignment(spec_of(), tmp_path / name)
    visible = [(tmp_path / name / "tests" / "cases" / "dpo.json").read_text() for name in ("one", "two")]
    hidden = [(grader_folder(tmp_path / name) / "cases" / "dpo.json").read_text() for name in ("one", "two")]
    assert visible[0] == visible[1]
    arguments = [json.dumps(case["arguments"]) for text in (visible[0], *hidden) for case in json.loads(text)]
    assert len(set(arguments)) == len(arguments)
    starter = "".join(path.read_text() for path in (tmp_path / "one").rglob("*") if path.is_file())
    values = [case["arguments"]["scores"]["fields"]["chosen"]["$tensor"] for case in json.loads(hidden[0])]
    assert not any(json.dumps(tensor) in starter for tensor in values)
