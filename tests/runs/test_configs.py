"""Every YAML file: recipes' configurations build what they say, and accelerate reads its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import get_scheduler

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


@pytest.mark.parametrize(("method", "beta", "every"), [("dpo", 0.005, 100), ("ipo", 0.1, 100), ("aot", 0.2, 50)])
def test_the_course_runs(method, beta, every, monkeypatch):
    """The course's settings, number by number."""
    path = recipes.RECIPES / "configs" / "wildchat" / f"{method}.yaml"
    arguments, model, training = recipes.parse(monkeypatch, method, "--config", str(path))
    assert model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 32, 64, 0.05)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert model.lora_target_modules == projections
    # TRL's default would switch the adapter's dropout off.
    assert training.disable_dropout is False
    assert (training.loss, training.beta) == (method, beta)
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.0)
    assert (training.learning_rate, training.warmup_steps) == (5e-5, 100)
    assert training.lr_scheduler_type == "constant_with_warmup"
    assert training.max_grad_norm == 1.0
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 4)
    assert training.num_train_epochs == 3
    assert (training.max_prompt_tokens, training.max_response_tokens) == (700, 512)
    assert (training.eval_steps, training.save_steps, arguments.generation_eval_every) == (every, every, every)
    assert (arguments.num_generation_prompts, arguments.max_new_tokens) == (32, 256)
    assert arguments.generation_temperature == 0
    assert model.dtype == "bfloat16" and "bf16: true" in path.read_text()


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
        path = recipes.RECIPES / "configs" / "wildchat" / f"{method}.yaml"
        arguments, model, training = recipes.parse(monkeypatch, method, "--config", str(path))
        objective = training.build_objective()
        assert arguments.reward_model == ["runs/reward-model-wildchat/checkpoint-200"]
        assert (model.use_peft, model.lora_r, model.lora_alpha, model.lora_dropout) == (True, 32, 64, 0.05)
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
        _is_the_courses_warm_up(training)
        named = f"berkeley_{method}"
        assert {**objective.to_dict(), "algorithm": named} == type(objective)(named).to_dict()


def _is_the_courses_warm_up(training) -> None:
    """The course sets the rate before each rollout r of 1 to 25, to lr * min(1, r / 20), and keeps it for 8 updates.

    The first 20 rollouts: 8 * 1e-5 * (1 + ... + 20) / 20 = 8.4e-4; the other 5: 8 * 5e-5 = 4e-4; in sum 1.24e-3.
    transformers rises with every update, from 0: u / 160 of lr at the u-th of 0 to 199, in sum
    1e-5 * (159 / 2 + 40) = 1.195e-3. It is behind by 1 / 20 of lr where a rollout begins, and by 1 / 160 at its end.
    """
    course = [1e-5 * min(1, (update // 8 + 1) / 20) for update in range(200)]
    assert course[40] == pytest.approx(3e-6) and sum(course) == pytest.approx(1.24e-3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    steps = {"num_warmup_steps": training.get_warmup_steps(200), "num_training_steps": 200}
    schedule, rates = get_scheduler(training.lr_scheduler_type, optimizer, **steps), []
    for _ in range(200):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    expected = {0: 0.0, 1: 6.25e-8, 40: 2.5e-6, 159: 9.9375e-6, 160: 1e-5, 199: 1e-5}
    assert {update: rates[update] for update in expected} == pytest.approx(expected)
    assert sum(rates) == pytest.approx(1.195e-3)
    behind = [one - other for one, other in zip(course, rates, strict=True)]
    assert behind[:16] == pytest.approx([(8 - update % 8) * 1e-5 / 160 for update in range(16)])
    assert (max(behind), min(behind)) == pytest.approx((5e-7, 0.0))
