"""`PolicyTrainer` against TRL's own trainers, where both can do the same, and against plain float64 arithmetic."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import trl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.rollout_once import DEFAULTS, build, prompts, save_policy, thirds, train
from tests.train_once import relative_difference, result
from trl_ext.trainers import policy as policy_module

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def policy_path(tiny_model_path, tmp_path_factory) -> str:
    return save_policy(tiny_model_path, tmp_path_factory.mktemp("policy"))


# ---- Equality with stock ----

# TRL's conventions, which an algorithm's row can be overridden with.
STOCK = {"std_ddof": 1, "advantage_eps": 1e-4}
KL = {"beta": 0.05, "kl_ratio_correction": True}
# Each rollout serves four updates: two of its halves, twice. At epsilon 0.001 most tokens are clipped from the second.
OFF_POLICY = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 8,
    "learning_rate": 0.1,
    "epsilon": 1e-3,
}
# The same with both halves in one update, so that TRL's rescaled token count is that of the update.
ALIGNED = {**OFF_POLICY, "gradient_accumulation_steps": 2, "max_steps": 4}
PLAIN_GRPO = {"loss_type": "grpo", "beta": 0.0}

# name -> (settings of both, of ours, of TRL's, further keys of the specification)
EQUAL = {
    "grpo": (OFF_POLICY, {**STOCK, **KL}, {"loss_type": "grpo", "beta": 0.05}, {}),
    "grpo, plain kl": (
        OFF_POLICY,
        {**STOCK, "beta": 0.05},
        {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
        {},
    ),
    "dr_grpo": (
        OFF_POLICY,
        {"algorithm": "dr_grpo"},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
        {},
    ),
    "gspo": (
        {**OFF_POLICY, "epsilon": 1e-4, "epsilon_high": 2e-4},
        {"algorithm": "gspo", **STOCK, **KL},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.05},
        {},
    ),
    "dapo": ({**ALIGNED, "epsilon_high": 2e-3}, {"algorithm": "dapo", **STOCK}, {"beta": 0.0}, {}),
    # Said to both in TRL's words.
    "dapo, kl, by TRL's names": (
        {
            **ALIGNED,
            "epsilon_high": 2e-3,
            "delta": 1.003,
            "loss_type": "dapo",
            "scale_rewards": "batch",
            "use_bias_correction_kl": True,
            "beta": 0.05,
        },
        {},
        {},
        {},
    ),
    "luspo": (
        {
            **OFF_POLICY,
            "epsilon": 1e-4,
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "scale_rewards": "none",
            "beta": 0.0,
        },
        {},
        {},
        {},
    ),
    "cispo": (
        {name: value for name, value in ALIGNED.items() if name != "epsilon"}
        | {"loss_type": "cispo", "epsilon_high": 1.0, "scale_rewards": "group", "beta": 0.0},
        # Padded: of ratios that are 1 up to rounding, a cap at 1 counts those that rounding puts above.
        {"packing": "off"},
        {},
        {},
    ),
    "grpo, adapter": (OFF_POLICY, {**STOCK, **KL}, {"loss_type": "grpo", "beta": 0.05}, {"lora": True}),
    "entropy bonus": ({**OFF_POLICY, "entropy_coef": 0.1}, {**STOCK, "beta": 0.0}, PLAIN_GRPO, {}),
    "adaptive entropy": (
        {
            **OFF_POLICY,
            "use_adaptive_entropy": True,
            "entropy_coef": 0.1,
            "entropy_target": 5.2,
            "entropy_coef_delta": 0.05,
        },
        {**STOCK, "beta": 0.0},
        PLAIN_GRPO,
        {},
    ),
    "top entropy": (
        {**OFF_POLICY, "top_entropy_quantile": 0.4},
        {**STOCK, **KL},
        {"loss_type": "grpo", "beta": 0.05},
        {},
    ),
    "entropy bonus on top entropy": (
        {**OFF_POLICY, "top_entropy_quantile": 0.4, "entropy_coef": 0.1},
        {**STOCK, "beta": 0.0},
        PLAIN_GRPO,
        {},
    ),
    "truncated masked": (
        {**OFF_POLICY, "mask_truncated_completions": True, "learning_rate": 0.02},
        {**STOCK, "beta": 0.0},
        PLAIN_GRPO,
        {},
    ),
    "off-policy mask": ({**OFF_POLICY, "off_policy_mask_threshold": 0.01}, {**STOCK, "beta": 0.0}, PLAIN_GRPO, {}),
    "reference follows": (
        {**OFF_POLICY, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
        {**STOCK, **KL},
        {"loss_type": "grpo", "beta": 0.05},
        {},
    ),
    "two rewards": (
        {**OFF_POLICY, "reward_weights": [1.0, 0.3], "temperature": 0.7, "learning_rate": 0.02},
        {**STOCK, "beta": 0.0},
        PLAIN_GRPO,
        {"rewards": ["thirds", "evens"]},
    ),
}


def update(run, policy_path: str):
    """How far training moved the parameters; an adapter's own values."""
    initial = load_file(Path(policy_path) / "model.safetensors")
    return torch.cat([(p - initial.get(n, 0)).flatten() for n, p in sorted(run.parameters.items())]).double()


