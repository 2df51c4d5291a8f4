"""Assignments: what is written, the grader, the cases of each function, and training on students' functions."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from tests.support.naive_policy import algorithm
from trl_ext import PolicyConfig, PolicyTrainer, load_benchmark
from trl_ext.assignment import cases, train
from trl_ext.assignment.cases import TASKS, build_cases
from trl_ext.assignment.checking import call, verdict
from trl_ext.assignment.mistakes import LOG_OF_SIGMOID, mistakes_of
from trl_ext.assignment.write import HERE, write_assignment
from trl_ext.files import read_yaml
from trl_ext.losses import PolicyScores, PreferenceScores
from trl_ext.toy import MODEL_DIR

SHIPPED = ("rlhf_project", "reasoning")


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def grade(submission: Path, *flags: str, **variables: str) -> tuple[dict[str, dict], dict]:
    """The rows of Gradescope's JSON by name, and the whole of it."""
    grader = submission.with_name(f"{submission.name}_grader")
    done = run("grade.py", str(submission), "--out", "../out/results.json", *flags, folder=grader, **variables)
    assert done.returncode == 0, done.stderr
    result = json.loads((submission.parent / "out" / "results.json").read_text())
    return {row["name"]: row for row in result["tests"]}, result


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(text)


def small(tmp_path: Path, **tests) -> Path:
    """A folder of one's own: three functions of a shipped package, and thresholds."""
    shutil.copytree(HERE / "packages" / "rlhf_project", tmp_path / "own")
    spec = read_yaml(tmp_path / "own" / "assignment.yaml")
    spec["points"] = {"dpo": 5, "group_centered": 3, "ipo": 1}
    goal = {"measure": "win_rate.half.rate", "at_least": 0.6, "points": 2}
    spec["thresholds"] = [{"recipe": "dpo", **goal}, {"recipe": "ipo", **goal}]
    spec["tests"] |= {"visible": 1, "hidden": 3, "seconds": 4, **tests}
    (tmp_path / "own" / "assignment.yaml").write_text(yaml.safe_dump(spec))
    return tmp_path / "own"


# ---- What is written ----


@pytest.mark.parametrize("name", SHIPPED)
def test_the_starter_is_blank_and_the_grader_apart(name, tmp_path):
    source = HERE / "packages" / name
    spec = read_yaml(source / "assignment.yaml")
    starter, grader = write_assignment(source, tmp_path / "course")
    found = {}
    for file in (starter / spec["package"]).glob("*.py"):
        text = file.read_text()
        assert "SOLUTION" not in text and "trl_ext" not in text
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                assert len(node.body) == 2 and ast.get_docstring(node), node.name
                found[node.name] = ast.unparse(node.body[1])
    assert found.keys() == spec["points"].keys()
    assert all(f"implement {name} in {spec['package']}/" in error for name, error in found.items())
    assert "tests" not in read_yaml(starter / "assignment.yaml"), "no seed of hidden cases"
    assert not list(starter.rglob("*grad*"))
    assert {"grade.py", "worker.py", "setup.sh", "run_autograder", "cases.pt"} <= {p.name for p in grader.iterdir()}


def test_hidden_cases_are_drawn_anew_unless_they_have_a_seed(tmp_path):
    def drawn(name: str, **tests) -> list[str]:
        starter, grader = write_assignment(small(tmp_path / name, **tests), tmp_path / name / "course")
        items = [torch.load(folder / "cases.pt", weights_only=True) for folder in (starter / "tests", grader)]
        return [str([case["arguments"] for item in each for case in item["cases"]]) for each in items]

    one, two, three, four = drawn("one"), drawn("two"), drawn("three", hidden_seed=7), drawn("four", hidden_seed=7)
    assert one[0] == two[0] and len({one[1], two[1], three[1]}) == 3 and three == four


