"""`PolicyTrainer` against plain float64 arithmetic: advantages, and each factor and term of its loss and gradient."""

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
from tests.support.rollout_once import OWN_RECIPES, build, prompts, thirds, train
from tests.support.train_once import relative_difference
from tests.support.trl_private import (
    BeforeLoss,
    add_router_loss,
    compute_loss,
    rollout_batches,
    score_rollout,
)
from trl_ext import PolicyTrainer
from trl_ext.trainers.policy.reward_functions import soft_overlong

pytestmark = pytest.mark.usefixtures("in_float64", "own_tables")


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


CLIP = {"epsilon": 0.05, "epsilon_high": 0.05}
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
    # Of all tokens: the greedy pass leaves the settings of sampling as they are.
    "remax": ({"algorithm": "remax", "top_k": 5}, None, "reinforce", mean_of_sums, "k1", "reward", 0.05),
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
        assert relative_difference(steps.gradient(step), gradient) < 1e-6
        assert trainer.state.log_history[step]["loss"] == pytest.approx(total.item(), rel=1e-6, abs=1e-7)


# ---- Factors and terms that plain runs do not show ----

DPPO = f"{OWN_RECIPES}/dppo.py:dppo_tv"
# Of eight responses to two prompts: not of any group, so that the loss depends on each by itself.
ADVANTAGES = [1.0, -0.5, 0.25, -1.5, 0.75, 2.0, -1.0, 0.5]


@pytest.fixture
def ready(policy_path, tmp_path):
    """A trainer in the middle of training, of a policy that is off its reference, and a rollout of it."""

    def make(accumulation: int = 1, **args):
        trainer = build({"model": policy_path, "perturb": 1, "fixed": True, "args": args}, str(tmp_path))
        trainer.current_gradient_accumulation_steps = accumulation
        trainer.model.train()
        output = score_rollout(trainer, [dict(row) for row in prompts(2) for _ in range(4)])
        lengths = {len(response) for _, response in rows_of(output)}
        assert len(lengths) > 2, "responses that are all of one length show little"
        return trainer, output

    return make


def off_policy(trainer, output: dict) -> tuple[dict, list[torch.Tensor]]:
    """The rollout with advantages and old log-probabilities of our own, the latter also row by row in float64.

    They lie up to 0.1 off the policy's, so that ratios lie between 0.90 and 1.11, on both sides of a clip at 0.05.
    """
    rows = rows_of(output)
    policy = weights_in_float64(trainer)
    offsets = 0.1 * torch.sin(1.7 * torch.arange(8 * 8)).double().view(8, 8)
    with torch.no_grad():
        old = [log_probs(policy, *row) + offsets[index, : len(row[1])] for index, row in enumerate(rows)]
    padded = torch.zeros(output["completion_ids"].shape)
    for index, values in enumerate(old):
        padded[index, : len(values)] = values
    return {**output, "advantages": torch.tensor(ADVANTAGES), "old_per_token_logps": padded}, old


def weights_in_float64(trainer):
    """The policy as it is now, in float64."""
    return model_in_float64(trainer.model.name_or_path, dict(trainer.model.named_parameters()))


def gradient_of(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([p.grad.flatten() for _, p in model.named_parameters()]).double()


def assert_loss(trainer, inputs: dict, policy, expected: torch.Tensor) -> torch.Tensor:
    """Check the trainer's loss and its gradient against those of the policy in float64; returns the gradient."""
    loss, gradient = compute_loss(trainer, inputs), gradient_of(policy, expected)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-8, abs=1e-9)
    assert relative_difference(gradient_of(trainer.model, loss), gradient) < 1e-9
    return gradient


def kept_by_a_tool(mask: torch.Tensor) -> torch.Tensor:
    """A mask that takes every third token for a tool's, from the second on."""
    return ((torch.arange(mask.shape[1]) % 3 != 1) * torch.ones_like(mask)).long()