@pytest.mark.parametrize("name", EQUAL)
def test_equals_stock(name, policy_path, tmp_path):
    """Same seed, same rollouts, same updates: TRL's own objective, selected by name, and our metrics hold TRL's."""
    both, own, stock, further = EQUAL[name]
    spec = {"model": policy_path, "perturb": 1, **further}
    ours = result(train({**spec, "args": {**both, **own, "keep_groups": "off"}}, str(tmp_path / "ours")))
    expected = result(
        train({**spec, "trainer": "trl.GRPOTrainer", "args": {**both, **stock}}, str(tmp_path / "stock"))
    )
    assert relative_difference(update(ours, policy_path), update(expected, policy_path)) < 1e-9
    assert ours.losses == pytest.approx(expected.losses, rel=1e-8, abs=1e-9)
    corrected = own.get("kl_ratio_correction") or both.get("use_bias_correction_kl")
    averaged = set()
    if both.get("gradient_accumulation_steps", 1) > 1:
        # Over a step's tokens here, and means of its micro-batches' means with TRL.
        averaged = {"kl", "entropy", *(key for key in expected.logs[0] if key.startswith(("clip_ratio", "cispo")))}
    for own_entry, entry in zip(ours.logs, expected.logs, strict=True):
        for key in entry.keys() - {"step_time"} - ({"kl"} if corrected else set()) - averaged:
            # None where a mean has nothing to be of.
            expected_value = None if entry[key] is None else pytest.approx(entry[key], rel=1e-8, abs=1e-9)
            assert own_entry[key] == expected_value, key
    clipped = "cispo_clip_ratio" if "cispo" in name else "clip_ratio/region_mean"
    assert max(entry[clipped] for entry in ours.logs) > 0.05, "no token was clipped: the comparison shows little"
    assert 0 < ours.logs[0]["completions/clipped_ratio"] < 1, "all responses end alike"


def test_truncated_and_off_policy_masks_take_effect(policy_path, tmp_path):
    """The comparisons above would hold as well if neither trainer read these options."""
    updates = [
        update(result(train({"model": policy_path, "args": {**OFF_POLICY, **options}}, str(tmp_path))), policy_path)
        for options in ({}, {"mask_truncated_completions": True}, {"off_policy_mask_threshold": 0.01})
    ]
    assert relative_difference(updates[1], updates[0]) > 0.01
    assert relative_difference(updates[2], updates[0]) > 0.01


def test_the_population_deviation_is_the_default_and_differs(policy_path, tmp_path):
    """For groups of 4, sample over population deviation is sqrt(4/3) = 1.1547, and the gradient grows by it."""
    spec = {"model": policy_path, "args": {"beta": 0.0}}
    ours = result(train(spec, str(tmp_path / "ours"))).gradient(policy_path)
    stock = {**spec, "trainer": "trl.GRPOTrainer", "args": {"loss_type": "grpo", "beta": 0.0}}
    expected = result(train(stock, str(tmp_path / "stock"))).gradient(policy_path)
    assert (ours.norm() / expected.norm()).item() == pytest.approx(math.sqrt(4 / 3), rel=2e-3)
    own_deviation = {**spec, "args": {"beta": 0.0, **STOCK}}
    assert relative_difference(result(train(own_deviation, str(tmp_path))).gradient(policy_path), expected) < 1e-9


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo_equals_the_stock_rloo_trainer(beta, policy_path, tmp_path):
    """On-policy, TRL's product ratio is 1 and its gradient that of the log-probability: `sum` without a ratio."""

    spec = {"model": policy_path, "perturb": 1, "args": {"max_steps": 3, "learning_rate": 0.1, "beta": beta}}
    ours = result(train({**spec, "trainer": "RLOOTrainer"}, str(tmp_path / "ours")))
    reference = build({**spec, "trainer": "trl.GRPOTrainer"}, str(tmp_path / "unused"))
    trainer = trl.RLOOTrainer(
        reference.model,
        [thirds],
        args=trl.RLOOConfig(**{**DEFAULTS, **spec["args"]}, output_dir=str(tmp_path / "stock")),
        train_dataset=reference.train_dataset,
        processing_class=reference.processing_class,
    )
    trainer.train()
    expected = result(trainer)
    assert relative_difference(update(ours, policy_path), update(expected, policy_path)) < 1e-9
    if beta:
        assert [entry["shaped_reward"] for entry in ours.logs] != [entry["reward"] for entry in ours.logs]


