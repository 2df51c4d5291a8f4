"""Packing where a canary alone would not see a difference: idle adapters, labels, and the cache's key."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForSequenceClassification

from tests.support import train_once
from trl_ext.models import share_prefixes
from trl_ext.models.packing import canary
from trl_ext.models.packing.obstacles import has_active_dropout
from trl_ext.trainers.preference.reference_cache import reference_key


def test_only_adapters_in_use_draw_dropout(tiny_model_path):
    from peft import LoraConfig, get_peft_model

    def lora(dropout: float) -> LoraConfig:
        return LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj"], task_type="CAUSAL_LM")

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_path), lora(0.0))
    model.add_adapter("other", lora(0.5))
    model.train()
    assert not has_active_dropout(model)
    model.set_adapter("other")
    assert has_active_dropout(model)
    with model.disable_adapter():
        assert not has_active_dropout(model)


def test_a_classifier_that_is_given_labels_gives_its_loss():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = Qwen2Config(vocab_size=50, num_key_value_heads=1, pad_token_id=0, num_labels=1, **sizes)
    model = Qwen2ForSequenceClassification(settings)
    batch = {"input_ids": torch.tensor([[5, 6, 7], [5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    expected = model(**batch, labels=torch.tensor([1.0, 0.0])).loss
    share_prefixes(model)
    assert model(**batch, labels=torch.tensor([1.0, 0.0])).loss.equal(expected)


def test_gradients_that_are_off_are_noticed(monkeypatch):
    """A back-end whose values are right and whose gradient of the values is doubled."""
    settings = Qwen2Config(vocab_size=50, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    inner = canary.attend

    def doubled(plan, module, query, key, value, **options):
        if plan.derived["backend"] == "flex":
            value = 2 * value - value.detach()
        plan.derived["backend"] = "sdpa"
        return inner(plan, module, query, key, value, **options)

    monkeypatch.setattr(canary, "attend", doubled)
    canary.check_gradients("sdpa", settings, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"gradients 1\.0e\+00 off"):
        canary.check_gradients("flex", settings, "cpu", torch.float32)


def test_the_key_of_the_reference_holds_its_configuration(tiny_model_path, tmp_path):
    """The same weights with other rotary angles, or packed and padded, are other references; a new adapter is not."""

    def trainer(name: str, **spec):
        return train_once.build({"model": tiny_model_path, "lora": True, **spec}, str(tmp_path / name))

    plain = trainer("plain")
    key = reference_key(plain)
    other_adapter = trainer("adapter")
    for parameter in other_adapter.model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(1.0)
    assert reference_key(other_adapter) == key
    assert reference_key(trainer("padded", args={"packing": "off"})) != key
    plain.model.config.rope_parameters = {**plain.model.config.rope_parameters, "rope_theta": 100.0}
    assert reference_key(plain) != key
