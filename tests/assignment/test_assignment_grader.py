"""The shipped assignments from end to end, and the grader on right, wrong and broken submissions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trl_ext.assignment.builder.spec import AssignmentSpec, load_spec
from trl_ext.assignment.builder.writing import grader_folder, write_assignment
from trl_ext.assignment.catalog.catalog import mistakes_of

pytestmark = pytest.mark.slow

SPECS = ("rlhf_project", "reasoning")


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def run_grader(submission: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    grader = grader_folder(submission)
    return run("grade.py", str(submission), "--out", "../out/results.json", *flags, folder=grader, **variables)


def grade(submission: Path, *flags: str, **variables: str) -> tuple[dict[str, dict], str]:
    """The rows of Gradescope's JSON by name, the whole of it as `all`, and the table."""
    done = run_grader(submission, *flags, **variables)
    assert done.returncode == 0, done.stderr
    result = json.loads((submission.parent / "out" / "results.json").read_text())
    return {**{row["name"]: row for row in result["tests"]}, "all": result}, done.stdout


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(text)


# ---- The shipped assignments ----


@pytest.fixture(scope="module", params=SPECS)
def assignment(request, tmp_path_factory) -> tuple[AssignmentSpec, Path, Path]:
    """The specification, a starter and a solution, each with a grader beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    spec = load_spec(request.param)
    write_assignment(spec, folder / "starter")
    write_assignment(spec, folder / "solution", solution=True)
    return spec, folder / "starter", folder / "solution"


def test_visible_tests_fail_on_the_starter_and_pass_on_the_solution(assignment):
    """The tests of the solution need torch and pytest alone, but for what reads the library's prompt template."""
    spec, starter, solution = assignment
    failed = run("-m", "pytest", "-q", "tests", folder=starter)
    assert failed.returncode == 1 and " passed" not in failed.stdout.splitlines()[-1]
    for module, each in spec.functions():
        assert f"not implemented yet: implement {each.name} in {spec.package}/{module}.py" in failed.stdout
    passed = run("-m", "pytest", "-q", "tests", folder=solution)
    assert passed.returncode == 0, passed.stdout[-3000:]
    blocked = "import sys; sys.modules |= dict.fromkeys(['trl_ext', 'trl', 'transformers']); import pytest; "
    blocked += "sys.exit(pytest.main(['-q', 'tests', '-k', 'not per_instance_dpo_loss']))"
    alone = run("-c", blocked, folder=solution)
    assert alone.returncode == 0, alone.stdout[-3000:]


def test_the_grader_gives_full_points_to_the_solution_and_none_to_the_starter(assignment):
    spec, starter, solution = assignment
    rows, table = grade(solution)
    for _, each in spec.functions():
        assert (rows[each.name]["score"], rows[each.name]["status"]) == (each.points, "passed"), table
    assert {"score", "output", "stdout_visibility", "tests"} <= set(rows["all"])
    assert {"name", "score", "max_score", "output", "visibility"} <= set(rows["all"]["tests"][0])
    for threshold in spec.thresholds:
        name = f"{threshold.recipe}: {threshold.measure} >= {threshold.at_least:g}"
        assert rows[name]["output"] == f"no file runs/{threshold.recipe}/results.json"
    rows, table = grade(starter)
    assert rows["all"]["score"] == 0
    for module, each in spec.functions():
        assert f"implement {each.name} in {spec.package}/{module}.py" in rows[each.name]["output"]
        assert f"{each.name} " in table


MUTANT = """
from functools import partial
from trl_ext.assignment.catalog.catalog import mistakes_of, task

{name} = partial(mistakes_of({task!r})[{message!r}], task({task!r}).function)
"""


def test_every_mistake_loses_its_points_with_its_message(assignment, tmp_path):
    """All known mistakes as submissions, through the grader as a teacher runs it."""
    spec, _, solution = assignment
    submission = tmp_path / "submission"
    shutil.copytree(solution, submission)
    shutil.copytree(grader_folder(solution), grader_folder(submission))
    plan_file = grader_folder(submission) / "grading.json"
    plan = json.loads(plan_file.read_text())
    items = {item["name"]: item for item in plan["functions"]}
    plan |= {"functions": [], "thresholds": [], "imports": "ignore"}
    messages = []
    for _, each in spec.functions():
        for message in mistakes_of(each.function):
            names = {"name": each.name, "task": each.function}
            file = f"wrong_{len(messages)}"
            append(submission / spec.package / f"{file}.py", MUTANT.format(**names, message=message))
            plan["functions"].append({**items[each.name], "module": f"{spec.package}.{file}"})
            messages.append(message)
    assert len(messages) == {"my_rlhf": 97, "my_reasoning": 43}[spec.package]
    plan_file.write_text(json.dumps(plan))
    rows, _ = grade(submission)
    for row, message in zip(rows["all"]["tests"], messages, strict=True):
        assert row["score"] == 0 and message in row["output"], (row, message)


