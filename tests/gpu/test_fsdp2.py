"""The trainers under FSDP2 on one GPU or two: what data parallelism gives, saved, loaded and taken up again.

On a CPU, accelerate uses plain data parallelism instead.
"""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support import REPOSITORY, recipes
from tests.support.train_once import largest_difference, launch, relative_difference, train_under

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# As in the tests of ZeRO: an update is a smooth function of the gradient.
SETTINGS = {"optim": "adamw_torch", "adam_epsilon": 0.01, "max_steps": 3, "learning_rate": 0.01, "max_grad_norm": 1.0}
SETTINGS |= {"use_cpu": False, "bf16": False}
COMMON = {"dtype": None, "pairs": 12, "shift": True, "saves": True}
TRAINED = {
    "dpo": {"trainer": "PreferenceTrainer", "args": {"loss": "dpo"}},
    "aot": {
        "trainer": "PreferenceTrainer",
        "lora": True,
        "pairs": 24,
        "args": {"loss": "aot", "gradient_accumulation_steps": 2},
    },
    "reward": {"trainer": "RewardTrainer"},
    "policy": {"trainer": "PolicyTrainer", "fixed": True, "args": {"per_device_train_batch_size": 4, "beta": 0.05}},
}


def processes() -> int:
    return min(torch.cuda.device_count(), 2)


def specification(name: str, model: str, **arguments) -> dict:
    spec = {**COMMON, **TRAINED[name], "model": model}
    return {**spec, "args": {**SETTINGS, **spec.get("args", {}), **arguments}}


@pytest.fixture(scope="module")
def plain(tiny_model_path, tmp_path_factory):
    # Padded, as FSDP's passes are.
    specs = {name: specification(name, tiny_model_path, packing="off") for name in TRAINED}
    folder, settings = tmp_path_factory.mktemp("plain"), {"mixed_precision": "no"}
    return train_under("multi_gpu", specs, folder, processes=processes(), settings=settings)


@pytest.fixture(scope="module")
def sharded(tiny_model_path, tmp_path_factory):
    folder, specs = tmp_path_factory.mktemp("fsdp2"), {}
    for name in TRAINED:
        specs[name] = specification(name, tiny_model_path, save_strategy="steps", save_steps=2)
        specs[f"resumed_{name}"] = {**specs[name], "resume_from_checkpoint": str(folder / name / "checkpoint-2")}
    # Every process loads the weights, which a specification then moves.
    fsdp = yaml.safe_load((REPOSITORY / "accelerate_configs" / "fsdp2.yaml").read_text())["fsdp_config"]
    settings = {"mixed_precision": "no", "fsdp_config": {**fsdp, "fsdp_cpu_ram_efficient_loading": False}}
    return train_under("fsdp2", specs, folder, processes=processes(), settings=settings)


def test_the_engine_is_fsdp2_and_was_foreseen(sharded):
    for name, run in sharded.items():
        assert (run.facts["in_force"], run.facts["engine"]) == ("FSDP", "FSDP2"), name
        assert run.facts["shards"] > 0, name
        assert "packed_tokens" not in run.facts


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_data_parallelism(name, sharded, plain):
    run, expected = sharded[name], plain[name]
    assert largest_difference(run.start, expected.start) < 1e-6
    assert 0.001 < expected.change.abs().max() < 0.031
    assert relative_difference(run.change, expected.change) < 1e-3
    for entry, other in zip(run.logs, expected.logs, strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_a_resumed_run_ends_where_the_straight_one_does(name, sharded):
    run, expected = sharded[f"resumed_{name}"], sharded[name]
    assert largest_difference(run.parameters, expected.parameters) < 1e-5
    assert expected.logs[2]["loss"] != pytest.approx(expected.logs[1]["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["dpo", "reward", "policy"])
def test_a_saved_model_loads(name, sharded):
    run = sharded[name]
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(run.folder, dtype=torch.float32)
    assert largest_difference(dict(model.named_parameters()), run.parameters) == 0.0


def test_a_saved_adapter_merges(sharded, tiny_model_path):
    run = sharded["aot"]
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    name = "model.layers.1.self_attn.v_proj"
    before = base.state_dict()[f"{name}.weight"].clone()
    merged = PeftModel.from_pretrained(base, run.folder).merge_and_unload().state_dict()[f"{name}.weight"]
    a, b = (run.parameters[f"base_model.model.{name}.lora_{side}.default.weight"] for side in "AB")
    torch.testing.assert_close(merged, before + 2 * b @ a, rtol=0, atol=1e-6)


def test_a_recipe_trains_by_the_configuration_that_users_get(tmp_path):
    """In bfloat16, with weights loaded by the first process alone; the base is compared with at the end."""
    script = [str(recipes.RECIPES / "aot.py"), "--max_steps=2", "--per_device_train_batch_size=4", "--save_steps=1"]
    script += ["--eval_strategy=no", "--eval_split=none", "--generation_eval_every=0", "--num_eval_prompts=4"]
    script.append(f"--output_dir={tmp_path / 'run'}")
    launched = launch("fsdp2", script, tmp_path, processes=processes(), settings={"mixed_precision": "bf16"})
    assert launched.returncode == 0, launched.stderr[-8000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["run"]["optimizer_steps"], results["run"]["processes"]) == (2, processes())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert sum(parameter.numel() for parameter in model.parameters()) == 403_680
