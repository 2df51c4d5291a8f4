"""`SFTTrainer`: the tokens and the loss of its rows, packed passes, long rows, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext import SFTConfig, SFTTrainer
from trl_ext.models import packing_of
from trl_ext.toy import MODEL_DIR

ROWS = [
    {"prompt": "one and ", "completion": "two"},
    {"prompt": "a longer prompt, then ", "completion": "four words of completion"},
    {"prompt": "ca", "completion": "t"},
    {"prompt": "one and ", "completion": "three or four"},
]


def messages(rows: list[dict]) -> list[dict]:
    roles = {"prompt": "user", "completion": "assistant"}
    return [{name: [{"role": roles[name], "content": text}] for name, text in row.items()} for row in rows]


def trainer_of(model: str, folder: Path, rows: list[dict], **args) -> SFTTrainer:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1, "logging_steps": 1}
    options |= {"learning_rate": 1.0, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    args = SFTConfig(output_dir=str(folder), **{**options, **args})
    return SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows))


@pytest.mark.parametrize("conversational", [False, True])
def test_rows_are_the_tokens_of_prompt_and_completion(conversational, tmp_path):
    """Tokenized apart: `ca` and `t` are not `cat`, which the model never generates from `ca`."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    rows = messages(ROWS) if conversational else ROWS
    trainer = trainer_of(str(MODEL_DIR), tmp_path, rows)
    for row, text, encoded in zip(rows, ROWS, trainer.train_dataset, strict=True):
        if conversational:
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            prompt = prompt["input_ids"]
        else:
            prompt = tokenizer(text["prompt"])["input_ids"]
        completion = tokenizer(text["completion"])["input_ids"]
        assert encoded["input_ids"][: len(prompt) + len(completion) + 1] == [
            *prompt,
            *completion,
            tokenizer.eos_token_id,
        ]
        labels = encoded["labels"]
        assert labels[: len(prompt)] == [-100] * len(prompt)
        assert labels[len(prompt) :] == encoded["input_ids"][len(prompt) :]
    ids = [tokenizer(text)["input_ids"] for text in ("ca", "t", "cat")]
    assert ids[0] + ids[1] != ids[2], "or else the row proves nothing"


def test_the_loss_is_the_mean_over_completion_tokens(tiny_model_path, tmp_path):
    """Of the whole optimizer batch, with two micro-batches: their tokens count alike, whichever they are in."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    losses = []
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
        losses += [-log_probs[place, token].item() for place, token in zip(places, completion, strict=True)]
    trainer = trainer_of(tiny_model_path, tmp_path, ROWS)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_packed_passes_train_alike(tiny_model_path, tmp_path):
    trained = {}
    for share in (True, False):
        trainer = trainer_of(tiny_model_path, tmp_path, ROWS, share_prefixes=share)
        assert (packing_of(trainer.model) is not None) is share
        trainer.train()
        trained[share] = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        if share:
            assert trainer.packing.active and trainer.packing.packed_tokens < trainer.packing.padded_tokens
    initial = load_file(Path(tiny_model_path) / "model.safetensors")
    for name, value in trained[True].items():
        assert (value - trained[False][name]).abs().max() < 1e-5
    assert any((trained[True][name] - initial[name]).abs().max() > 1e-3 for name in initial), "it trains"


def test_long_rows_are_counted(tiny_model_path, tmp_path, caplog):
    """One token for each byte, and one to end: rows of 12, 47, 4 and 22 tokens; the prompt of the second has 22."""
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of(tiny_model_path, tmp_path, ROWS, max_length=20)
    expected = "2 of 4 rows are longer than 20 max_length and lose their end; 1 of them have no completion left"
    assert expected in caplog.text
    assert len(trainer.train_dataset) == 3
    with pytest.raises(ValueError, match="no row of the train dataset has a completion within 2 max_length"):
        trainer_of(tiny_model_path, tmp_path, ROWS, max_length=2)


def test_refusals(tiny_model_path, tmp_path):
    bad = [{**ROWS[0], "row_id": "x"}, {"row_id": "y", "prompt": "a", "completion": None}]
    with pytest.raises(ValueError, match=r"train_dataset, row 1 \(row_id y\): completion must be text or messages"):
        trainer_of(tiny_model_path, tmp_path, bad)
    with pytest.raises(ValueError, match="'tools' of the train dataset would not be used"):
        trainer_of(tiny_model_path, tmp_path, [{**ROWS[0], "tools": "[]"}])
