"""Trainers of TRL, as TRL ships them, train the same model and log the same metrics with `share_prefixes`."""

from __future__ import annotations

import math

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.tiny import pairs, perturbed
from tests.support.train_once import DEFAULTS, largest_difference, parameters
from trl_ext import share_prefixes
from trl_ext.models.packing import packing_of

STEPS = 4
# Figures of time and of the machine, which no two runs share.
TIMES = ("runtime", "per_second", "step_time", "epoch")


def adapter(task_type: str) -> LoraConfig:
    # B is zero otherwise, and the first gradients of A with it.
    return LoraConfig(task_type=task_type, r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def arguments(config_class, folder, **own):
    return config_class(**{**DEFAULTS, "learning_rate": 0.1, "max_steps": STEPS, "output_dir": str(folder), **own})


def causal(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def dpo(path, folder, *, lora=False, **own):
    return trl.DPOTrainer(
        causal(path),
        None if lora or "precompute_ref_log_probs" in own else perturbed(causal(path)),
        args=arguments(trl.DPOConfig, folder, max_length=None, **own),
        train_dataset=Dataset.from_list(pairs(8)),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=adapter("CAUSAL_LM") if lora else None,
    )


def kto(path, folder, **own):
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs(4)
        for side in ("chosen", "rejected")
    ]
    return trl.KTOTrainer(
        causal(path),
        perturbed(causal(path)),
        args=arguments(trl.KTOConfig, folder, per_device_train_batch_size=4, max_length=None, **own),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
    )


def vowels(completions, **columns) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sum(text.count(vowel) for vowel in "aeiou") / 4 for text in texts]


def online(trainer_class, config_class, path, folder, **own):
    prompts = [{"prompt": row["prompt"]} for row in pairs(8)]
    own = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "num_iterations": 2,
        "beta": 0.1,
        **own,
    }
    return trainer_class(
        path,
        vowels,
        args=arguments(config_class, folder, model_init_kwargs={"dtype": "float32"}, **own),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(path),
    )


def reward(path, folder, *, lora=False):
    torch.manual_seed(0)  # The head of the scores is new.
    return trl.RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32),
        args=arguments(trl.RewardConfig, folder, max_length=None),
        train_dataset=Dataset.from_list(pairs(8)),
        processing_class=AutoTokenizer.from_pretrained(path),
        peft_config=adapter("SEQ_CLS") if lora else None,
    )


TRAINERS = {
    "DPO": dpo,
    "DPO with gradient accumulation and checkpointing": lambda *to: dpo(
        *to, gradient_accumulation_steps=2, gradient_checkpointing=True
    ),
    "DPO with an adapter": lambda *to: dpo(*to, lora=True),
    "DPO with reference log-probabilities beforehand": lambda *to: dpo(*to, precompute_ref_log_probs=True),
    "KTO": kto,
    "GRPO": lambda *to: online(trl.GRPOTrainer, trl.GRPOConfig, *to),
    "RLOO": lambda *to: online(trl.RLOOTrainer, trl.RLOOConfig, *to),
    "Reward": reward,
    "Reward with an adapter": lambda *to: reward(*to, lora=True),
}


def run(name: str, path: str, folder, *, packed: bool):
    """A trainer that has trained, the parameters it ended with, and what it logged."""
    trainer = TRAINERS[name](path, folder)
    if packed:
        share_prefixes(trainer.model, getattr(trainer, "ref_model", None))
    torch.manual_seed(1)
    trainer.train()
    logs = [
        {key: value for key, value in entry.items() if not any(part in key for part in TIMES)}
        for entry in trainer.state.log_history
    ]
    return trainer, parameters(trainer), logs


@pytest.mark.parametrize("name", TRAINERS)
def test_same_parameters_and_metrics(name, tiny_model_path, tmp_path):
    """Four steps of gradient descent at a rate of 0.1 end within 1e-6 of each other, and every step is packed.

    A policy's loss is the same whatever the log-probabilities are where it is taken at ratio 1; its gradient norm,
    which is compared with all else, is not.
    """
    _, expected, expected_logs = run(name, tiny_model_path, tmp_path / "padded", packed=False)
    trainer, got, logs = run(name, tiny_model_path, tmp_path / "packed", packed=True)

    packing = packing_of(trainer.model)
    assert packing.active and not packing.left_padded, packing.left_padded
    assert 0 < packing.packed_tokens < packing.padded_tokens
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        assert packing_of(reference).active and packing_of(reference).packed_tokens > 0
        assert not packing_of(reference).left_padded

    assert largest_difference(got, expected) < 1e-6
    initial = dict(TRAINERS[name](tiny_model_path, tmp_path / "unused").model.named_parameters())
    assert max((initial[key] - value).abs().max().item() for key, value in expected.items()) > 1e-3

    steps = [entry for entry in logs if "loss" in entry]
    assert len(steps) == STEPS and all(entry["grad_norm"] > 1e-3 for entry in steps)
    assert [entry.keys() for entry in logs] == [entry.keys() for entry in expected_logs]
    for entry, expected_entry in zip(logs, expected_logs, strict=True):
        for key, value in expected_entry.items():
            assert entry[key] == pytest.approx(value, rel=2e-5, abs=2e-5), key


def test_reference_of_a_trainer_in_mixed_precision(bfloat16_on_the_cpu, tiny_model_path, tmp_path):
    """TRL wraps the reference model for bfloat16 before the trainer is there to call `share_prefixes` on."""
    trainer = dpo(tiny_model_path, tmp_path, bf16=True)
    share_prefixes(trainer.model, trainer.ref_model)
    trainer.train()
    for model in (trainer.model, trainer.ref_model):
        assert packing_of(model).active and packing_of(model).packed_tokens > 0
    # The policy begins as its reference, with which any other gives another loss than log 2, and then leaves it.
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=5e-3)
    assert min(losses) < 0.6


def test_saved_checkpoint_loads_without_the_library(tiny_model_path, tmp_path):
    """A checkpoint of a packed run holds the same files and configuration as one of a padded run."""
    folders = []
    for packed in (False, True):
        trainer = dpo(tiny_model_path, tmp_path / str(packed))
        if packed:
            share_prefixes(trainer.model, trainer.ref_model)
        trainer.train()
        trainer.save_model(tmp_path / str(packed) / "model")
        folders.append(tmp_path / str(packed) / "model")
    padded, packed = ({path.name: path for path in folder.iterdir()} for folder in folders)
    assert padded.keys() == packed.keys()
    assert padded["config.json"].read_text() == packed["config.json"].read_text()
    assert (
        largest_difference(
            dict(causal(str(folders[1])).named_parameters()), dict(causal(str(folders[0])).named_parameters())
        )
        < 1e-6
    )