# Each is written behind the right function of its name, whose file's others keep their points.
BROKEN = {
    "dpo": ("def dpo(scores, *, beta=0.1):\n    while True:\n        pass\n", "it took more than 4 s"),
    "ipo": ("def ipo(scores, **options):\n    raise SystemExit(0)\n", "ends the program"),
    "aot": ("def aot(scores, **options):\n    import os\n    os._exit(0)\n", "it ended the process in which it ran"),
    "bradley_terry": ("def bradley_terry(:\n", "my_rlhf/reward.py cannot be imported (my_rlhf/reward.py, line"),
    "group_normalized": ("del group_normalized\n", "my_rlhf/advantages.py has no function group_normalized"),
    "group_centered": ("def group_centered(rewards, group_size):\n    return 'ok'\n", "expected a tensor"),
    "kl_estimate": (
        "def kl_estimate(log_probs, ref_log_probs, kind):\n    print('x' * 10**4)\n"
        "    return kl_estimate(log_probs, ref_log_probs, kind)\n",
        "raises RecursionError",
    ),
    "aggregate": (
        "def aggregate(losses, mask, kind, **options):\n    from trl_ext.losses import aggregate as right\n"
        "    return right(losses, mask, kind, **options)\n",
        "trl_ext cannot be imported here: the library holds the answers",
    ),
    "split_minibatches": (
        # An answer of the student's own making.
        "def split_minibatches(*arguments, **options):\n    import os, sys\n"
        '    os.write(int(sys.argv[1]), b\'{"error": {"kind": "Missing", "message": null}}\\n\')\n',
        "it ended the process in which it ran",
    ),
}


def test_the_grader_names_what_is_wrong_with_each_broken_function(tmp_path):
    spec = load_spec("rlhf_project")
    out = tmp_path / "submission"
    write_assignment(spec, out, solution=True)
    plan_file = grader_folder(out) / "grading.json"
    plan_file.write_text(json.dumps({**json.loads(plan_file.read_text()), "seconds": 4}))
    module_of = {each.name: module for module, each in spec.functions()}
    for name, (code, _) in BROKEN.items():
        append(out / spec.package / f"{module_of[name]}.py", f"\n\n{code}")
    # Files that would be imported in place of others.
    append(out / "torch.py", "raise SystemExit('not torch')\n")
    append(out / "checking" / "__init__.py", "raise SystemExit('not the checks')\n")
    (out / spec.package / "scores.py").write_text("class PreferenceScores:\n    pass\n")
    rows, table = grade(out)
    for name, (_, part) in BROKEN.items():
        assert rows[name]["score"] == 0 and part in rows[name]["output"], (name, rows[name]["output"][:400])
    for name in ("sequence_log_probs", "completion_mask", "clipped_surrogate"):
        assert rows[name]["score"] == rows[name]["max_score"], rows[name]["output"]
    assert "total" in table
    shutil.rmtree(out / spec.package)
    rows, table = grade(out)
    assert rows["all"]["score"] == 0 and table.count("no folder my_rlhf in") == 1


def test_commands(tmp_path):
    arguments = ("-m", "trl_ext.assignment", "--spec", "reasoning", "--out", "course")
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "14 functions to implement" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"course", "course_grader"}
    again = run(*arguments, folder=tmp_path)
    assert again.returncode == 2 and again.stderr.startswith("error: ") and again.stderr.count("\n") == 1
    assert "losses.dpo" in run("-m", "trl_ext.assignment", "--list", folder=tmp_path).stdout


# ---- A small assignment ----

CONTENT = {
    "title": "T",
    "package": "my_course",
    "modules": {
        "pair": {"description": "P", "functions": [{"function": "losses.dpo", "points": 5}]},
        "group": {"description": "G", "functions": [{"function": "advantages.group_centered", "points": 3}]},
    },
    "recipes": {name: {"kind": "preference", "loss": "dpo"} for name in ("dpo", "again")},
    "thresholds": [
        {"recipe": "dpo", "measure": "win_rate.half.rate", "at_least": 0.6, "points": 2},
        {"recipe": "again", "measure": "win_rate.half.rate", "at_least": 0.6, "points": 2, "zero_at": 0.4},
    ],
    "submission": {"dpo": 0.68},
    "tests": {"hidden": 2, "visible": 1, "hidden_seed": 2, "partial_credit": True},
}


