"""`PolicyTrainer`: advantages, loss and gradient of each update against plain arithmetic in float64."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest
import torch

from tests.support.naive_policy import (
    KL_ESTIMATES,
    Steps,
    clip,
    log_probs,
    mean_of_means,
    mean_of_sums,
    mean_over_tokens,
    model_in_float64,
    over_eight,
    rows_of,
)
from tests.support.rollout_once import build, prompts, thirds
from tests.support.train_once import relative_difference
from tests.support.trl_private import rollout_batches, tokenized_prompts
from trl_ext.trainers.policy import trainer as policy_module

pytestmark = pytest.mark.usefixtures("in_float64")


# ---- Equality with plain arithmetic in float64 ----


def by_group(rows, values: list[float], function) -> list[float]:
    """`function` of each group's values, a group being the responses to one prompt, back in the rows' order."""
    members = defaultdict(list)
    for index, (prompt, _) in enumerate(rows):
        members[tuple(prompt)].append(index)
    advantages = [0.0] * len(rows)
    for indices in members.values():
        for index, value in zip(indices, function([values[i] for i in indices]), strict=True):
            advantages[index] = value
    return advantages


def normalized(r: list[float]) -> list[float]:
    return [(x - statistics.fmean(r)) / (statistics.pstdev(r) + 1e-6) for x in r]


def centered(r: list[float]) -> list[float]:
    return [x - statistics.fmean(r) for x in r]


def against_the_others(r: list[float]) -> list[float]:
    return [x - (sum(r) - x) / (len(r) - 1) for x in r]


def twice_the_rank(r: list[float]) -> list[float]:
    return [2 * (sum(y < x for y in r) - sum(y > x for y in r)) / (len(r) - 1) for x in r]


CLIP = {"epsilon": 0.05}
# name -> (settings, advantages of a group, surrogate, reduction, KL kind, KL in, beta)
INDEPENDENT = {
    **{
        f"grpo {kind}": (
            {**CLIP, "beta": 0.2, "kl_estimator": kind},
            normalized, "clip", mean_of_means, kind, "loss", 0.2,
        )
        for kind in KL_ESTIMATES
    },
    "kl by itself": (
        {**CLIP, "beta": 0.2, "kl_aggregation": "token_mean"},
        normalized, "clip", mean_of_means, "k3", "by itself", 0.2,
    ),
    "dr_grpo": ({"algorithm": "dr_grpo", **CLIP}, centered, "clip", over_eight, None, None, 0.0),
    "gspo": (
        {"algorithm": "gspo", "epsilon": 0.01, "epsilon_high": 0.02},
        normalized, "gspo", mean_of_means, None, None, 0.0,
    ),
    "rloo": ({"algorithm": "rloo"}, against_the_others, "reinforce", mean_of_sums, "k1", "reward", 0.03),
    "remax": ({"algorithm": "remax"}, None, "reinforce", mean_of_sums, "k1", "reward", 0.05),
    "reinforce": ({"algorithm": "reinforce"}, lambda r: r, "reinforce", mean_of_means, None, None, 0.0),
    "dapo": (
        {"algorithm": "dapo", "epsilon": 0.02, "epsilon_high": 0.05},
        normalized, "dapo", mean_over_tokens, None, None, 0.0,
    ),
    "gopo": ({"algorithm": "gopo", **CLIP}, twice_the_rank, "clip", mean_over_tokens, None, None, 0.0),
}  # fmt: skip


def greedy_reward(policy_path: str, weights: dict, prompt: list[int], limit: int) -> float:
    """Of the greedy response to one prompt, by itself, in float32."""
    model = model_in_float64(policy_path, weights)
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=limit, top_k=None, top_p=None)
    return thirds([output[0, len(prompt) :].tolist()])[0]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_equals_plain_arithmetic(name, policy_path, tmp_path):
    """Advantages, loss and gradient of both updates on a rollout; the second is off-policy, with clipped tokens."""
    settings, group_function, surrogate, reduce, kind, kl_in, beta = INDEPENDENT[name]
    steps = Steps()
    args = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.2, "num_generations": 4, **settings}
    trainer = build({"model": policy_path, "perturb": 1, "args": args}, str(tmp_path), callbacks=[steps])
    trainer.train()
    batch = rollout_batches(trainer)[0]
    rows = rows_of(batch)
    assert len({tuple(prompt) for prompt, _ in rows}) == 2 and len({len(response) for _, response in rows}) > 2
    sampler, reference = model_in_float64(policy_path, steps.weights[0]), model_in_float64(policy_path)
    with torch.no_grad():
        old = [log_probs(sampler, *row) for row in rows]
        of_reference = [log_probs(reference, *row) for row in rows]
    rewards = thirds([response for _, response in rows])
    if kl_in == "reward":
        rewards = [r - beta * (o - f).sum().item() for r, o, f in zip(rewards, old, of_reference, strict=True)]
    if group_function is None:
        baseline = {tuple(p): greedy_reward(policy_path, steps.weights[0], p, 8) for p, _ in rows}
        advantages = [reward - baseline[tuple(prompt)] for reward, (prompt, _) in zip(rewards, rows, strict=True)]
    else:
        advantages = by_group(rows, rewards, group_function)
    assert batch["advantages"].tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-7)

    for step in range(2):
        model = model_in_float64(policy_path, steps.weights[step])
        new = [log_probs(model, *row) for row in rows]
        losses = []
        for log_prob, before, advantage in zip(new, old, advantages, strict=True):
            ratio = torch.exp(log_prob - before)
            losses.append(
                {
                    "clip": lambda r=ratio, a=advantage: clip(r, a),
                    "dapo": lambda r=ratio, a=advantage: clip(r, a, 0.02, 0.05),
                    "gspo": lambda d=log_prob - before, a=advantage: clip(d.mean().exp(), a, 0.01, 0.02)[None],
                    "reinforce": lambda p=log_prob, a=advantage: -a * p,
                }[surrogate]()
            )
        divergences = [KL_ESTIMATES[kind](p - f) for p, f in zip(new, of_reference, strict=True)] if kind else []
        if kl_in == "loss":
            losses = [loss + beta * divergence for loss, divergence in zip(losses, divergences, strict=True)]
        total = reduce(losses)
        if kl_in == "by itself":
            total = total + beta * mean_over_tokens(divergences)
        total.backward()
        gradient = torch.cat([p.grad.flatten() for _, p in model.named_parameters()])
        assert relative_difference(steps.gradients[step], gradient) < 1e-6
        assert trainer.state.log_history[step]["loss"] == pytest.approx(total.item(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("num_generations", [1, 4])
def test_the_greedy_baseline_is_that_of_plain_greedy_generation(num_generations, policy_path, tmp_path, monkeypatch):
    """Exactly, for each prompt; what the greedy pass changes for the while is put back."""
    found = []

    def recording(trainer, *arguments):
        before = trainer.generation_config.to_dict(), dict(trainer.generation_kwargs)
        rewards, bad = real(trainer, *arguments)
        assert (trainer.generation_config.to_dict(), dict(trainer.generation_kwargs)) == before
        assert bad == [False] * len(rewards)
        found.append((rewards.tolist(), trainer._rollout[2]))
        return rewards, bad

    real = policy_module.greedy_rewards
    monkeypatch.setattr(policy_module, "greedy_rewards", recording)
    steps = Steps()
    args = {"max_steps": 2, "learning_rate": 0.2, "num_generations": num_generations, "temperature": 0.7, "top_k": 5}
    spec = {"model": policy_path, "trainer": "ReMaxTrainer", "perturb": 1, "args": args}
    trainer = build(spec, str(tmp_path), callbacks=[steps])
    trainer.train()
    count = 8 // num_generations
    ids = tokenized_prompts(trainer, [row["prompt"] for row in prompts(8)])
    for step in range(2):
        seen = [(step * count + index) % 8 for index in range(count)]
        expected = [greedy_reward(policy_path, steps.weights[step], ids[index], 8) for index in seen]
        assert found[step][0] == pytest.approx(expected, rel=1e-6)
        entry = trainer.state.log_history[step]
        assert entry["greedy/reward"] == pytest.approx(statistics.fmean(expected), rel=1e-6)
        assert entry["greedy/mean_length"] == statistics.fmean(found[step][1])
