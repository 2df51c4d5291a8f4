"""Both shipped assignments from end to end: starter, solution, grader, wrong and hostile submissions, training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trl_ext.assignment.catalog import task
from trl_ext.assignment.mistakes import mistakes_of
from trl_ext.assignment.source import Text, place_of
from trl_ext.assignment.spec import AssignmentSpec, load_spec
from trl_ext.assignment.writing import grader_folder, write_assignment

pytestmark = pytest.mark.slow

SPECS = ("rlhf_project", "reasoning")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def grade(grader: Path, submission: Path) -> tuple[dict, str]:
    """Gradescope's JSON and the table."""
    out = grader.parent / f"{submission.name}-results.json"
    done = run("grade.py", str(submission), "--out", str(out), folder=grader)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.fixture(scope="module", params=SPECS)
def assignment(request, tmp_path_factory) -> tuple[AssignmentSpec, Path, Path]:
    """The specification, a starter and a solution, each with a grader beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    spec = load_spec(request.param)
    write_assignment(spec, folder / "starter")
    write_assignment(spec, folder / "solution", solution=True)
    return spec, folder / "starter", folder / "solution"


def points(spec: AssignmentSpec) -> float:
    return sum(each.points for _, each in spec.functions())


def by_name(result: dict) -> dict[str, dict]:
    return {row["name"]: row for row in result["tests"]}


def test_visible_tests_fail_on_the_starter_and_pass_on_the_solution(assignment):
    spec, starter, solution = assignment
    failed = run("-m", "pytest", "-q", "tests", folder=starter)
    assert failed.returncode == 1
    for module, each in spec.functions():
        assert f"not implemented yet: implement {each.known_as} in {spec.package}/{module}.py" in failed.stdout
    assert " passed" not in failed.stdout.splitlines()[-1]
    passed = run("-m", "pytest", "-q", "tests", folder=solution)
    assert passed.returncode == 0, passed.stdout[-3000:]
    assert " failed" not in passed.stdout


def test_tests_need_torch_and_pytest_alone(assignment, tmp_path):
    """With trl_ext and transformers out of reach, all but what reads the library's prompt template passes."""
    _, _, solution = assignment
    (tmp_path / "blocked.py").write_text(
        "import sys\n\n\nclass Blocked:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('trl_ext', 'trl', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n\n\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    command = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import blocked, pytest; "
    command += "sys.exit(pytest.main(['-q', 'tests', '-k', 'not per_instance_dpo_loss']))"
    done = run("-c", command, folder=solution)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_grader_gives_full_points_to_the_solution_and_none_to_the_starter(assignment):
    spec, starter, solution = assignment
    full, table = grade(grader_folder(solution), solution)
    functions = {each.known_as for _, each in spec.functions()}
    rows = by_name(full)
    assert sum(rows[name]["score"] for name in functions) == points(spec), table
    assert all(rows[name]["status"] == "passed" for name in functions)
    assert {"score", "output", "stdout_visibility", "tests"} <= set(full)
    assert {"name", "score", "max_score", "output", "visibility"} <= set(full["tests"][0])
    for threshold in spec.thresholds:
        name = f"{threshold.recipe}: {threshold.measure} >= {threshold.at_least:g}"
        assert rows[name]["output"] == f"no file runs/{threshold.recipe}/results.json"
    none, table = grade(grader_folder(starter), starter)
    assert none["score"] == 0
    for module, each in spec.functions():
        assert f"implement {each.known_as} in {spec.package}/{module}.py" in by_name(none)[each.known_as]["output"]
        assert f"{each.known_as} " in table


def test_hidden_cases_are_others_than_visible_ones_and_not_in_the_starter(assignment):
    _, starter, _ = assignment
    visible = {path.name: json.loads(path.read_text()) for path in (starter / "tests" / "cases").iterdir()}
    hidden = {path.name: json.loads(path.read_text()) for path in (grader_folder(starter) / "cases").iterdir()}
    assert visible.keys() == hidden.keys()
    texts = ("parse_gsm8k_response.json", "parse_mmlu_response.json")
    for name in visible.keys() - set(texts):
        known = [case["arguments"] for case in visible[name]]
        assert not any(case["arguments"] in known for case in hidden[name]), name
    for name in set(texts) & visible.keys():
        known = [case["arguments"] for case in visible[name]]
        assert any(case["arguments"] not in known for case in hidden[name]), name


def write_mutants(spec: AssignmentSpec, solution: Path, grader: Path) -> dict[str, str]:
    """Beside the solved modules, one for each mistake, and a plan that grades them; message by the plan's names.

    A module holds the solved functions and, behind them, the wrong one under the right one's name.
    """
    plan = json.loads((grader / "grading.json").read_text())
    items = {item["name"]: item for item in plan["functions"]}
    plan["functions"], plan["thresholds"], messages = [], [], {}
    for module, each in spec.functions():
        for mistake in mistakes_of(each.function):
            text = Text({place_of(task(each.function).function): f"_right_{each.known_as}"}, {})
            wrong = text.whole(place_of(mistake.function), "_wrong")
            source = (solution / spec.package / f"{module}.py").read_text()
            body = text.file("", [wrong]).partition("annotations")[2]
            code = f"{source}\n\n_right_{each.known_as} = {each.known_as}\n{body}"
            code += f"\n\ndef {each.known_as}(*arguments, **keywords):\n"
            code += f"    return _wrong(_right_{each.known_as}, *arguments, **keywords)\n"
            name = f"wrong_{len(messages)}"
            (solution / spec.package / f"{name}.py").write_text(code)
            label = f"{each.known_as}, {mistake.name}"
            messages[label] = mistake.message
            plan["files"][f"{spec.package}.{name}"] = f"{spec.package}/{name}.py"
            # The runner is given the function's own name: the label is what the row is called.
            plan["functions"].append({**items[each.known_as], "module": f"{spec.package}.{name}", "label": label})
    (grader / "grading.json").write_text(json.dumps(plan))
    return messages


def test_every_mutant_loses_its_points_with_its_message(assignment, tmp_path):
    """All known mistakes as submissions, through the grader as a teacher runs it."""
    spec, _, solution = assignment
    submission = tmp_path / "submission"
    shutil.copytree(solution, submission)
    grader = tmp_path / "grader"
    shutil.copytree(grader_folder(solution), grader)
    messages = write_mutants(spec, submission, grader)
    assert len(messages) >= 35
    result, _ = grade(grader, submission)
    assert len(result["tests"]) == len(messages)
    for row, (label, message) in zip(result["tests"], messages.items(), strict=True):
        assert row["score"] == 0, label
        assert message in row["output"], (label, row["output"])


HOSTILE = {
    "dpo": ("def dpo(scores, *, beta=0.1):\n    while True:\n        pass\n", "it took more than 4 s"),
    "ipo": (
        "def ipo(scores, **options):\n    raise SystemExit(0)\n\n\ndef never():\n    import importlib\n"
        f"    importlib.import_module('lib/helper')\n    __import__('{'y' * 300}')\n",
        "ends the program",
    ),
    "split_minibatches": (
        "def split_minibatches(*arguments, **options):\n    import os, sys\n"
        '    os.write(int(sys.argv[1]), b\'{"error": {"kind": "Missing", "message": null}}\\n\')\n',
        "it ended the process in which it ran",
    ),
    "token_log_ratio": (
        "def token_log_ratio(**arguments):\n    raise ValueError('\\ud800')\n",
        "it raises ValueError",
    ),
    "aot": ("def aot(scores, **options):\n    import os\n    os._exit(0)\n", "it ended the process in which it ran"),
    "bradley_terry": ("def bradley_terry(:\n", "reward.py cannot be imported (line"),
    "group_normalized": ("del group_normalized\n", "advantages.py has no function group_normalized"),
    "group_centered": ("def group_centered(rewards, group_size):\n    return 'ok' * 10**8\n", "expected a tensor"),
    "kl_estimate": (
        "def kl_estimate(log_probs, ref_log_probs, kind):\n    print('x' * 10**4)\n    import sys\n"
        "    print('{\"output\": 1}', file=sys.stderr)\n    return kl_estimate(log_probs, ref_log_probs, kind)\n",
        "raises RecursionError",
    ),
    "aggregate": (
        "def aggregate(losses, mask, kind, **options):\n    from trl_ext.losses import aggregate as right\n"
        "    return right(losses, mask, kind, **options)\n",
        "imports trl_ext.losses.aggregate: the library holds the answers",
    ),
}


def test_the_grader_survives_whatever_is_submitted(tmp_path):
    """Each function that is not broken keeps its points, save in the file that imports the answers."""
    spec = load_spec("rlhf_project")
    out = tmp_path / "submission"
    write_assignment(spec, out, solution=True)
    plan_file = grader_folder(out) / "grading.json"
    plan = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**plan, "seconds": 4}))
    module_of = {each.known_as: module for module, each in spec.functions()}
    for name, (code, _) in HOSTILE.items():
        with open(out / spec.package / f"{module_of[name]}.py", "a") as file:
            file.write(f"\n\n{code}")
    # Files that would stand in for others.
    (out / "torch.py").write_text("raise SystemExit('not torch')\n")
    (out / "checking").mkdir()
    (out / "checking" / "__init__.py").write_text("raise SystemExit('not the checks')\n")
    (out / spec.package / "scores.py").write_text("class PreferenceScores:\n    pass\n")
    result, table = grade(grader_folder(out), out)
    rows = by_name(result)
    for name, (_, part) in HOSTILE.items():
        assert rows[name]["score"] == 0 and part in rows[name]["output"], (name, rows[name]["output"][:400])
    for name in ("sequence_log_probs", "completion_mask"):
        assert rows[name]["score"] == rows[name]["max_score"], rows[name]["output"]
    assert rows["clipped_surrogate"]["score"] == 0, "its file imports the answers"
    assert "total" in table
    shutil.rmtree(out / spec.package)
    result, _ = grade(grader_folder(out), out)
    assert result["score"] == 0 and "no folder my_rlhf in" in by_name(result)["dpo"]["output"]


