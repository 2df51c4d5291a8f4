"""Packed passes and FSDP2 on a GPU, without which these tests are skipped."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.support import REPOSITORY, recipes
from tests.support.packing import compare, forward, ragged, tiny_model
from tests.support.sharded import TRAINED, check_saved_adapter, check_saved_model, with_arguments
from tests.support.tiny import pairs
from tests.support.train_once import largest_difference, launch, relative_difference, train_under
from trl_ext import PreferenceConfig, PreferenceTrainer
from trl_ext.models.packing import share_prefixes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
has_flash_attention = importlib.util.find_spec("flash_attn") is not None
needs_flash_attention = pytest.mark.skipif(not has_flash_attention, reason="needs flash-attn")


def on_gpu(batch: dict) -> dict:
    return {name: tensor.cuda() for name, tensor in batch.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_float32_is_that_of_padded_passes(architecture):
    packing, apart, gradient_apart = compare(tiny_model(architecture).cuda(), on_gpu(ragged()))
    assert packing.active and packing.packed_tokens < packing.padded_tokens
    assert apart < 1e-4 and gradient_apart < 1e-4


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("flash_attention_2", marks=needs_flash_attention)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_is_no_further_from_float32_than_padded_passes(architecture, backend):
    """Where the back-end cannot be packed, rows stay padded and the two are the same."""
    batch = on_gpu(ragged())
    places = batch["labels"][:, 1:] != -100
    exact = forward(tiny_model(architecture).cuda(), batch).log_probs[places]
    model = tiny_model(architecture, attn_implementation=backend).to("cuda", torch.bfloat16)
    padded = forward(model, batch).log_probs[places].float()
    packing = share_prefixes(model)
    packed = forward(model, batch).log_probs[places].float()
    if backend == "sdpa":
        assert packing.active and packing.packed_tokens < packing.padded_tokens
    error, packed_error = (padded - exact).abs().mean(), (packed - exact).abs().mean()
    assert 0 < error < 0.1
    assert packed_error < 1.5 * error


def test_trained_in_mixed_precision(tiny_model_path, tmp_path):
    """As users train on a GPU: bfloat16, checkpointing, packed by default; losses near those of padded passes."""
    losses = {}
    for packing in ("auto", "off"):
        settings = {"packing": packing, "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
        settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "seed": 0}
        args = PreferenceConfig(output_dir=str(tmp_path / packing), **settings)
        assert args.bf16 and args.gradient_checkpointing
        trainer = PreferenceTrainer(tiny_model_path, args=args, train_dataset=Dataset.from_list(pairs(16)))
        trainer.train()
        losses[packing] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if packing == "auto":
            assert trainer.packing.active and trainer.packing.packed_tokens < 0.7 * trainer.packing.padded_tokens
            trainer.save_model()
            saved = AutoModelForCausalLM.from_pretrained(args.output_dir)
            own = trainer.accelerator.unwrap_model(trainer.model).state_dict()
            assert all(torch.equal(value, own[name].cpu()) for name, value in saved.state_dict().items())
    assert losses["auto"] == pytest.approx(losses["off"], rel=0.05)
    assert losses["auto"][-1] != pytest.approx(losses["auto"][0], rel=0.05)


# ---- FSDP2 on one GPU or two: what data parallelism gives, saved, loaded and taken up again ----

NAMES = ["dpo", "aot", "reward", "policy"]


def processes() -> int:
    return min(torch.cuda.device_count(), 2)


def specification(name: str, model: str, **arguments) -> dict:
    return with_arguments({**TRAINED[name], "model": model}, use_cpu=False, bf16=False, **arguments)


@pytest.fixture(scope="module")
def plain(tiny_model_path, tmp_path_factory):
    specs = {name: specification(name, tiny_model_path) for name in NAMES}
    folder, settings = tmp_path_factory.mktemp("plain"), {"mixed_precision": "no"}
    return train_under("multi_gpu", specs, folder, processes=processes(), settings=settings)


@pytest.fixture(scope="module")
def sharded(tiny_model_path, tmp_path_factory):
    folder, specs = tmp_path_factory.mktemp("fsdp2"), {}
    for name in NAMES:
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
        assert run.facts["packed_tokens"] > 0, name


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_data_parallelism(name, sharded, plain):
    run, expected = sharded[name], plain[name]
    assert largest_difference(run.start, expected.start) < 1e-6
    assert 0.001 < expected.change.abs().max() < 0.031
    assert relative_difference(run.change, expected.change) < 1e-3
    for entry, other in zip(run.logs, expected.logs, strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_where_the_straight_one_does(name, sharded):
    run, expected = sharded[f"resumed_{name}"], sharded[name]
    assert largest_difference(run.parameters, expected.parameters) < 1e-5
    assert expected.logs[2]["loss"] != pytest.approx(expected.logs[1]["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["dpo", "reward", "policy"])
def test_a_saved_model_loads(name, sharded):
    check_saved_model(name, sharded[name])


def test_a_saved_adapter_merges(sharded, tiny_model_path):
    check_saved_adapter("aot", sharded["aot"], tiny_model_path)


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