def test_what_cannot_be_written_is_refused(tmp_path):
    source = small(tmp_path)
    spec = read_yaml(source / "assignment.yaml")
    few = {"points": {"aggregate": 5}, "tests": spec["tests"] | {"hidden": 1}}
    for change, part in (({"points": {"ipoo": 5}}, "unknown ipoo"), (few, "do not show the mistake")):
        (source / "assignment.yaml").write_text(yaml.safe_dump(spec | change))
        with pytest.raises(ValueError, match=part):
            write_assignment(source, tmp_path / "other")
    with pytest.raises(ValueError, match="own is there already"):
        write_assignment(source, source)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_commands(tmp_path):
    """The visible tests fail on the starter and pass on the solution, with torch and pytest alone."""
    arguments = ("-m", "trl_ext.assignment", "--spec", "reasoning")
    blocked = "import sys; sys.modules |= dict.fromkeys(['trl_ext', 'trl', 'transformers']); import pytest; "
    for name, flags, status in (("starter", (), 1), ("solved", ("--solution",), 0)):
        done = run(*arguments, "--out", name, *flags, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        tested = run("-c", blocked + "sys.exit(pytest.main(['-q', 'tests']))", folder=tmp_path / name)
        assert tested.returncode == status, tested.stdout[-3000:]
        assert (" passed" in tested.stdout.splitlines()[-1]) == (" failed" not in tested.stdout.splitlines()[-1])
    assert {path.name for path in tmp_path.iterdir()} == {"starter", "starter_grader", "solved", "solved_grader"}
    again = run(*arguments, "--out", "starter", folder=tmp_path)
    assert again.returncode == 2 and again.stderr.startswith("error: ")


# ---- The grader ----

# Each is written behind the right function of its name, whose file's others keep their points.
BROKEN = {
    "dpo": ("def dpo(scores, *, beta=0.1):\n    while True:\n        pass\n", "it took more than 4 s"),
    "ipo": ("def ipo(scores, **options):\n    raise SystemExit(0)\n", "ends the program"),
    "aot": ("def aot(scores, **options):\n    import os\n    os._exit(0)\n", "it ended the process in which it ran"),
    "sequence_log_probs": ("def completion_mask(:\n", "log_probs.py cannot be imported (my_rlhf/log_probs.py, line"),
    "group_normalized": ("del group_normalized\n", "my_rlhf/policy.py has no function group_normalized"),
    "group_centered": ("def group_centered(rewards, group_size):\n    return 'ok'\n", "must be a tensor"),
    "token_log_ratio": (
        "def token_log_ratio(log_probs, old_log_probs):\n    import trl\n",
        "trl cannot be imported here: the library holds the answers",
    ),
    # What the process can see: no keys, and no folder of the path with expected values.
    "bradley_terry": (
        "def bradley_terry(*arguments, **options):\n    import os, sys\n"
        "    near = [name for folder in sys.path if os.path.isdir(folder) for name in os.listdir(folder)]\n"
        "    found = {'cases.pt', 'grading.json', 'grade.py'} & {*near}\n"
        "    raise RuntimeError(f'{found}, {[name for name in os.environ if name.endswith(\"KEY\")]}')\n",
        "raises RuntimeError: set(), []",
    ),
}


@pytest.mark.slow
def test_the_grader_names_what_is_wrong_with_each_broken_function(tmp_path):
    submission, grader = write_assignment(HERE / "packages" / "rlhf_project", tmp_path / "course", solution=True)
    rows, result = grade(submission)
    points = read_yaml(HERE / "packages" / "rlhf_project" / "assignment.yaml")["points"]
    assert {name: rows[name]["score"] for name in points} == points
    assert result["score"] == sum(points.values()) and result["stdout_visibility"] == "hidden"
    assert {"name", "score", "max_score", "output", "visibility", "status"} <= result["tests"][0].keys()
    plan = json.loads((grader / "grading.json").read_text())
    (grader / "grading.json").write_text(json.dumps(plan | {"seconds": 4}))
    modules = {item["name"]: item["module"] for item in torch.load(grader / "cases.pt", weights_only=True)}
    for name, (code, _) in BROKEN.items():
        append(submission / f"{modules[name].replace('.', '/')}.py", f"\n\n{code}")
    # Files that would be imported in place of others.
    append(submission / "torch.py", "raise SystemExit('not torch')\n")
    append(submission / "checking.py", "raise SystemExit('not the checks')\n")
    rows, _ = grade(submission, OPENAI_API_KEY="secret")
    for name, (_, part) in BROKEN.items():
        assert rows[name]["score"] == 0 and part in rows[name]["output"], (name, rows[name]["output"][:400])
    for name in ("clipped_surrogate", "aggregate"):
        assert rows[name]["score"] == rows[name]["max_score"], rows[name]["output"]


@pytest.mark.slow
def test_imports_and_what_students_are_told(tmp_path):
    """Right for one of two betas, which cases have in turn. Students read no expected value."""
    submission, grader = write_assignment(small(tmp_path), tmp_path / "course", solution=True)
    code = "\nright = dpo\n\n\ndef dpo(scores, *, beta):\n    sign = 1 if beta < 0.3 else -1\n"
    append(submission / "my_rlhf" / "preference.py", code + "    return sign * right(scores, beta=beta)\n")
    # The library, by way of another file.
    append(submission / "helper.py", "from trl_ext.advantages import group_centered\n")
    append(submission / "my_rlhf" / "policy.py", "\nfrom helper import group_centered\n")
    rows, _ = grade(submission)
    # Of seven cases, 0 to 2, 100 to 102 and 200, those with an even number have beta 0.1.
    assert rows["dpo"]["score"] == 0 and "2 of 7 cases fail" in rows["dpo"]["output"]
    flipped = r"is wrong at \[\d\]; this is what you get when the sign is flipped"
    assert re.search(flipped, rows["dpo"]["output"])
    assert "expected" not in rows["dpo"]["output"]
    assert "policy.py cannot be imported (helper.py, line 1)" in rows["group_centered"]["output"]
    assert rows["ipo"]["score"] == 1
    (grader / "worker.py").write_text("import no_such_library\n")
    done = run("grade.py", str(submission), "--out", "../one.json", folder=grader)
    assert done.returncode == 1 and "does not start, and nothing is graded" in done.stderr
    assert "No module named 'no_such_library'" in done.stderr and not (tmp_path / "one.json").exists()


@pytest.mark.parametrize(
    "results, points, part",
    [
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": 0.6}}}', 2, "reached 0.600"),
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": 0.5}}}', 0, "reached 0.500"),
        ('{"yours": ["dpo"], "win_rate": {"half": {"rate": NaN}}}', 0, "no finite number"),
        ('{"yours": [], "win_rate": {"half": {"rate": 0.7}}}', 0, "the run was not on the student's own"),
        ("[1]", 0, "TypeError"),
    ],
)
def test_figures_of_runs(results, points, part, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    grade_threshold = runpy.run_path(str(HERE / "grader" / "grade.py"))["grade_threshold"]
    append(tmp_path / "runs" / "dpo" / "results.json", results)
    goal = {"measure": "win_rate.half.rate", "at_least": 0.6, "points": 2}
    row = grade_threshold(tmp_path, {"recipe": "dpo", "uses": ["dpo"], **goal})
    assert row["score"] == points and part in row["output"]


# ---- The solutions are the library, and every known mistake is named ----

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


# ---- Training on students' functions ----

SHORT = ("--max_steps", "2", "--eval_prompts", "0", "--disable_tqdm", "true", "--seed", "0")


@pytest.fixture
def course(tmp_path, monkeypatch):
    """`course(package, solution)`: the folder of an assignment, which is the working directory."""

    def write(package: str, solution: bool = True) -> None:
        write_assignment(HERE / "packages" / package, tmp_path / "course", solution=solution)
        monkeypatch.chdir(tmp_path / "course")

    monkeypatch.setattr(sys, "path", list(sys.path))
    yield write
    for module in [name for name in sys.modules if name.startswith(("my_rlhf", "my_reasoning"))]:
        del sys.modules[module]


def results(recipe: str) -> dict:
    return json.loads(Path(f"runs/{recipe}/results.json").read_text())


def error(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        train.main(list(arguments))
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_loss_trains_as_the_library_s_algorithm_does(course, tmp_path):
    """GRPO as one scalar from the student, and as the row of the table that the recipes train with."""
    course("rlhf_project")
    train.main(["--recipe", "grpo", *SHORT, "--num_iterations", "2"])
    assert results("grpo") == {"recipe": "grpo", "yours": ["grpo_loss", "group_normalized"], "steps": 2}
    settings = train.read_yaml("assignment.yaml")["recipes"]["grpo"]["settings"] | train.COMMON
    settings |= {"max_steps": 2, "num_iterations": 2, "max_completion_length": 48, "output_dir": str(tmp_path / "own")}
    config = PolicyConfig(algorithm="grpo", beta=0.0, seed=0, **settings)
    prompts = load_benchmark()["train_gen"]
    trainer = PolicyTrainer(str(MODEL_DIR), [train.known_score], args=config, train_dataset=prompts)
    trainer.train()
    own, trained = load_file("runs/grpo/model.safetensors"), dict(trainer.model.named_parameters())
    assert all(torch.allclose(own[name], trained[name].cpu(), atol=1e-5) for name in own)


@pytest.mark.slow
def test_a_preference_run_is_compared_with_its_base(course, capsys):
    course("rlhf_project")
    train.main(["--recipe", "ipo", *SHORT, "--eval_prompts", "8"])
    assert results("ipo")["yours"] == ["ipo"] and results("ipo")["win_rate"]["half"]["n"] == 8
    unknown = error(capsys, "--recipe", "dpo", "--learning_rat", "1")
    assert "PreferenceConfig has no setting --learning_rat" in unknown


@pytest.mark.slow
def test_steps_train_and_accuracy_is_the_library_s(course, capsys):
    """A student whose parser finds nothing earns no reward but has an accuracy, and a step must call backward()."""
    course("reasoning")
    short = ("--max_steps", "1", "--eval_prompts", "20", "--disable_tqdm", "true")
    train.main(["--recipe", "sft", *short])
    assert "sft_microbatch_step" in results("sft")["yours"] and results("sft")["accuracy"] > 0.3
    importlib.import_module("my_reasoning.rewards").parse_gsm8k_response = lambda model_output: None
    train.main(["--recipe", "grpo", *short, "--per_device_train_batch_size", "4", "--num_generations", "2"])
    assert results("grpo")["accuracy"] > 0.3
    own, before = (load_file(f"{folder}/model.safetensors") for folder in ("runs/grpo", MODEL_DIR))
    assert all(torch.equal(own[name], before[name].to(own[name])) for name in own)
    module = importlib.import_module("my_reasoning.losses")
    module.sft_microbatch_step = lambda log_probs, mask, steps, **_: (-(log_probs * mask).sum(), {})
    assert "no gradient has reached the log-probabilities" in error(capsys, "--recipe", "sft", *short)


@pytest.mark.slow
def test_a_function_that_is_not_implemented(course, capsys):
    course("rlhf_project", solution=False)
    assert "implement dpo in my_rlhf/preference.py" in error(capsys, "--recipe", "dpo", *SHORT)
    assert "no recipe 'dop': there are dpo, ipo, aot" in error(capsys, "--recipe", "dop")