def test_thresholds_and_responses_are_graded(tmp_path):
    content = {
        "title": "T",
        "package": "my_course",
        "modules": {"losses": {"description": "L", "functions": [{"function": "losses.dpo", "points": 5}]}},
        "recipes": {"dpo": {"kind": "preference", "loss": "dpo"}, "ipo": {"kind": "preference", "loss": "dpo"}},
        "thresholds": [
            {"recipe": recipe, "measure": "win_rate.half.rate", "at_least": 0.6, "points": 2, "zero_at": zero}
            for recipe, zero in (("dpo", None), ("ipo", 0.4))
        ],
        "submission": {"dpo": 0.68},
        "tests": {"partial_credit": True, "imports": "report"},
    }
    out = tmp_path / "submission"
    write_assignment(AssignmentSpec.model_validate(content), out, solution=True)
    # Right for one of the two betas that cases have in turn, 6 of 11, and with an import that is reported.
    with open(out / "my_course" / "losses.py", "a") as file:
        file.write("\nimport trl_ext.losses\nright = dpo\n\n\ndef dpo(scores, *, beta=0.1):\n")
        file.write("    return right(scores, beta=min(beta, 0.1))\n")
    for recipe, rate in (("dpo", 0.7), ("ipo", 0.5)):
        (out / "runs" / recipe).mkdir(parents=True)
        results = {"yours": ["dpo"], "win_rate": {"half": {"rate": rate}}}
        (out / "runs" / recipe / "results.json").write_text(json.dumps(results))
    result, _ = grade(grader_folder(out), out)
    scores = {row["name"]: (row["score"], row["output"]) for row in result["tests"]}
    assert scores["dpo: win_rate.half.rate >= 0.6"] == (2, "reached 0.700")
    # Half the way from 0.4 to 0.6.
    assert scores["ipo: win_rate.half.rate >= 0.6"] == (1, "reached 0.500")
    assert "up from 0.4 of `ipo`'s `win_rate.half.rate`" in (out / "README.md").read_text()
    assert scores["dpo: responses"][0] == 0 and "submission" in scores["dpo: responses"][1]
    assert scores["dpo"][0] == pytest.approx(5 * 6 / 11, abs=1e-3)
    assert "imports trl_ext.losses" in scores["dpo"][1] and "5 of 11 cases fail" in scores["dpo"][1]
    assert result["score"] == pytest.approx(3 + 30 / 11, abs=1e-3)


def test_commands(tmp_path):
    done = run("-m", "trl_ext.assignment", "--spec", "reasoning", "--out", "course", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "14 functions to implement" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"course", "course_grader"}
    again = run("-m", "trl_ext.assignment", "--spec", "reasoning", "--out", "course", folder=tmp_path)
    assert again.returncode == 2 and again.stderr.startswith("error: ") and again.stderr.count("\n") == 1
    listed = run("-m", "trl_ext.assignment", "--list", folder=tmp_path)
    assert "losses.dpo" in listed.stdout
