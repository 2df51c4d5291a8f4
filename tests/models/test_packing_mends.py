"""Packing where a canary alone would not see a difference: idle adapters, labels, and the cache's key."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForSequenceClassification

from tests.support import train_once
from trl_ext.models import share_prefixes
from trl_ext.models.packing.obstacles import has_active_dropout
from trl_ext.trainers.preference.reference import cache_key


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


def test_the_key_of_the_reference_holds_its_configuration(tiny_model_path, tmp_path):
    """The same weights with other rotary angles, packed and padded, or in mixed precision are other references."""

    def trainer(name: str, **spec):
        args = {"precompute_ref_log_probs": True, **spec.get("args", {})}
        return train_once.build({"model": tiny_model_path, "args": args}, str(tmp_path / name))

    plain = trainer("plain")
    key = cache_key(plain)
    assert cache_key(trainer("again")) == key
    assert cache_key(trainer("padded", args={"packing": "off"})) != key
    assert cache_key(trainer("mixed", args={"bf16": True})) != key
    plain.model.config.rope_parameters = {**plain.model.config.rope_parameters, "rope_theta": 100.0}
    assert cache_key(plain) != key
