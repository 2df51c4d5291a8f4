"""Evolution strategies: a policy learns from rewards without gradients.

    python recipes/own/evolution.py

Each update adds noise to the parameters once for every member of a population, lets each perturbed policy answer the
same prompts greedily, and moves the parameters towards the noise of the members that were rewarded more:

    theta <- theta + learning_rate / N sum_n z_n e_n

`e_n` is the standard normal noise of member n of N, whose parameters are `theta + PERTURBATION e_n`. `z_n` is its mean
reward, less the mean of the population, over the population's standard deviation. The learning rate includes the
factor 1 / `PERTURBATION` of the gradient estimate. Noise is drawn again from its seed, so memory holds one copy of the
parameters beside the policy. The policy is the embedded model and the reward is the true score of its benchmark.

Qiu et al. 2025, "Evolution Strategies at Scale: LLM Fine-Tuning Beyond Reinforcement Learning", arXiv 2509.24372.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext import load_benchmark
from trl_ext.advantages import group_normalized
from trl_ext.models import resolve_model_path
from trl_ext.rollouts import generate_responses
from trl_ext.toy import score

MODEL = "toy"
UPDATES = 30
PROMPTS_PER_UPDATE = 32
MAX_NEW_TOKENS = 48
POPULATION = 30
# Ten times the paper's, which is for models of billions of parameters.
PERTURBATION = 0.01
LEARNING_RATE = 0.01


def noise(policy: nn.Module, seed: int) -> list[Tensor]:
    """Standard normal noise for each parameter, in the order of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) for parameter in policy.parameters()]


@torch.no_grad()
def update(policy: nn.Module, reward: Callable[[], float], seeds: list[int]) -> Tensor:
    """Move a policy by one update, and return the rewards of its population, [N].

    Args:
        policy: the model, in float32: small updates are rounded away in bfloat16.
        reward: the mean reward of the policy's current parameters.
        seeds: a seed for the noise of each member, [N].
    """
    before = [parameter.clone() for parameter in policy.parameters()]
    rewards = []
    for seed in seeds:
        for parameter, start, step in zip(policy.parameters(), before, noise(policy, seed), strict=True):
            parameter.copy_(start + PERTURBATION * step)
        rewards.append(reward())
    rewards = torch.tensor(rewards)
    # The population is one group.
    weights = group_normalized(rewards, len(seeds), eps=1e-8)
    for parameter, start in zip(policy.parameters(), before, strict=True):
        parameter.copy_(start)
    for weight, seed in zip(weights.tolist(), seeds, strict=True):
        for parameter, step in zip(policy.parameters(), noise(policy, seed), strict=True):
            parameter += LEARNING_RATE / len(seeds) * weight * step
    return rewards


def main() -> None:
    path = resolve_model_path(MODEL)
    tokenizer, policy = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    prompts = [row["prompt"] for row in load_benchmark("toy", splits="train_gen")["train_gen"]]
    draw = random.Random(0)

    for number in range(UPDATES):
        batch = draw.sample(prompts, PROMPTS_PER_UPDATE)

        def mean_score(batch: list = batch) -> float:
            responses = generate_responses(policy, tokenizer, batch, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
            pairs = zip(batch, responses, strict=True)
            return sum(score(prompt[-1]["content"], r.text, finished=r.finished) for prompt, r in pairs) / len(batch)

        rewards = update(policy, mean_score, [draw.getrandbits(62) for _ in range(POPULATION)])
        print(f"update {number + 1:2}/{UPDATES}  score {rewards.mean():.3f}  best member {rewards.max():.3f}")


if __name__ == "__main__":
    main()