# ---- Equality with plain arithmetic in float64 ----


class Steps(TrainerCallback):
    """Keeps the weights before each update, and its gradient."""

    def __init__(self):
        self.weights, self.gradients = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
        self.gradients.append(torch.cat([p.grad.flatten() for _, p in model.named_parameters()]).double())


def model_in_float64(policy_path: str, weights: dict | None = None):
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    if weights is not None:
        model.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return model


def log_probs(model, prompt: list[int], response: list[int], temperature: float = 1.0):
    """Of one response, token by token, without padding."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def rows_of(batch: dict) -> list[tuple[list[int], list[int]]]:
    """Prompt and response ids of a rollout, without padding."""
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return [(p[pm.bool()].tolist(), c[cm.bool()].tolist()) for p, pm, c, cm in zip(*map(batch.get, keys), strict=True)]


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


def clip(ratio, advantage: float, low: float = 0.05, high: float = 0.05):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def mean_of_means(losses):
    return sum(row.mean() for row in losses) / len(losses)


def mean_over_tokens(losses):
    return torch.cat(losses).mean()


def mean_of_sums(losses):
    return sum(row.sum() for row in losses) / len(losses)


def over_eight(losses):
    return mean_of_sums(losses) / 8


KINDS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: torch.exp(-d) - 1 + d}
CLIP = {"epsilon": 0.05}
# name -> (settings, advantages of a group, surrogate, reduction, KL kind, KL in, beta)
INDEPENDENT = {
    **{
        f"grpo {kind}": (
            {**CLIP, "beta": 0.2, "kl_estimator": kind},
            normalized, "clip", mean_of_means, kind, "loss", 0.2,
        )
        for kind in KINDS
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
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    model.load_state_dict(weights)
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
    batch = trainer._buffered_inputs[0]
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
        divergences = [KINDS[kind](p - f) for p, f in zip(new, of_reference, strict=True)] if kind else []
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

    def recording(trainer, inputs, group_size):
        before = trainer.generation_config.to_dict(), dict(trainer.generation_kwargs)
        rewards, lengths = real(trainer, inputs, group_size)
        assert (trainer.generation_config.to_dict(), dict(trainer.generation_kwargs)) == before
        found.append((rewards.tolist(), lengths))
        return rewards, lengths

    real = policy_module.greedy_rewards
    monkeypatch.setattr(policy_module, "greedy_rewards", recording)
    steps = Steps()
    args = {"max_steps": 2, "learning_rate": 0.2, "num_generations": num_generations, "temperature": 0.7, "top_k": 5}
    spec = {"model": policy_path, "trainer": "ReMaxTrainer", "perturb": 1, "args": args}
    trainer = build(spec, str(tmp_path), callbacks=[steps])
    trainer.train()
    count = 8 // num_generations
    ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in prompts(8)])
    for step in range(2):
        seen = [(step * count + index) % 8 for index in range(count)]
        expected = [greedy_reward(policy_path, steps.weights[step], ids[index], 8) for index in seen]
        assert found[step][0] == pytest.approx(expected, rel=1e-6)
        entry = trainer.state.log_history[step]
        assert entry["greedy/reward"] == pytest.approx(statistics.fmean(expected), rel=1e-6)
        assert entry["greedy/mean_length"] == statistics.fmean(found[step][1])


def test_the_policy_loss_metric_is_of_the_algorithm(policy_path, tmp_path):
    """Beside an entropy bonus TRL logs the loss without it; for Dr.GRPO that must be Dr.GRPO's."""
    own = {"algorithm": "dr_grpo", "entropy_coef": 0.1}
    stock = {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "entropy_coef": 0.1}
    spec = {"model": policy_path}
    ours = result(train({**spec, "args": {**OFF_POLICY, **own}}, str(tmp_path)))
    expected = result(train({**spec, "trainer": "trl.GRPOTrainer", "args": {**OFF_POLICY, **stock}}, str(tmp_path)))
    assert ours.losses == pytest.approx(expected.losses, rel=1e-8, abs=1e-9)
    assert [entry["policy_loss"] for entry in ours.logs] == pytest.approx(
        [entry["policy_loss"] for entry in expected.logs], rel=1e-8, abs=1e-9
    )