# name -> (settings, reduction, whether a KL term of 0.2 k3 is in the loss)
REDUCTIONS = {
    "sequence mean and KL": ({**CLIP, "beta": 0.2, "kl_estimator": "k3"}, mean_of_means, True),
    "token mean": ({"algorithm": "dapo", **CLIP}, mean_over_tokens, False),
    "constant": ({"algorithm": "dr_grpo", **CLIP}, over_eight, False),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_a_tool_returned_is_no_part_of_the_loss(name, ready, policy_path):
    """Means over the policy's own tokens only, in numerator and denominator; the tool's tokens stay in the context."""
    settings, reduce, has_kl = REDUCTIONS[name]
    trainer, output = ready(**settings)
    if name == "constant":
        # The longest response has 7 tokens, and the reduction still divides by max_completion_length, 8.
        tokens = output["completion_ids"].shape
        output |= {n: v[:, :7] for n, v in output.items() if torch.is_tensor(v) and v.shape == tokens}
    inputs, old = off_policy(trainer, output)
    inputs["tool_mask"] = kept_by_a_tool(inputs["completion_mask"])
    policy, reference = weights_in_float64(trainer), model_in_float64(policy_path)
    losses = []
    for index, row in enumerate(rows_of(inputs)):
        own = [position for position in range(len(row[1])) if position % 3 != 1]
        new = log_probs(policy, *row)[own]
        losses.append(clip(torch.exp(new - old[index][own]), ADVANTAGES[index]))
        if has_kl:
            with torch.no_grad():
                of_reference = log_probs(reference, *row)[own]
            losses[-1] = losses[-1] + 0.2 * KL_ESTIMATES["k3"](new - of_reference)
    expected = reduce(losses)
    gradient = assert_loss(trainer, inputs, policy, expected)
    del inputs["tool_mask"]
    assert relative_difference(gradient_of(trainer.model, compute_loss(trainer, inputs)), gradient) > 0.1


def test_what_a_tool_returned_is_counted_nowhere(ready):
    """Neither among the tokens of an update, nor in the divergence that is taken off a reward."""
    trainer, output = ready(algorithm="rloo", beta=0.1)
    output["tool_mask"] = kept_by_a_tool(output["completion_mask"])
    own = [[p for p in range(len(response)) if p % 3 != 1] for _, response in rows_of(output)]
    trainer._count_tokens([output])
    assert trainer.mean_tokens.item() == sum(map(len, own))
    policy, reference = weights_in_float64(trainer), model_in_float64(trainer.model.name_or_path)
    with torch.no_grad():
        expected = [
            0.1 * (log_probs(policy, *row) - log_probs(reference, *row))[positions].sum().item()
            for row, positions in zip(rows_of(output), own, strict=True)
        ]
    assert trainer.kl_penalty(output).tolist() == pytest.approx(expected, rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("per_token", [True, False])
def test_the_importance_ratio_of_another_sampler_weighs_the_surrogate_alone(per_token, ready, policy_path):
    """As vLLM's log-probabilities give it, per token or per response; the KL term goes without it."""
    trainer, output = ready(**CLIP, beta=0.2)
    inputs, old = off_policy(trainer, output)
    rows, width = rows_of(inputs), inputs["completion_ids"].shape[1]
    columns = width if per_token else 1
    ratio = 0.5 + (torch.arange(8 * columns).view(8, columns) % 5) / 4
    inputs["importance_sampling_ratio"] = ratio
    policy, reference = weights_in_float64(trainer), model_in_float64(policy_path)
    losses = []
    for index, row in enumerate(rows):
        new = log_probs(policy, *row)
        with torch.no_grad():
            of_reference = log_probs(reference, *row)
        weights = ratio.expand(8, width)[index, : len(new)].double()
        surrogate = clip(torch.exp(new - old[index]), ADVANTAGES[index])
        losses.append(weights * surrogate + 0.2 * KL_ESTIMATES["k3"](new - of_reference))
    expected = mean_of_means(losses)
    # Without an engine: the loss reads these two and the tensor, and nothing else of vLLM.
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    gradient = assert_loss(trainer, inputs, policy, expected)
    trainer.vllm_importance_sampling_correction = False
    uncorrected = gradient_of(trainer.model, compute_loss(trainer, inputs))
    assert relative_difference(uncorrected, gradient) > 0.1


@pytest.mark.parametrize("use_vllm", [False, True])
def test_dppo_takes_its_ratio_to_what_the_sampler_recorded(use_vllm, ready):
    """The sampler lies up to 0.3 off the old policy, and vLLM's ratio, here 100, is not applied a second time."""
    trainer, output = ready(algorithm=DPPO, algorithm_kwargs={"delta_low": 2e-4, "delta_high": 2e-4})
    inputs, old = off_policy(trainer, output)
    rows, policy = rows_of(inputs), weights_in_float64(trainer)
    offsets = 0.3 * torch.cos(2.3 * torch.arange(8 * 8)).double().view(8, 8)
    inputs["sampling_per_token_logps"] = (
        inputs["old_per_token_logps"] - offsets[:, : output["completion_ids"].shape[1]]
    )
    inputs["importance_sampling_ratio"] = torch.full_like(inputs["old_per_token_logps"], 100.0)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = use_vllm
    losses, kept = [], []
    for index, row in enumerate(rows):
        new = log_probs(policy, *row)
        p, q = new.detach().exp(), (old[index] - offsets[index, : len(new)]).exp()
        inside = ~(((p - q).abs() > 2e-4) & ((p - q) * ADVANTAGES[index] > 0))
        kept += inside.tolist()
        losses.append((-(p / q) * inside * ADVANTAGES[index] * new).sum())
    assert 0.1 < sum(kept) / len(kept) < 0.9
    expected = sum(losses) / 8 / trainer.max_completion_length
    assert_loss(trainer, inputs, policy, expected)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("training", [True, False])
def test_the_load_balancing_loss_of_a_mixture_of_experts(training, accumulation, ready, monkeypatch):
    """0.3 times it is added, over the micro-batches of the update; in evaluation there is one.

    The tiny model has no router: the squares of its head's weights stand in, with a gradient of 2 W.
    """
    trainer, output = ready(accumulation, **CLIP)
    inputs, _ = off_policy(trainer, output)
    trainer.model.train(training)
    head = trainer.model.lm_head.weight
    plain = compute_loss(trainer, inputs)
    gradient = gradient_of(trainer.model, plain)
    add_router_loss(monkeypatch, lambda: head.square().sum())
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 0.3
    loss = compute_loss(trainer, inputs)
    share = 0.3 / accumulation if training else 0.3
    assert loss.item() == pytest.approx(plain.item() + share * head.square().sum().item(), rel=1e-8)
    added = gradient_of(trainer.model, loss) - gradient
    expected = torch.cat(
        [(2 * share * p if p is head else torch.zeros_like(p)).flatten() for p in trainer.model.parameters()]
    )
    assert relative_difference(added, expected.detach().double()) < 1e-9


# name -> (settings, micro-batches to a rollout, reduction, updates that are means over their own tokens)
RAGGED = {
    "sequence mean": ({}, 1, mean_of_means, (0, 1)),
    # Rollouts of an update weigh alike, whatever their lengths; each is one micro-batch here.
    "token mean": ({"algorithm": "dapo"}, 1, mean_over_tokens, (0, 1)),
    # The first update takes two of the rollout's three micro-batches, and divides by what two hold on average.
    "token mean, one rollout": ({"algorithm": "dapo"}, 3, mean_over_tokens, (1,)),
}


@pytest.mark.parametrize("name", RAGGED)
def test_the_last_update_of_an_epoch_is_the_mean_of_what_is_left(name, policy_path, tmp_path):
    """Three micro-batches of 8 in updates of two: the second update is of one, and its gradient is not halved."""
    settings, per_rollout, reduce, updates = RAGGED[name]
    seen, steps = [], Steps()

    class Recording(BeforeLoss, PolicyTrainer):
        def before_loss(self, inputs):
            seen.append(inputs)
            return inputs

    args = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.2}
    args |= {"steps_per_generation": per_rollout, "beta": 0.0, **settings}
    spec = {"model": policy_path, "prompts": 6, "fixed": True, "args": args}
    trainer = train(spec, str(tmp_path), trainer_class=Recording, callbacks=[steps])
    assert (len(seen), trainer.state.global_step) == (3, 2)
    for step in updates:
        batches = (seen[:2], seen[2:])[step]
        sampler = model_in_float64(policy_path, steps.weights[0 if per_rollout == 3 else step])
        model = model_in_float64(policy_path, steps.weights[step])
        expected = sum(clipped_loss(model, sampler, batch, reduce) for batch in batches) / len(batches)
        assert relative_difference(steps.gradient(step), gradient_of(model, expected)) < 1e-9


def test_a_held_out_token_mean_is_of_all_tokens(policy_path, tmp_path):
    """Two batches of 8 responses, whose ratios are 1: minus each token's advantage, over the tokens of both."""
    batches = []

    class Recording(BeforeLoss, PolicyTrainer):
        def before_loss(self, inputs):
            batches.append(inputs)
            return inputs

    args = {"algorithm": "dapo", "per_device_eval_batch_size": 8}
    spec = {"model": policy_path, "held_out": prompts(4), "args": args}
    loss = build(spec, str(tmp_path), trainer_class=Recording).evaluate()["eval_loss"]
    tokens = [batch["completion_mask"].sum().item() for batch in batches]
    sums = [-(batch["advantages"][:, None] * batch["completion_mask"]).sum().item() for batch in batches]
    assert loss == pytest.approx(sum(sums) / sum(tokens), rel=1e-9)
    assert len(tokens) == 2 and loss != pytest.approx((sums[0] / tokens[0] + sums[1] / tokens[1]) / 2, rel=1e-3)


def clipped_loss(model, sampler, batch: dict, reduce) -> torch.Tensor:
    """Of responses that `sampler` is the old policy of, with their advantages as they are."""
    losses = []
    for row, advantage in zip(rows_of(batch), batch["advantages"].tolist(), strict=True):
        with torch.no_grad():
            old = log_probs(sampler, *row)
        losses.append(clip(torch.exp(log_probs(model, *row) - old), advantage, 0.2, 0.28))
    return reduce(losses)


ALL_CUT = {
    "token mean": {"algorithm": "dapo"},
    "over several rollouts": {"algorithm": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "kl token mean": {"beta": 0.2, "kl_aggregation": "token_mean"},
}


@pytest.mark.parametrize("name", ALL_CUT)
def test_a_rollout_of_cut_responses_alone_changes_nothing(name, policy_path, tmp_path):
    """Each is masked, so that no token is left to take a mean over: the loss is 0, and no update counts as a fault."""
    # Neither the end token nor padding is ever sampled.
    args = {"mask_truncated_completions": True, "generation_kwargs": {"suppress_tokens": [0, 2]}, "max_steps": 2}
    steps = Steps()
    spec = {"model": policy_path, "perturb": 1, "args": {**args, **ALL_CUT[name]}}
    trainer = train(spec, str(tmp_path), callbacks=[steps])
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["completions/clipped_ratio"] for entry in entries] == [1.0, 1.0]
    assert [entry["loss"] for entry in entries] == [0.0, 0.0]
    assert [entry["grad_norm"] for entry in entries] == [0.0, 0.0]
    assert trainer.update_guard.skipped == {"reward": 0, "loss": 0, "gradient": 0}
    assert all(torch.equal(p, steps.weights[0][n]) for n, p in trainer.model.named_parameters())


def test_soft_overlong():
    """L_max 100, buffer 20: 0 up to 80 tokens; (80 - 85) / 20 and (80 - 90) / 20; -1 from 100 on."""
    lengths = torch.tensor([80.0, 85, 90, 100, 101])
    assert soft_overlong(lengths, 100, 20).tolist() == [0, -0.25, -0.5, -1, -1]
