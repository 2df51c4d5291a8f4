"""The grader as a teacher runs it: what a student's code can reach, imports of the answers, faults of the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trl_ext.assignment.spec import AssignmentSpec
from trl_ext.assignment.writing import grader_folder, write_assignment

pytestmark = pytest.mark.slow

CONTENT = {
    "title": "T",
    "package": "my_course",
    "modules": {
        "pair": {"description": "P", "functions": [{"function": "losses.dpo", "points": 5}]},
        "group": {"description": "G", "functions": [{"function": "advantages.group_centered", "points": 3}]},
    },
    "recipes": {"dpo": {"kind": "preference", "loss": "dpo"}},
    "thresholds": [{"recipe": "dpo", "measure": "win_rate.half.rate", "at_least": 0.6, "points": 2}],
    "tests": {"hidden": 2, "visible": 1, "hidden_seed": 2},
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


def run(submission: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "../course_grader/grade.py", ".", "--out", "../out/results.json", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(command, cwd=submission, env=environment, capture_output=True, text=True, timeout=300)


def grade(submission: Path, *flags: str, **variables: str) -> dict[str, tuple[float, str]]:
    """Points and text by row."""
    done = run(submission, *flags, **variables)
    assert done.returncode == 0, done.stderr
    result = json.loads((submission.parent / "out" / "results.json").read_text())
    rows = {row["name"]: (row["score"], row["output"]) for row in result["tests"]}
    return {**rows, "all": (result["score"], result["output"]), "table": (0, done.stdout)}


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(text)


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
    score, output = grade(submission, OPENAI_API_KEY="secret", HF_TOKEN="secret")["dpo"]
    variables, found = json.loads(output.split("RuntimeError: ")[1].splitlines()[0])
    kept = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS"}
    others = {name for name in variables if not name.startswith(("PYTHON", "KMP_", "TORCH"))} - kept
    assert (score, others, found) == (0, set(), [])


HIDDEN = """
import importlib
im = importlib.import_module
dpo = im("trl_ext.losses").dpo
"""


@pytest.mark.parametrize(
    "text, part",
    [
        (HIDDEN, "trl_ext cannot be imported here: the library holds the answers"),
        ("\nfrom helper import dpo\n", "helper.py, line 1, imports trl_ext.losses.dpo"),
        ("\nfrom lib.h import dpo\n", "lib/h.py, line 1, imports trl_ext.losses.dpo"),
        ("\nfrom .inner import dpo\n", "my_course/inner.py, line 1, imports trl_ext.losses.dpo"),
    ],
)
def test_answers_of_the_library_earn_nothing_by_whichever_file(text, part, submission):
    """The other module, which has none of it, keeps its points."""
    for path in ("helper.py", "lib/h.py", "my_course/inner.py"):
        append(submission / path, "from trl_ext.losses import dpo\n")
    append(submission / "my_course" / "pair.py", text)
    rows = grade(submission)
    assert rows["dpo"][0] == 0 and part in rows["dpo"][1]
    assert rows["group_centered"][0] == 3


def test_a_file_that_nothing_imports_costs_nothing_and_is_reported(submission):
    append(submission / "my_course" / "scratch.py", "import trl_ext.losses\n")
    rows = grade(submission)
    assert (rows["dpo"][0], rows["group_centered"][0]) == (5, 3)
    note = "no points lost, as no function's file imports it: my_course/scratch.py, line 1, imports trl_ext.losses"
    assert note in rows["all"][1] and note in rows["table"][1]


def test_a_function_of_the_library_is_known_by_its_code(submission):
    """Reached around the import: the module is loaded by its path."""
    import trl_ext.advantages

    append(
        submission / "my_course" / "group.py",
        "\nimport sys, types, functools\nroot = types.ModuleType('trl_ext'); root.__path__ = []\n"
        f"path = {trl_ext.advantages.__file__!r}\ncode = compile('def group_centered(rewards, group_size):\\n'\n"
        "    '    return rewards', path, 'exec')\nexec(code)\n"
        "group_centered = functools.partial(group_centered)\n",
    )
    score, output = grade(submission)["group_centered"]
    assert score == 0 and "group_centered in group.py is the library's own" in output


ODD = f"""
import importlib, sys

def never():
    importlib.import_module("lib/helper")
    __import__({"y" * 300!r})

dpo.__wrapped__ = dpo

class Other:
    dpo = staticmethod(dpo)

sys.modules[__name__] = Other()
"""


def test_odd_texts_neither_cost_points_nor_end_the_grader(submission):
    """A module without a file, a function that wraps itself, names that are no module's; a text that no file holds."""
    append(submission / "my_course" / "pair.py", ODD)
    code = "\ndef group_centered(rewards, group_size):\n    raise ValueError('a\\ud800b')\n"
    append(submission / "my_course" / "group.py", code)
    rows = grade(submission)
    assert rows["dpo"] == (5, "all cases pass")
    assert rows["group_centered"][0] == 0 and "it raises ValueError: a\ud800b" in rows["group_centered"][1]
    assert "it raises ValueError: a\\ud800b" in rows["table"][1]


FORGED = """
def {name}(*arguments, **options):
    import os, sys
    os.write(int(sys.argv[1]), b'{answer}\\n')
"""


