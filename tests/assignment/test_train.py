"""Training on students' functions: as the library trains, with figures of the library, and errors in one line."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trl_ext import PolicyConfig, PolicyTrainer, load_benchmark
from trl_ext.assignment import train
from trl_ext.assignment.write import HERE, write_assignment
from trl_ext.toy import MODEL_DIR

pytestmark = pytest.mark.slow

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


def test_a_preference_run_is_compared_with_its_base(course, capsys):
    course("rlhf_project")
    train.main(["--recipe", "ipo", *SHORT, "--eval_prompts", "8"])
    assert results("ipo")["yours"] == ["ipo"] and results("ipo")["win_rate"]["half"]["n"] == 8
    unknown = error(capsys, "--recipe", "dpo", "--learning_rat", "1")
    assert "PreferenceConfig has no setting --learning_rat" in unknown


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


def test_a_function_that_is_not_implemented(course, capsys):
    course("rlhf_project", solution=False)
    assert "implement dpo in my_rlhf/preference.py" in error(capsys, "--recipe", "dpo", *SHORT)
    assert "no recipe 'dop': there are dpo, ipo, aot" in error(capsys, "--recipe", "dop")
