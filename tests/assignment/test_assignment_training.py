"""Training on students' functions: the solution as the library, the starter with an error, a module alone."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.assignment.test_assignment_grader import SPECS, run
from trl_ext.assignment.builder.spec import load_spec
from trl_ext.assignment.builder.writing import write_assignment
from trl_ext.assignment.train import command
from trl_ext.assignment.train.functions import Functions
from trl_ext.assignment.train.loops import Loop
from trl_ext.assignment.train.recipe import LoopSettings
from trl_ext.data.math import load_math

pytestmark = pytest.mark.slow

SHORT = ("--max_steps", "3", "--eval_prompts", "0", "--disable_tqdm", "true", "--seed", "0")


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """`train(recipe, implementation, *flags)` in this process, in the folder of both solutions, on one thread."""
    folder = tmp_path_factory.mktemp("solved")
    for name in SPECS:
        write_assignment(load_spec(name), folder / name, solution=True)

    def train_here(spec: str, recipe: str, implementation: str, *flags: str) -> dict:
        out = folder / f"{recipe}-{implementation}"
        arguments = ["--assignment", str(folder / spec / "assignment.yaml"), "--recipe", recipe]
        command.main([*arguments, "--implementation", implementation, "--output_dir", str(out), *flags])
        return load_file(out / "model.safetensors")

    path, threads = list(sys.path), torch.get_num_threads()
    torch.set_num_threads(1)
    yield train_here
    torch.set_num_threads(threads)
    sys.path[:] = path


@pytest.mark.parametrize("recipe", ["dpo", "aot", "reward_model", "grpo", "dr_grpo", "gspo"])
def test_training_on_the_solution_is_training_on_the_library(recipe, solved, capsys):
    """Three steps leave the same parameters, to the last bit: both run one function after the other alike."""
    own = solved("rlhf_project", recipe, "my_rlhf", *SHORT)
    assert ": yours" in capsys.readouterr().out
    library = solved("rlhf_project", recipe, "library", *SHORT)
    assert ": the library's" in capsys.readouterr().out
    assert own.keys() == library.keys()
    assert all(torch.equal(own[name], library[name]) for name in own)


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_the_reasoning_loops_run_alike_on_the_solution_and_the_library(recipe, solved):
    flags = ("--steps", "2", "--eval_prompts", "0", "--gradient_accumulation_steps", "2")
    own, library = (solved("reasoning", recipe, name, *flags) for name in ("my_reasoning", "library"))
    assert all(torch.equal(own[name], library[name]) for name in own)


@contextlib.contextmanager
def replaced(module: str, name: str, function):
    """A student's function in the place of a solved one."""
    loaded = sys.modules[module]
    right = getattr(loaded, name)
    function.__module__, function.__name__ = module, name
    setattr(loaded, name, function)
    try:
        yield
    finally:
        setattr(loaded, name, right)


def test_wrong_answers_train_to_something_else(solved):
    """The comparison above would show a student's function that is not used: a loss of the other sign."""
    right = solved("rlhf_project", "ipo", "library", *SHORT)
    solved("rlhf_project", "dpo", "my_rlhf", *SHORT)
    ipo = sys.modules["my_rlhf.preference"].ipo
    with replaced("my_rlhf.preference", "ipo", lambda scores, *, beta=0.1: -ipo(scores, beta=beta)):
        wrong = solved("rlhf_project", "ipo", "my_rlhf", *SHORT)
    assert any(not torch.equal(wrong[name], right[name]) for name in right)


def test_a_whole_loss_trains_as_the_library_s_algorithm_does(solved, tmp_path):
    """GRPO as one scalar from the student, and as the row of the table that the recipes train with."""
    from trl_ext import PolicyConfig, PolicyTrainer, load_benchmark
    from trl_ext.assignment.train.trainers import known_score
    from trl_ext.toy import MODEL_DIR

    own = solved("rlhf_project", "grpo", "my_rlhf", *SHORT, "--num_iterations", "2")
    spec = load_spec("rlhf_project")
    settings = {**spec.recipes["grpo"].settings, "max_steps": 3, "num_iterations": 2, "max_completion_length": 48}
    config = PolicyConfig(
        output_dir=str(tmp_path / "own"),
        algorithm="grpo",
        beta=0.0,
        seed=0,
        report_to="none",
        save_strategy="no",
        **settings,
    )
    trainer = PolicyTrainer(str(MODEL_DIR), [known_score], args=config, train_dataset=load_benchmark()["train_gen"])
    trainer.train()
    trained = dict(trainer.model.named_parameters())
    assert all(torch.allclose(own[name], trained[name].cpu(), atol=1e-5) for name in own)