@pytest.fixture(scope="module")
def solution(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("assignment") / "course"
    write_assignment(AssignmentSpec.model_validate(CONTENT), out, solution=True)
    return out


@pytest.fixture
def submission(solution, tmp_path) -> Path:
    shutil.copytree(solution, tmp_path / "course")
    shutil.copytree(grader_folder(solution), tmp_path / "course_grader")
    return tmp_path / "course"


SPY = """

import json as _json, os as _os, sys as _sys

def dpo(scores, *, beta=0.1):
    near = [name for folder in _sys.path if _os.path.isdir(folder) for name in _os.listdir(folder)]
    found = [name for name in near if name in ("cases", "grading.json", "verdicts.py")]
    raise RuntimeError(_json.dumps([sorted(_os.environ), found]))
"""


def test_the_worker_has_neither_keys_nor_expected_values(submission):
    """Variables are those that Python needs, and no folder of the path holds what the grader knows."""
    append(submission / "my_course" / "pair.py", SPY)
    row = grade(submission, OPENAI_API_KEY="secret", HF_TOKEN="secret")[0]["dpo"]
    variables, found = json.loads(row["output"].split("RuntimeError: ")[1].splitlines()[0])
    kept = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS"}
    others = {name for name in variables if not name.startswith(("PYTHON", "KMP_", "TORCH"))} - kept
    assert (row["score"], others, found) == (0, set(), [])


@pytest.mark.parametrize(
    "text, place",
    [
        ("\nimport importlib\ndpo = importlib.import_module('trl_ext.losses').dpo\n", "my_course/pair.py"),
        ("\nfrom helper import dpo\n", "helper.py, line 1"),
        ("\nfrom .inner import dpo\n", "my_course/inner.py, line 1"),
    ],
)
def test_answers_of_the_library_earn_nothing_by_whichever_file(text, place, submission):
    """The other module, which has none of it, keeps its points."""
    for path in ("helper.py", "my_course/inner.py"):
        append(submission / path, "from trl_ext.losses import dpo\n")
    append(submission / "my_course" / "pair.py", text)
    rows, _ = grade(submission)
    assert rows["dpo"]["score"] == 0 and f"pair.py cannot be imported ({place}" in rows["dpo"]["output"]
    assert "the library holds the answers" in rows["dpo"]["output"]
    assert rows["group_centered"]["score"] == 3


def test_without_torch_nothing_is_graded(submission, tmp_path):
    """Status 2, one line that names the import, and no file of zeros."""
    append(tmp_path / "broken" / "torch.py", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    done = run_grader(submission, PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the process for the student's code does not start: ModuleNotFoundError: No")
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(
    "results, points, part",
    [
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": 0.7}}}', (2, 2), "reached 0.700"),
        # Half the way from 0.4 to 0.6.
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": 0.5}}}', (0, 1), "reached 0.500"),
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": NaN}}}', (0, 0), "no finite number"),
        ('{"yours": [], "win_rate": {"half": {"rate": 0.7}}}', (0, 0), "the run was not on the student's own dpo"),
        ("[1]", (0, 0), "TypeError"),
    ],
)
def test_figures_of_runs_and_responses(results, points, part, submission):
    for recipe in ("dpo", "again"):
        append(submission / "runs" / recipe / "results.json", results)
    rows, _ = grade(submission)
    graded = [rows[f"{recipe}: win_rate.half.rate >= 0.6"] for recipe in ("dpo", "again")]
    assert tuple(row["score"] for row in graded) == points and all(part in row["output"] for row in graded)
    assert rows["dpo: responses"]["score"] == 0 and "submission" in rows["dpo: responses"]["output"]


def test_partial_credit_and_what_students_are_told(submission):
    """Right for one of the two betas that cases have in turn: 3 of 5. Students read no expected value."""
    code = "\nright = dpo\n\n\ndef dpo(scores, *, beta):\n    sign = 1 if beta < 0.3 else -1\n"
    code += "    return sign * right(scores, beta=beta)\n"
    append(submission / "my_course" / "pair.py", code)
    row = grade(submission)[0]["dpo"]
    assert row["score"] == 3 and "2 of 5 cases fail" in row["output"]
    assert "wrong value at [0]; this is what you get when the sign is flipped" in row["output"]
    assert "expected" not in row["output"]
    assert "expected" in grade(submission, "--show_values")[0]["dpo"]["output"]


def test_flags_are_checked_first(submission):
    done = run_grader(submission, "--visibility", "foo")
    assert done.returncode == 2 and "after_due_date" in done.stderr
    (submission.parent / "out" / "results.json").mkdir(parents=True)
    done = run_grader(submission)
    assert done.returncode == 2 and "is a folder: name a file for --out" in done.stderr
    grader_folder(submission).chmod(0o700)
    done = run_grader(submission, "--out", "../one.json", "--user", "nobody-of-this-name")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "torch" not in done.stderr
    assert "does not start as the user nobody-of-this-name" in done.stderr and "no such user" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_another_user_cannot_read_the_grader(submission, tmp_path):
    """As nobody, where the interpreter and the submission can be read by all."""
    done = run_grader(submission, "--user", "nobody")
    assert done.returncode == 2 and "chmod 700 it" in done.stderr
    (tmp_path / "course_grader").chmod(0o700)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    access = f"(os.getuid() != 0, os.access({str(tmp_path / 'course_grader')!r}, os.R_OK))"
    code = f"\ndef dpo(scores, *, beta=0.1):\n    import os\n    raise RuntimeError(str({access}))\n"
    append(submission / "my_course" / "pair.py", code)
    done = run_grader(submission, "--user", "nobody")
    if done.returncode == 2:
        pytest.skip(f"the interpreter is not everybody's: {done.stderr[-200:]}")
    assert "(True, False)" in done.stdout
