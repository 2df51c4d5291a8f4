"""What `RewardTrainer` saves, loaded again with the same scores, and which checkpoint is the best one."""

from __future__ import annotations

import json
import math

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.support.reward_once import THREE_STEPS, build, lora, scores_one_by_one, train
from tests.support.tiny import pairs
from tests.support.train_once import largest_difference, parameters, result
from trl_ext.rewards import RewardModel

# ---- Adapters ----


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM", "SEQ_CLS"])
def test_an_adapter_is_trained_and_saved_with_its_head(task_type, tiny_model_path, tmp_path):
    config = lora(task_type=task_type)
    trainer = build(tiny_model_path, tmp_path, peft_config=config, **THREE_STEPS)
    (name,) = [name for name in parameters(trainer) if "score" in name]
    before = parameters(trainer)[name]
    trainer.train()
    assert (parameters(trainer)[name] - before).abs().max() > 1e-3
    trainer.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert (saved["base_model.model.score.weight"] == parameters(trainer)[name]).all()
    assert (config.task_type, config.modules_to_save) == (task_type, None), "the user's configuration was changed"


def test_an_adapter_that_would_lose_its_head_is_refused(tiny_model_path, tmp_path):
    load = lambda: AutoModelForSequenceClassification.from_pretrained(tiny_model_path, num_labels=1)  # noqa: E731
    with pytest.raises(ValueError, match="leave the score head untrained and unsaved.*SEQ_CLS"):
        build(get_peft_model(load(), lora()), tmp_path)
    trainer = build(get_peft_model(load(), lora(task_type="SEQ_CLS")), tmp_path)
    assert any("score" in name for name in parameters(trainer))


# ---- Limits and padding travel with the model ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_limits_of_training_are_saved_and_read_again(adapter, tiny_model_path, tmp_path):
    """With every checkpoint as well; pairs that training cut are cut alike when the model is a reward function."""
    limits = {"max_prompt_tokens": 11, "max_response_tokens": None}
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = train(tiny_model_path, tmp_path, peft_config=lora() if adapter else None, **limits, **saving)
    trainer.save_model()
    rows = pairs(8)
    prompts, chosen = [row["prompt"] for row in rows], [row["chosen"] for row in rows]
    expected = trainer.score(list(trainer.train_dataset["chosen_ids"]))
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert json.loads((folder / "reward_model.json").read_text()) == limits
        assert RewardModel(folder).limits == limits
        torch.testing.assert_close(RewardModel(folder).score(prompts, chosen), expected, atol=2e-6, rtol=1e-5)


# ---- A bfloat16 base ----


def test_a_head_on_a_bfloat16_base_is_trained_in_float32(bfloat16_on_the_cpu, tiny_model_path, tmp_path):
    """An update of 1e-6 of a weight near 0.02 is less than a 256th of it, and would be lost in bfloat16.

    The saved head has all its bits.
    """
    arguments = {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-6, "max_steps": 2}
    trainer = build(tiny_model_path, tmp_path, peft_config=lora(), optim="adamw_torch", **arguments)
    types = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    assert {types[n] for n, p in trainer.model.named_parameters() if p.requires_grad} == {torch.float32}
    assert {types[n] for n, p in trainer.model.named_parameters() if not p.requires_grad} == {torch.bfloat16}
    (head,) = [name for name in types if "score.modules_to_save" in name]
    assert types[head] == torch.float32
    before = parameters(trainer)[head]
    # Before any step, when the model is not wrapped for mixed precision yet.
    chosen, rejected = trainer.score_pairs(trainer.train_dataset)
    assert torch.cat([chosen, rejected]).isfinite().all()
    trainer.train()
    assert {entry["grad_norm"] > 0 for entry in result(trainer).logs} == {True}
    moved = (parameters(trainer)[head] - before).abs()
    # Adam's first steps are of the learning rate's size, whatever the gradient's.
    assert 5e-7 < moved.median() < 3e-6
    assert types[head] == dict(trainer.model.named_parameters())[head].dtype
    trainer.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert saved.dtype == torch.float32 and torch.equal(saved, parameters(trainer)[head])
    assert not torch.equal(saved, saved.bfloat16().float())


# ---- The best checkpoint ----


FIGURES = {
    "accuracy": (lambda margins: sum(m > 0 for m in margins) / 6, 1),
    "margin": (lambda margins: sum(margins) / 6, 1),
    "loss": (lambda margins: sum(math.log1p(math.exp(-m)) for m in margins) / 6, -1),
}


@pytest.mark.parametrize("metric", FIGURES)
def test_the_best_checkpoint_by_scores_taken_singly(metric, tiny_model_path, tmp_path):
    """Four steps with a checkpoint after each, whose figures on six other pairs follow from its files alone."""
    rows = pairs(6, seed=8)
    arguments = {"max_steps": 4, "learning_rate": 0.3, "per_device_train_batch_size": 4}
    arguments |= {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    arguments |= {"load_best_model_at_end": True, "metric_for_best_model": metric}
    trainer = build(tiny_model_path, tmp_path, eval_rows=rows, **arguments)
    trainer.train()
    figure, sign = FIGURES[metric]
    expected = []
    for step in (1, 2, 3, 4):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{step}")
        scores = scores_one_by_one(model, trainer.processing_class, rows)
        expected.append(figure([chosen - rejected for chosen, rejected in scores]))
    assert len(set(expected)) > 1, "checkpoints that are all alike show nothing"
    logged = [entry[f"eval_{metric}"] for entry in trainer.state.log_history if f"eval_{metric}" in entry]
    assert logged == pytest.approx(expected, rel=1e-4)
    best = 1 + expected.index(max(expected, key=lambda value: sign * value))
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    kept = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    assert largest_difference(parameters(trainer), kept) == 0.0