def test_answers_that_the_student_s_code_writes_are_none(submission):
    """An error without a message is no right answer, and one that is no object does not end the grader."""
    nothing = '{"error": {"kind": "Missing", "message": null}}'
    append(submission / "my_course" / "pair.py", FORGED.format(name="dpo", answer=nothing))
    append(submission / "my_course" / "group.py", FORGED.format(name="group_centered", answer='{"error": "x"}'))
    rows = grade(submission)
    for name in ("dpo", "group_centered"):
        assert rows[name][0] == 0 and "it ended the process in which it ran" in rows[name][1]


def test_a_path_with_an_empty_entry_does_not_lead_to_the_submission(submission, tmp_path):
    append(submission / "json.py", "raise SystemExit('not json')\n")
    command = [sys.executable, "course_grader/grade.py", "course", "--out", "results.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["score"] == 8


def test_without_torch_nothing_is_graded(submission, tmp_path):
    """Status 2, one line that names the import, and no file of zeros."""
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\")"
    )
    done = run(submission, PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the process for the student's code does not start: ModuleNotFoundError: No")
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(
    "results, points, part",
    [
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": 0.7}}}', 2, "reached 0.700"),
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": true}}}', 0, "no finite number"),
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": 1e999}}}', 0, "no finite number"),
        ('{"yours": ["dpo"], "win_rate": ' + "[" * 100_000, 0, "RecursionError"),
        ('{"yours": [], "win_rate": {"half": {"rate": 0.7}}}', 0, "the run was not on the student's own dpo"),
        ("[1]", 0, "AttributeError"),
    ],
)
def test_figures_of_runs(results, points, part, submission):
    append(submission / "runs" / "dpo" / "results.json", results)
    append(submission / "my_course" / "deep.py", "x = " + "-" * 100_000 + "1\n")
    rows = grade(submission)
    assert rows["dpo: win_rate.half.rate >= 0.6"][0] == points
    assert part in rows["dpo: win_rate.half.rate >= 0.6"][1] and rows["dpo"][0] == 5


def test_students_are_not_told_what_hidden_cases_expect(submission):
    code = "\n_right = dpo\n\n\ndef dpo(scores, *, beta=0.1):\n    return -_right(scores, beta=beta)\n"
    append(submission / "my_course" / "pair.py", code)
    told = grade(submission)["dpo"][1]
    assert "wrong value at [0]; this is what you get when the sign is flipped" in told and "expected" not in told
    assert "expected" in grade(submission, "--show_values")["dpo"][1]


def test_a_wrong_folder_is_said_once(submission):
    shutil.rmtree(submission / "my_course")
    rows = grade(submission)
    assert rows["dpo"][0] == 0 and rows["table"][1].count("no folder my_course in") == 1


def test_flags_are_checked_first(submission):
    done = run(submission, "--visibility", "foo")
    assert done.returncode == 2 and "after_due_date" in done.stderr
    (submission.parent / "out" / "results.json").mkdir(parents=True)
    done = run(submission)
    assert done.returncode == 2 and "is a folder: name a file for --out" in done.stderr
    (submission.parent / "file").write_text("x")
    done = run(submission, "--out", "../file/deep/results.json")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --out ../file/deep/results.json: the folder ../file/deep cannot be made (")


def test_a_user_that_is_not_there_is_named(submission):
    """And not torch, which has nothing to do with it."""
    (submission.parent / "course_grader").chmod(0o700)
    done = run(submission, "--user", "nobody-of-this-name")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "torch" not in done.stderr
    assert "cannot be run as the user nobody-of-this-name" in done.stderr and "no such user" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_another_user_cannot_read_the_grader(submission, tmp_path):
    """As nobody, where the interpreter and the submission can be read by all."""
    done = run(submission, "--user", "nobody")
    assert done.returncode == 2 and "chmod 700 it" in done.stderr
    (tmp_path / "course_grader").chmod(0o700)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    code = "\ndef dpo(scores, *, beta=0.1):\n    import os\n"
    code += (
        f"    raise RuntimeError(str((os.getuid() != 0, os.access({str(tmp_path / 'course_grader')!r}, os.R_OK))))\n"
    )
    append(submission / "my_course" / "pair.py", code)
    done = run(submission, "--user", "nobody")
    if done.returncode == 2:
        pytest.skip(f"the interpreter is not everybody's: {done.stderr[-200:]}")
    assert "(True, False)" in done.stdout


def test_a_solution_that_would_not_pass_is_not_written(tmp_path, monkeypatch):
    """The text is made to differ from the library: the sign of the loss."""
    from trl_ext.assignment import writing

    real = writing.package_files

    def wrong(*arguments, **options):
        files, allowed = real(*arguments, **options)
        files["pair"] = files["pair"].replace("return -logsigmoid", "return logsigmoid")
        return files, allowed

    monkeypatch.setattr(writing, "package_files", wrong)
    with pytest.raises(ValueError, match="modules.pair: the solution of dpo would not pass: .*sign is flipped"):
        write_assignment(AssignmentSpec.model_validate(CONTENT), tmp_path / "course", solution=True)
    assert not list(tmp_path.iterdir())