@pytest.mark.parametrize(
    "recipe, part",
    [
        ("dpo", "implement dpo in my_rlhf/preference.py"),
        ("grpo", "implement group_normalized"),
    ],
)
def test_training_on_the_starter_says_what_to_implement(recipe, part, tmp_path):
    write_assignment(load_spec("rlhf_project"), tmp_path / "course")
    done = run("train.py", "--recipe", recipe, *SHORT, folder=tmp_path / "course")
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and len(errors) == 1 and part in errors[0] and "Traceback" not in done.stderr


@pytest.mark.long
def test_a_module_alone_can_be_the_implementation(tmp_path):
    """The preference module of a starter in which nothing else is written, and names that are not there."""
    folder = tmp_path / "course"
    write_assignment(load_spec("rlhf_project"), folder)
    with open(folder / "my_rlhf" / "preference.py", "a") as file:
        file.write("\n\ndef dpo(scores, *, beta=0.1):\n    return (1 + (-beta * scores.margin).exp()).log()\n")
    done = run("train.py", "--recipe", "dpo", "--implementation", "my_rlhf.preference", *SHORT, folder=folder)
    assert done.returncode == 0 and "dpo: yours" in done.stdout, done.stderr[-3000:]
    for arguments, part in (
        (("--recipe", "dop"), "no recipe 'dop'; did you mean 'dpo'? Known: dpo, ipo, aot"),
        (("--recipe", "dpo", "--implementation", "my_rhlf.preference"), "No module named 'my_rhlf'"),
        (
            ("--recipe", "dpo", "--implementation", "my_rlhf.scores"),
            "my_rlhf.scores has none of the assignment's functions",
        ),
        (("--recipe", "dpo", "--learning_rat", "1"), "has no setting --learning_rat"),
    ):
        done = run("train.py", *arguments, folder=folder)
        assert done.returncode == 2 and part in done.stderr, done.stderr[-500:]


def test_runs_on_the_library_have_another_folder(tmp_path, monkeypatch):
    """A threshold is on runs/NAME, where a run on the library's functions must not be."""
    write_assignment(load_spec("reasoning"), tmp_path / "course", solution=True)
    monkeypatch.chdir(tmp_path / "course")
    monkeypatch.setattr(sys, "path", list(sys.path))
    none = ("--recipe", "sft", "--steps", "0", "--eval_prompts", "0")
    command.main([*none, "--implementation", "library"])
    assert [path.name for path in Path("runs").iterdir()] == ["sft-library"]
    command.main(list(none))
    assert sorted(path.name for path in Path("runs").iterdir()) == ["sft", "sft-library"]
    assert "sft_microbatch_step" in json.loads(Path("runs/sft/results.json").read_text())["yours"]
    plan = json.loads((tmp_path / "course_grader" / "grading.json").read_text())
    uses = ["tokenize_prompt_and_output", "response_log_probs", "sft_microbatch_step"]
    assert [each["uses"] for each in plan["thresholds"] if each["recipe"] == "sft"] == [uses]


def test_figures_are_read_by_the_library_s_parser():
    """Not by the student's, which may be blank in a recipe that does not train on it, or read other numbers."""

    def blank(model_output):
        raise NotImplementedError("implement parse_gsm8k_response")

    functions = Functions({"parse": blank}, {"parse": "rewards.parse_gsm8k_response"}, {"parse"})
    loop = Loop(functions, LoopSettings())
    rows = load_math("toy", "test")[:20]
    assert loop.accuracy(rows) == Loop(Functions({}, {}), LoopSettings()).accuracy(rows)
    with pytest.raises(NotImplementedError):
        loop._reward("5", "5")
    assert functions.yours(["parse", "other"]) == ["parse"] and functions.yours(["other"]) == []


@pytest.mark.parametrize(
    ("spec", "recipe", "kind"), [("reasoning", "sft", "sft_loop"), ("rlhf_project", "dpo", "preference")]
)
def test_a_reward_model_is_refused_where_none_is_used(spec, recipe, kind, solved, capsys):
    with pytest.raises(SystemExit) as stopped:
        solved(spec, recipe, "library", "--reward_model", "/nowhere")
    assert stopped.value.code == 2
    line = f"--reward_model is used by recipes of the kind policy, and {recipe} is of the kind {kind}"
    assert line in capsys.readouterr().err


def test_a_step_without_a_backward_pass_is_an_error(solved, capsys):
    """Training would go on and change nothing."""
    short = ("--steps", "1", "--eval_prompts", "0")
    solved("reasoning", "sft", "library", *short)
    importlib.import_module("my_reasoning.losses")

    def no_backward(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0):
        return -(policy_log_probs * response_mask).sum(), {}

    with replaced("my_reasoning.losses", "sft_microbatch_step", no_backward), pytest.raises(SystemExit) as stopped:
        solved("reasoning", "sft", "my_reasoning", *short)
    assert stopped.value.code == 2
    assert "no gradient has reached the model: does the micro-batch step call backward()?" in capsys.readouterr().err
