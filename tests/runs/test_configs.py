"""Every YAML file: recipes' configurations build what they say, and accelerate reads its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support import REPOSITORY, recipes

CONFIGS = sorted((recipes.RECIPES / "configs").glob("**/*.yaml"))
CONFIGS = [path for path in CONFIGS if path.parent.name != "compare"]
COMMAND = re.compile(r"^# .*recipes/(\w+)\.py --config (\S+)$", re.MULTILINE)
ACCELERATE_CONFIGS = sorted((REPOSITORY / "accelerate_configs").glob("*.yaml"))


def recipe_of(path: Path) -> str:
    """The recipe that runs a file: the one that its comment names with it, else the one of its name."""
    commands = {REPOSITORY / config: recipe for recipe, config in COMMAND.findall(path.read_text())}
    return commands.get(path, path.stem)


def test_recipe_configurations_build(monkeypatch):
    assert len(CONFIGS) > 30
    for path in CONFIGS:
        with monkeypatch.context() as patch:
            _check_configuration(path, patch)


def _check_configuration(path: Path, monkeypatch) -> None:
    parts = recipes.parse(monkeypatch, recipe_of(path), "--config", str(path))
    values = yaml.safe_load(path.read_text())
    for key, value in values.items():
        holder = next(part for part in parts if hasattr(part, key))
        # The course's word is also transformers' for something else: trl_ext/runs/course_config.py.
        built = getattr(holder, "responses_per_update" if key == "train_batch_size" else key)
        built = getattr(built, "value", built)
        # `none` is nothing.
        assert built == value or (value, built) == ("none", None), (path, key, value, built)


def course_run(monkeypatch, recipe: str) -> tuple:
    """The recipe's arguments and its trainer's configuration, on the course's model and adapter."""
    path = recipes.RECIPES / "configs" / "wildchat" / f"{recipe}.yaml"
    arguments, model, training = recipes.parse(monkeypatch, recipe, "--config", str(path))
    assert model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 32, 64, 0.05)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert model.lora_target_modules == projections
    # TRL's default would switch the adapter's dropout off.
    assert getattr(training, "disable_dropout", False) is False
    assert model.dtype == "bfloat16" and "bf16: true" in path.read_text()
    return arguments, training


@pytest.mark.parametrize(("method", "beta", "every"), [("dpo", 0.005, 100), ("ipo", 0.1, 100), ("aot", 0.2, 50)])
def test_the_course_runs(method, beta, every, monkeypatch):
    """The course's settings, number by number."""
    arguments, training = course_run(monkeypatch, method)
    assert (training.loss, training.beta) == (method, beta)
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.0)
    assert (training.learning_rate, training.warmup_steps, training.max_grad_norm) == (5e-5, 100, 1.0)
    assert training.lr_scheduler_type == "constant_with_warmup"
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 4)
    assert training.num_train_epochs == 3
    assert (training.max_prompt_tokens, training.max_response_tokens) == (700, 512)
    assert (training.eval_steps, training.save_steps, arguments.generation_eval_every) == (every, every, every)
    assert (arguments.num_generation_prompts, arguments.max_new_tokens) == (32, 256)
    assert arguments.generation_temperature == 0


def test_the_course_run_of_the_reward_model(monkeypatch):
    arguments, training = course_run(monkeypatch, "reward_model")
    assert (training.learning_rate, training.num_train_epochs) == (3e-5, 3)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 4)
    assert (training.eval_steps, training.save_steps) == (25, 25)
    assert (training.load_best_model_at_end, training.metric_for_best_model) == (True, "accuracy")
    assert (training.max_prompt_tokens, training.max_response_tokens) == (700, 512)
    assert arguments.eval_split == "test_prefs" and arguments.selection_split is None


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_its_configuration(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(path))
    expected = {"cpu": "NO", "single_gpu": "NO", "multi_gpu": "MULTI_GPU", "multi_node": "MULTI_GPU"}
    expected |= {"fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert str(loaded.distributed_type).rpartition(".")[2] == expected[path.stem]
    assert loaded.use_cpu is (path.stem == "cpu")
    if path.stem.startswith("zero"):
        assert loaded.deepspeed_config["zero_stage"] == int(path.stem[-1])
    if path.stem == "fsdp2":
        assert loaded.fsdp_config["fsdp_version"] == 2


def test_the_course_runs_online(monkeypatch):
    """The course's settings, number by number: 25 rollouts of 16 prompts x 4, each serving 8 updates."""
    for method in ("grpo", "dr_grpo", "gspo"):
        arguments, training = course_run(monkeypatch, method)
        objective = training.build_objective()
        assert arguments.reward_model == ["runs/reward-model-wildchat/checkpoint-200"]
        assert (training.generation_batch_size, training.num_generations, training.num_iterations) == (64, 4, 2)
        assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 2)
        assert training.updates_per_rollout == 8 and training.max_steps == 8 * 25
        assert (objective.epsilon, objective.epsilon_high) == (0.2, 0.2)
        assert (objective.beta, objective.kl_estimator, objective.kl_aggregation) == (0.01, "k3", "token_mean")
        assert objective.advantage_clip == 5
        assert (training.min_new_tokens, training.max_completion_length) == (32, 256)
        assert training.generation_kwargs == {"min_new_tokens": 32}
        assert (training.temperature, training.top_p, training.learning_rate) == (0.8, 0.95, 1e-5)
        assert (training.max_grad_norm, training.adam_beta1, training.adam_beta2) == (0.5, 0.9, 0.95)
        # Both every 25 rollouts, on 32 prompts.
        assert (arguments.generation_eval_every, training.save_steps) == (200, 200)
        assert (arguments.num_generation_prompts, arguments.generation_temperature) == (32, 0)
        named = f"berkeley_{method}"
        assert {**objective.to_dict(), "algorithm": named} == type(objective)(named).to_dict()
