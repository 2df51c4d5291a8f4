"""Special tokens that the model has no embedding for, and a router whose loss keeps passes from being packed."""

from __future__ import annotations

import logging

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.packing import tiny_model
from tests.support.tiny import pairs
from tests.support.train_once import build
from trl_ext.models.loading import load_policy
from trl_ext.rewards import RewardModel

TRAINERS = ["PreferenceTrainer", "SFTTrainer", "RewardTrainer", "KTOTrainer", "PolicyTrainer"]
MESSAGE = r"^the tokenizer's token .* is number \d+, and the model has embeddings for \d+ tokens: use .* first$"


def spec_of(trainer: str, model) -> dict:
    rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(pairs(6))]
    return {"trainer": trainer, "model": model, "dtype": None} | ({"rows": rows} if trainer == "KTOTrainer" else {})


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_tokenizer_larger_than_the_model_is_refused_before_training(trainer, policy_path, tmp_path):
    kind = AutoModelForSequenceClassification if trainer == "RewardTrainer" else AutoModelForCausalLM
    options = {"num_labels": 1} if trainer == "RewardTrainer" else {}
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    # Before its reference log-probabilities, too.
    precomputed = [{"args": {"precompute_ref_log_probs": True}}] if trainer == "PreferenceTrainer" else []
    for own in [{}, *precomputed]:
        small = kind.from_pretrained(policy_path, **options)
        small.resize_token_embeddings(tokenizer.eos_token_id)
        spec = spec_of(trainer, small) | own
        with pytest.raises(ValueError, match=MESSAGE):
            build(spec, str(tmp_path / "run"), processing_class=tokenizer)
    # Nor is such a policy or reward model loaded.
    small.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    load = RewardModel(str(tmp_path / "small")).load if trainer == "RewardTrainer" else load_policy
    with pytest.raises(ValueError, match=MESSAGE):
        load(*([] if trainer == "RewardTrainer" else [str(tmp_path / "small")]))
    # A token that no text contains, as Gemma 3's of images, is none of the model's business.
    tokenizer.add_tokens(["<image>"])
    model = kind.from_pretrained(policy_path, **options)
    build(spec_of(trainer, model), str(tmp_path / "unused"), processing_class=tokenizer)
    # Nor is room in the model for more.
    model.resize_token_embeddings(len(tokenizer) + 64)
    build(spec_of(trainer, model), str(tmp_path / "room"), processing_class=tokenizer)


def test_a_router_loss_is_said_to_keep_rows_padded(policy_path, tmp_path, caplog):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    model = tiny_model("qwen2_moe", output_router_logits=True, vocab_size=len(tokenizer))
    spec = {"trainer": "PreferenceTrainer", "model": model, "dtype": None, "args": {"loss": "simpo"}}
    with caplog.at_level(logging.WARNING):
        trainer = build(spec, str(tmp_path), processing_class=tokenizer)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("packing:")]
    assert lines == ["packing: off, rows are padded: the loss of its router counts padding (output_router_logits)"]
    assert trainer.packing is None
