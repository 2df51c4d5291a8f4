"""GRPO from top to bottom in one file: plain torch and transformers, with this library's advantages and losses.

    python recipes/one_file/grpo.py

It trains the embedded model on the embedded prompts, with the benchmark's true score as the reward. `GRPOTrainer`
makes the same updates; `docs/one_step.md` shows where each of these lines is in the trainer. To try another algorithm,
change the advantage, the ratio, the surrogate or the aggregation; `python -m trl_ext.algorithms` lists the named ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from trl_ext import load_benchmark
from trl_ext.advantages import group_normalized
from trl_ext.losses import aggregate, clipped_surrogate, kl_estimate, token_log_ratio
from trl_ext.models import resolve_model_path, response_log_probs
from trl_ext.rollouts import generate_responses
from trl_ext.toy import score

MODEL = "toy"
ROLLOUTS = 60
PROMPTS_PER_ROLLOUT = 8
GROUP_SIZE = 8
UPDATES_PER_ROLLOUT = 1
MAX_NEW_TOKENS = 48
LEARNING_RATE = 3e-4
WARMUP_UPDATES = 5
EPSILON = 0.2
BETA = 0.04
MAX_GRAD_NORM = 1.0


@dataclass
class Batch:
    """Prompts and responses as one tensor, padded on the right. Every field is [B, T].

    `labels` is the token after each position, and `mask` is 1 where that token is part of the response.
    """

    input_ids: Tensor
    labels: Tensor
    mask: Tensor


def batch_of(prompts: list[list[int]], responses: list[list[int]], pad_token_id: int) -> Batch:
    """Join B prompts and responses, given as token ids."""
    pairs = list(zip(prompts, responses, strict=True))
    ids = pad_sequence([torch.tensor(p + r) for p, r in pairs], batch_first=True, padding_value=pad_token_id)
    mask = pad_sequence([torch.tensor([0] * len(p) + [1] * len(r)) for p, r in pairs], batch_first=True)
    return Batch(ids[:, :-1], ids[:, 1:], mask[:, 1:])


def log_probs_of(model, batch: Batch) -> Tensor:
    """Log-probability of every label under the model, in nats. [B, T]."""
    return response_log_probs(model, batch.input_ids, batch.labels)["log_probs"]


def grpo_loss(log_probs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clipped surrogate and the KL term of each token, averaged over a response and then over the responses.

    The log-probabilities and `mask` are [B, T] and `advantages` [B]; the result is a scalar.
    """
    losses = clipped_surrogate(token_log_ratio(log_probs, old), advantages, clip_low=EPSILON, clip_high=EPSILON)
    losses = losses + BETA * kl_estimate(log_probs, reference, "k3")
    return aggregate(losses, mask, "sequence_mean")


def train_on(policy, reference, optimizer, scheduler, batch: Batch, rewards: Tensor) -> float:
    """Make the updates of one rollout; `rewards` are [B], with each group's responses next to one another."""
    advantages = group_normalized(rewards, GROUP_SIZE)
    with torch.no_grad():
        old_log_probs = log_probs_of(policy, batch)
        ref_log_probs = log_probs_of(reference, batch)
    for _ in range(UPDATES_PER_ROLLOUT):
        loss = grpo_loss(log_probs_of(policy, batch), old_log_probs, ref_log_probs, advantages, batch.mask)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
    return loss.item()


def main() -> None:
    path = resolve_model_path(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    # Evaluation mode turns off dropout, which would make the ratio differ from 1 before the first update.
    policy, reference = (AutoModelForCausalLM.from_pretrained(path).eval() for _ in range(2))
    prompts = [row["prompt"] for row in load_benchmark("toy", splits="train_gen")["train_gen"]]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=WARMUP_UPDATES)

    order = random.Random(0).sample(prompts, ROLLOUTS * PROMPTS_PER_ROLLOUT)
    for rollout in range(ROLLOUTS):
        chosen = order[rollout * PROMPTS_PER_ROLLOUT : (rollout + 1) * PROMPTS_PER_ROLLOUT]
        groups = [prompt for prompt in chosen for _ in range(GROUP_SIZE)]
        generations = generate_responses(
            policy, tokenizer, groups, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0, batch_size=64, seed=rollout
        )
        rewards = torch.tensor(
            [
                score(prompt[-1]["content"], generation.text, finished=generation.finished)
                for prompt, generation in zip(groups, generations, strict=True)
            ]
        )
        batch = batch_of(
            [generation.prompt_ids for generation in generations],
            [generation.response_ids for generation in generations],
            tokenizer.pad_token_id,
        )
        loss = train_on(policy, reference, optimizer, scheduler, batch, rewards)
        print(f"rollout {rollout + 1:2}/{ROLLOUTS}  reward {rewards.mean():.3f}  loss {loss:+.4f}")


if __name__ == "__main__":
    main()
