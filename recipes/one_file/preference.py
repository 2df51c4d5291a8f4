"""Preference optimization from top to bottom in one file: plain torch and transformers, with this library's losses.

    python recipes/one_file/preference.py

It trains the embedded model on the embedded pairs with AOT. `AOTTrainer` makes the same updates; `docs/one_step.md`
shows where each of these lines is in the trainer. To try another method, call another loss of `trl_ext.losses` below:
`dpo`, `ipo`, `simpo` or your own function of `PreferenceScores`.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from trl_ext import load_benchmark
from trl_ext.losses import PreferenceScores, aot
from trl_ext.models import resolve_model_path, response_log_probs

MODEL = "toy"
BATCH_SIZE = 32
LEARNING_RATE = 3e-4
WARMUP_UPDATES = 5
BETA = 0.1
MAX_GRAD_NORM = 1.0


def tokenize(tokenizer, row: dict) -> dict[str, list[int]]:
    """Token ids of a row's prompt and of its two responses, through the chat template."""

    def encode(messages: list[dict], **settings) -> list[int]:
        return tokenizer.apply_chat_template(messages, return_dict=True, **settings)["input_ids"]

    prompt = encode(row["prompt"], add_generation_prompt=True)
    # The template of prompt and response together begins with the template of the prompt.
    responses = {side: encode(row["prompt"] + row[side])[len(prompt) :] for side in ("chosen", "rejected")}
    return {"prompt": prompt, **responses}


def sequence_log_probs(model, rows: list[dict], side: str, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Sum of each response's token log-probabilities in nats, and its length in tokens. Each [B]."""
    ids = [torch.tensor(row["prompt"] + row[side]) for row in rows]
    mask = [torch.tensor([0] * len(row["prompt"]) + [1] * len(row[side])) for row in rows]
    ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id)
    mask = pad_sequence(mask, batch_first=True)[:, 1:]
    log_probs = response_log_probs(model, ids[:, :-1], labels=ids[:, 1:])["log_probs"]
    return (log_probs * mask).sum(dim=1), mask.sum(dim=1)


def scores_of(policy, reference, rows: list[dict], pad_token_id: int) -> PreferenceScores:
    """The inputs of a preference loss: scores of both responses under the policy, with gradient, and the reference."""
    chosen, chosen_length = sequence_log_probs(policy, rows, "chosen", pad_token_id)
    rejected, rejected_length = sequence_log_probs(policy, rows, "rejected", pad_token_id)
    with torch.no_grad():
        ref_chosen, _ = sequence_log_probs(reference, rows, "chosen", pad_token_id)
        ref_rejected, _ = sequence_log_probs(reference, rows, "rejected", pad_token_id)
    return PreferenceScores(chosen, rejected, ref_chosen, ref_rejected, chosen_length, rejected_length)


def train_on(policy, reference, optimizer, scheduler, rows: list[dict], pad_token_id: int) -> PreferenceScores:
    """Make one update on a batch of tokenized pairs; returns its scores."""
    scores = scores_of(policy, reference, rows, pad_token_id)
    # AOT sorts the log-ratios of the whole batch, so the batch is scored in one piece.
    loss = aot(scores, beta=BETA).mean()
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    scheduler.step()
    return scores


def main() -> None:
    path = resolve_model_path(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy, reference = (AutoModelForCausalLM.from_pretrained(path).eval() for _ in range(2))
    rows = [tokenize(tokenizer, row) for row in load_benchmark("toy", splits="train_prefs")["train_prefs"]]
    random.Random(0).shuffle(rows)
    updates = len(rows) // BATCH_SIZE
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=WARMUP_UPDATES, num_training_steps=updates)

    for update in range(updates):
        batch = rows[update * BATCH_SIZE : (update + 1) * BATCH_SIZE]
        scores = train_on(policy, reference, optimizer, scheduler, batch, tokenizer.pad_token_id)
        margins = BETA * scores.margin.detach()
        accuracy = (margins > 0).float().mean()
        print(f"update {update + 1:2}/{updates}  margin {margins.mean():+.3f}  accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
