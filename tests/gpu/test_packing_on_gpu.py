"""Packed passes on a GPU, by data type and attention back-end: no further from float32 than padded ones."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.support.packing import compare, forward, ragged, tiny_model
from tests.support.tiny import pairs
from trl_ext import PreferenceConfig, PreferenceTrainer
from trl_ext.models.packing import share_prefixes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HAS_FLASH_ATTENTION = importlib.util.find_spec("flash_attn") is not None


def on_gpu(batch: dict) -> dict:
    return {name: tensor.cuda() for name, tensor in batch.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_float32_is_that_of_padded_passes(architecture):
    packing, apart, gradient_apart = compare(tiny_model(architecture).cuda(), on_gpu(ragged()))
    assert packing.active and packing.packed_tokens < packing.padded_tokens
    assert apart < 1e-4 and gradient_apart < 1e-4


@pytest.mark.parametrize(
    "backend",
    [
        "sdpa",
        pytest.param(
            "flash_attention_2", marks=pytest.mark.skipif(not HAS_FLASH_ATTENTION, reason="needs flash-attn")
        ),
    ],
)
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
        args = PreferenceConfig(
            output_dir=str(tmp_path / packing),
            packing=packing,
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=0,
        )
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
