"""Policies with learnt absolute positions, whose prompts TRL pads on the left."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.rollout_once import DEFAULTS, build
from tests.tiny import build_tokenizer

pytestmark = pytest.mark.usefixtures("in_float64")


def test_log_probabilities_are_those_of_the_rows_by_themselves(tmp_path):
    """GPT-2 with prompts of several lengths: policy's and reference's log-probabilities, against float64 unpadded."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    path = str(tmp_path / "gpt2")
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    # Two passes over the rollout, for which TRL keeps the log-probabilities of the policy that sampled it.
    args = {**DEFAULTS, "algorithm": "grpo", "beta": 0.05, "num_iterations": 2, "max_prompt_tokens": 128}
    trainer = build({"model": path, "trainer": "PolicyTrainer", "args": args}, str(tmp_path / "run"))
    trainer.train()
    batch = trainer._buffered_inputs[0]
    assert batch["prompt_mask"].sum(1).unique().numel() > 1
    model = GPT2LMHeadModel.from_pretrained(path).double().eval()
    for row in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        response = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        for key in ("old_per_token_logps", "ref_per_token_logps"):
            torch.testing.assert_close(batch[key][row, : len(response)].double(), alone, atol=1e-9, rtol=0)
