"""`PPOTrainer` against plain arithmetic in float64 and against `PolicyTrainer`; its value function and checkpoints."""

from __future__ import annotations

import statistics
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from tests.support.naive_policy import Steps, rows_of
from tests.support.reward_adapters import load_adapter, load_base, plain_scores, save_adapter, save_full_model
from tests.support.rollout_once import build, prompts, thirds, train
from tests.support.tiny import build_tokenizer
from tests.support.train_once import largest_difference, parameters, relative_difference, result
from tests.support.trl_private import rollout_batches

pytestmark = pytest.mark.usefixtures("in_float64")


def specification(policy_path: str, *, args: dict | None = None, **rest) -> dict:
    """Two updates on one rollout, one response to a prompt."""
    defaults = {"num_generations": 1, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.2}
    return {"trainer": "PPOTrainer", "model": policy_path, "perturb": 1, "args": {**defaults, **(args or {})}, **rest}


def move_value_head(trainer, scale: float = 0.3):
    """Off zero, where values and their gradient would say little."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in trainer.value_model.parameters().items():
            if "value_head.trunk" not in name:
                weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float32))
    return trainer


def of_kind(kind: str, policy_path: str, args: dict | None = None, **rest) -> dict:
    """With a value function, shared or separate, an adaptive KL coefficient, and four updates."""
    args = {"value_model": kind, "kl_target": 0.5, "kl_horizon": 50, "value_learning_rate": 0.5, **(args or {})}
    if kind == "separate":
        args["value_model_name_or_path"] = policy_path
    return specification(policy_path, args={"max_steps": 4, **args}, **rest)


# ---- A plain computation: one response at a time, no padding, no adapters, sums by definition ----


def plain_weights(weights: dict, adapter: str | None) -> dict:
    """Weights of a plain model, W + 2 B A where it has an adapter (alpha 8 over rank 4)."""
    if adapter is None and not any(name.startswith("base_model.") for name in weights):
        return {name: weight for name, weight in weights.items() if not name.startswith("value_head")}
    plain = {}
    for name, weight in weights.items():
        if not name.startswith("base_model.model.") or ".lora_" in name:
            continue
        inner = name.removeprefix("base_model.model.")
        if adapter is not None and ".base_layer." in name:
            layer = name.removesuffix(".base_layer.weight")
            if f"{layer}.lora_A.{adapter}.weight" in weights:
                down, up = weights[f"{layer}.lora_A.{adapter}.weight"], weights[f"{layer}.lora_B.{adapter}.weight"]
                weight = weight + 2 * up @ down
        plain[inner.replace(".base_layer.", ".")] = weight
    return plain


def plain_pass(model, weights: dict, prompt: list[int], response: list[int]):
    """Log-probabilities of the response's tokens, and the hidden states before each."""
    ids = torch.tensor([[*prompt, *response]])
    output = functional_call(model, weights, kwargs={"input_ids": ids, "output_hidden_states": True})
    log_probs = output.logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(response)[:, None])
    return log_probs[:, 0], output.hidden_states[-1][0, len(prompt) - 1 : -1]


def plain_values(model, weights: dict, kind: str, prompt: list[int], response: list[int]):
    if kind == "separate":
        trunk = {f"model.{n.removeprefix('value_head.trunk.')}": w for n, w in weights.items() if ".trunk." in n}
        own = {**trunk, "lm_head.weight": torch.zeros_like(model.lm_head.weight)}
        head = weights["value_head.head.weight"], weights["value_head.head.bias"]
    else:
        lora = any(".lora_" in name for name in weights)
        own = plain_weights(weights, "default" if lora else None)
        head = weights["value_head.weight"], weights["value_head.bias"]
    _, hidden = plain_pass(model, own, prompt, response)
    return hidden @ head[0][0] + head[1][0]


def advantages_by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    count = len(deltas)
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(count - t)) for t in range(count)]


CASES = {
    "shared": ("shared", {}, {}),
    "shared, padded": ("shared", {}, {"packing": "off"}),
    "shared, adaptive": (
        "shared",
        {},
        {"kl_target": 0.1, "kl_horizon": 20, "gamma": 0.9, "missing_eos_penalty": 0.3},
    ),
    "KL in the loss": ("shared", {}, {"kl_in": "loss", "kl_estimator": "k3", "beta": 0.2, "whiten_advantages": False}),
    "LoRA": ("shared", {"lora": True}, {"lam": 0.5}),
    "separate": ("separate", {}, {"value_model": "separate", "value_clip": None}),
    "separate and LoRA": ("separate", {"lora": True}, {"value_model": "separate", "gradient_checkpointing": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_arithmetic(name, policy_path, tmp_path):
    """Rewards, advantages, returns, losses and gradients of both updates of a rollout; the second is off-policy."""
    kind, rest, settings = CASES[name]
    args = {"epsilon": 0.05, "value_clip": 0.02, "value_coefficient": 0.5, "beta": 0.1, "seed": 1, **settings}
    if kind == "separate":
        args["value_model_name_or_path"] = policy_path
    steps = Steps()
    spec = specification(policy_path, args=args, **rest)
    trainer = move_value_head(build(spec, str(tmp_path), callbacks=[steps]))
    trainer.train()
    config, batch, logs = trainer.args, rollout_batches(trainer)[0], trainer.state.log_history
    rows = rows_of(batch)
    assert len({len(response) for _, response in rows}) > 2

    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    first = steps.weights[0]
    adapter = "default" if rest.get("lora") else None
    unmoved = {n: w.double() for n, w in AutoModelForCausalLM.from_pretrained(policy_path).named_parameters()}
    reference = plain_weights(first, None) if adapter else unmoved
    with torch.no_grad():
        old = [plain_pass(model, plain_weights(first, adapter), *row)[0] for row in rows]
        of_reference = [plain_pass(model, reference, *row)[0] for row in rows]
        old_values = [plain_values(model, first, kind, *row) for row in rows]
    scores = thirds([response for _, response in rows])
    ends = trainer.eos_token_ids
    scores = [s - config.missing_eos_penalty * (r[-1] not in ends) for s, (_, r) in zip(scores, rows, strict=True)]
    divergence = statistics.fmean((o - f).sum().item() for o, f in zip(old, of_reference, strict=True))
    assert logs[0]["kl/sequence"] == pytest.approx(divergence, rel=1e-6)
    assert abs(divergence) > 0.05
    rewards = []
    for score, before, ref in zip(scores, old, of_reference, strict=True):
        penalty = (0.1 * (before - ref) if trainer.algorithm.kl_in == "reward" else torch.zeros_like(before)).tolist()
        rewards.append([-p for p in penalty[:-1]] + [score - penalty[-1]])
    advantages = [
        advantages_by_definition(r, v.tolist(), config.gamma, config.lam)
        for r, v in zip(rewards, old_values, strict=True)
    ]
    returns = [
        [a + b for a, b in zip(x, v.tolist(), strict=True)] for x, v in zip(advantages, old_values, strict=True)
    ]
    if config.whiten_advantages:
        every = [advantage for row in advantages for advantage in row]
        mean, deviation = statistics.fmean(every), statistics.stdev(every)
        advantages = [[(advantage - mean) / deviation for advantage in row] for row in advantages]
    for index, (_, response) in enumerate(rows):
        for key, expected in (("advantages", advantages), ("returns", returns)):
            found = batch[key][index, : len(response)].tolist()
            # Rewards are float32, so small differences of larger numbers carry the rounding of those.
            assert found == pytest.approx(expected[index], rel=1e-6, abs=1e-6), key
        assert not batch["advantages"][index, len(response) :].any()
    known = [x for row in returns for x in row]
    errors = [r - v for row, values in zip(returns, old_values, strict=True) for r, v in zip(row, values.tolist())]  # noqa: B905
    explained = 1 - statistics.pvariance(errors) / statistics.pvariance(known)
    assert logs[0]["explained_variance"] == pytest.approx(explained, rel=1e-6, abs=1e-6)
    assert logs[0]["returns/mean"] == pytest.approx(statistics.fmean(known), rel=1e-6, abs=1e-7)

    tokens = sum(len(response) for _, response in rows)
    moved_values = clipped_values = 0
    for step in range(2):
        leaves = {n: w.requires_grad_(n in steps.gradients[0]) for n, w in steps.weights[step].items()}
        policy_loss = value_loss = approximate = torch.zeros((), dtype=torch.float64)
        clipped = 0
        for index, row in enumerate(rows):
            log_probs, _ = plain_pass(model, plain_weights(leaves, adapter), *row)
            values = plain_values(model, leaves, kind, *row)
            target, before = torch.tensor(returns[index]).double(), old_values[index]
            advantage = torch.tensor(advantages[index]).double()
            difference = log_probs - old[index]
            ratio = difference.exp()
            surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
            if config.kl_in == "loss":
                gap = of_reference[index] - log_probs
                surrogate = surrogate + 0.2 * (gap.exp() - 1 - gap)
            policy_loss = policy_loss + surrogate.sum() / tokens
            errors = (values - target) ** 2
            if config.value_clip is not None:
                near = before + (values.detach() - before).clamp(-0.02, 0.02)
                clipped += ((near - target) ** 2 > errors).sum().item()
                errors = torch.where((near - target) ** 2 > errors, (near - target) ** 2, errors)
            value_loss = value_loss + errors.sum() / 2 / tokens
            approximate = approximate + (ratio - 1 - difference).sum().detach() / tokens
            moved_values += ((values - before).abs() > 1e-3).sum().item()
        clipped_values += clipped
        total = policy_loss + 0.5 * value_loss
        total.backward()
        assert logs[step]["loss"] == pytest.approx(total.item(), rel=1e-6, abs=1e-7)
        assert logs[step]["policy_loss"] == pytest.approx(policy_loss.item(), rel=1e-6, abs=1e-7)
        assert logs[step]["value_loss"] == pytest.approx(value_loss.item(), rel=1e-6)
        assert logs[step]["value_clip_ratio"] == pytest.approx(clipped / tokens, abs=1e-6)
        assert logs[step]["approx_kl"] == pytest.approx(approximate.item(), rel=1e-6, abs=1e-8)
        for part in ("", "value_head"):
            names = [n for n in steps.gradients[step] if part in n and leaves[n].grad is not None]
            if names:
                found, expected = (
                    torch.cat([source(n).flatten() for n in names])
                    for source in (steps.gradients[step].__getitem__, lambda n: leaves[n].grad)  # noqa: B023
                )
                assert relative_difference(found, expected) < 1e-6, (step, part)
        assert {n for n in steps.gradients[step] if leaves[n].grad is None} == set()
    # Otherwise the second update would say little.
    assert moved_values and (clipped_values or config.value_clip is None)
    assert logs[1]["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_what_could_not_be_scored_takes_no_part_in_the_loss(kl_in, policy_path, tmp_path):
    """Five of eight responses have no reward. Where every ratio is 1 the policy's part is minus the mean of the
    advantages of the other three's tokens (and 0.5 k3 to the reference), the value's half their mean square.
    """
    expected = []
    for size, accumulation, updates in ((8, 1, 1), (2, 4, 1), (2, 2, 2)):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        split |= {"generation_batch_size": 8, "max_steps": updates, "learning_rate": 1e-9}
        settings = {"beta": 0.5, "kl_in": kl_in, "kl_estimator": "k1" if kl_in == "reward" else "k3"}
        args = {**split, **settings, "whiten_advantages": False, "value_coefficient": 0.7}
        spec = specification(policy_path, args=args, fixed=True)
        trainer = move_value_head(build(spec, str(tmp_path / f"{size}-{accumulation}"), reward_funcs=[few]))
        trainer.train()
        batches = rollout_batches(trainer)
        for update, entry in enumerate(result(trainer).logs[:updates]):
            totals = torch.zeros(3, dtype=torch.float64)
            for batch in batches[update * accumulation : (update + 1) * accumulation]:
                counted = batch["value_mask"].double()
                loss = -batch["advantages"].double()
                if kl_in == "loss":
                    gap = batch["ref_per_token_logps"].double() - batch["old_per_token_logps"].double()
                    loss = loss + 0.5 * (gap.exp() - 1 - gap)
                errors = (batch["old_values"].double() - batch["returns"].double()).square() / 2
                totals += torch.stack([(loss * counted).sum(), (errors * counted).sum(), counted.sum()])
            policy, value = (totals[:2] / totals[2]).tolist()
            assert entry["policy_loss"] == pytest.approx(policy, rel=1e-6)
            assert entry["value_loss"] == pytest.approx(value, rel=1e-6)
            assert entry["loss"] == pytest.approx(policy + 0.7 * value, rel=1e-6)
            expected.append(policy)
        scored = sum(batch["value_mask"].sum().item() for batch in batches)
        assert 0 < 2 * scored < sum(batch["completion_mask"].sum().item() for batch in batches)
    assert min(map(abs, expected)) > 0.01


def few(completion_ids, row_id, **_):
    kept = ("row0", "row3", "row4")
    return [r if row in kept else None for row, r in zip(row_id, thirds(completion_ids), strict=True)]


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_learnt_positions_count_from_the_first_token(kind, tmp_path):
    """GPT-2, whose prompts TRL pads on the left: log-probabilities and values are those of the rows by themselves."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    path = str(tmp_path / "gpt2")
    spec = specification(path, args={"value_model": kind, "max_steps": 1, "max_prompt_tokens": 128})
    if kind == "separate":
        spec["args"]["value_model_name_or_path"] = path
    steps = Steps()
    trainer = move_value_head(build(spec, str(tmp_path / "run"), callbacks=[steps]))
    trainer.train()
    batch = rollout_batches(trainer)[0]
    assert batch["prompt_mask"].sum(1).unique().numel() > 2
    policy, reference = (GPT2LMHeadModel.from_pretrained(path).double() for _ in range(2))
    policy.load_state_dict({n: w for n, w in steps.weights[0].items() if "value_head" not in n}, strict=False)
    trunk = policy if kind == "shared" else reference
    head = next(w for n, w in steps.weights[0].items() if n.startswith("value_head") and n.endswith(("head.weight",)))
    bias = next(w for n, w in steps.weights[0].items() if n.startswith("value_head") and n.endswith(("head.bias",)))
    with torch.no_grad():
        for index, (prompt, response) in enumerate(rows_of(batch)):
            width = len(response)
            for key, model in (("old_per_token_logps", policy), ("ref_per_token_logps", reference)):
                log_probs, _ = plain_pass(model, {}, prompt, response)
                assert batch[key][index, :width].tolist() == pytest.approx(log_probs.tolist(), abs=1e-9)
            _, hidden = plain_pass(trunk, {}, prompt, response)
            values = (hidden @ head[0] + bias[0]).tolist()
            assert batch["old_values"][index, :width].tolist() == pytest.approx(values, abs=1e-9)


# ---- Checkpoints, and when the value function learns ----

SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 4}


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_resumed_run_is_the_straight_one(kind, policy_path, tmp_path):
    spec = of_kind(kind, policy_path, SAVING)
    straight = train(spec, str(tmp_path))
    checkpoint = tmp_path / "checkpoint-2"
    resumed = build(spec, str(tmp_path / "again"))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0.0
    # Adapted at each of two rollouts.
    assert resumed.algorithm.beta == straight.algorithm.beta != resumed.args.beta
    names = ("loss", "value_loss", "explained_variance", "value/mean", "kl_coef")
    expected, found = (
        [entry.get(name) for name in names] for entry in (result(straight).logs[-1], result(resumed).logs[-1])
    )
    assert found == expected

    straight.save_model(str(tmp_path / "final"))
    own = {name for name, _ in straight.model.named_parameters() if "value_head" in name}
    saved = load_file(tmp_path / "final" / "value_head.safetensors")
    assert saved.keys() == own
    weights = dict(straight.model.named_parameters())
    assert all(saved[name].equal(weights[name]) for name in own)
    for folder in (checkpoint, tmp_path / "final"):
        assert not any("value" in key for key in load_file(folder / "model.safetensors"))
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    own_weights = dict(plain.named_parameters())
    if kind == "separate":
        assert own_weights.keys() == {name for name in weights if name not in own}
        assert all(weight.equal(weights[name]) for name, weight in own_weights.items())


def test_the_best_model_has_its_value_function(policy_path, tmp_path):
    """The held-out reward is 1 at step 2, and 0 at step 4, where training ends."""
    held_out = iter([1.0, 0.0])

    def reward(completion_ids, **_):
        return thirds(completion_ids) if trainer.model.training else [next(held_out)] * len(completion_ids)

    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "per_device_eval_batch_size": 8}
    best |= {"metric_for_best_model": "reward", "greater_is_better": True}
    spec = specification(policy_path, args={**SAVING, **best}, held_out=prompts(8))
    trainer = build(spec, str(tmp_path), reward_funcs=[reward])
    trainer.train()
    own = trainer.value_model.parameters()
    saved, last = (load_file(tmp_path / f"checkpoint-{step}" / "value_head.safetensors") for step in (2, 4))
    assert all(weight.equal(saved[name]) and not weight.equal(last[name]) for name, weight in own.items())


@pytest.mark.usefixtures("in_float64")
def test_the_coefficient_adapts(policy_path, tmp_path):
    """8 responses to a rollout, horizon 50: it changes by the factor 1 + clip(KL / target - 1) 8 / 50."""
    args = {"kl_target": 0.4, "kl_horizon": 50, "max_steps": 8, "beta": 0.2}
    trainer = train(specification(policy_path, args=args), str(tmp_path))
    logs = [entry for entry in trainer.state.log_history if "kl_coef" in entry]
    coefficients = [*[entry["kl_coef"] for entry in logs], trainer.algorithm.beta]
    assert len(logs) == 4 and coefficients[0] == 0.2
    for entry, now, then in zip(logs, coefficients[:-1], coefficients[1:], strict=True):
        error = max(-0.2, min(0.2, entry["kl/sequence"] / 0.4 - 1))
        assert then == pytest.approx(now * (1 + error * 8 / 50))
    assert len(set(coefficients)) > 2


def test_the_value_function_has_its_learning_rate(policy_path, tmp_path):
    """Plain SGD: twice the learning rate moves the value function twice as far, and the policy as before."""
    moves = []
    for rate in (None, 0.4):
        args = {"value_learning_rate": rate, "max_steps": 1, "max_grad_norm": 0.0}
        trainer = move_value_head(build(specification(policy_path, args=args, fixed=True), str(tmp_path)))
        before = {name: weight.clone() for name, weight in parameters(trainer).items()}
        trainer.train()
        moves.append({name: weight - before[name] for name, weight in parameters(trainer).items()})
    for name, move in moves[0].items():
        factor = 2 if name.startswith("value_head") else 1
        assert move.abs().max() > 0, name
        torch.testing.assert_close(moves[1][name], factor * move, rtol=1e-3, atol=1e-6)


def test_a_checkpoint_of_another_value_function_is_refused(policy_path, tmp_path):
    trainer = train(specification(policy_path, args=SAVING), str(tmp_path))
    file = tmp_path / "checkpoint-2" / "value_head.safetensors"
    other = build(of_kind("separate", policy_path), str(tmp_path / "other"))
    with pytest.raises(ValueError, match="this run's value_model separate"):
        other.value_model.load(file.parent)
    save_file({**load_file(file), "value_head.weight": torch.zeros(1, 24)}, file)
    with pytest.raises(ValueError, match="this run's value_model shared"):
        trainer.value_model.load(file.parent)
    file.unlink()
    with pytest.raises(ValueError, match="this run's value_model shared"):
        trainer.value_model.load(file.parent)


# ---- A model of its own ----


@pytest.mark.parametrize("adapter", [False, True])
def test_values_begin_as_the_rewards(adapter, policy_path, tmp_path):
    """Before any update, the value after a text's last token is the reward model's score of the text."""
    save, load = (save_adapter, partial(load_adapter, policy_path)) if adapter else (save_full_model, load_base)
    folder = save(policy_path, tmp_path / "rewards")
    spec = of_kind("separate", policy_path)
    spec["args"]["value_model_name_or_path"] = folder
    trainer = build(spec, str(tmp_path / "run"))
    ids = torch.tensor([[0, 0, 20, 30, 40, 50], [9, 8, 7, 6, 5, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    values = trainer.value_model.values(ids, mask, 2, 1)
    assert values.requires_grad and all(weight.requires_grad for weight in trainer.value_model.parameters().values())
    # The value before the last token is that of the text without it.
    scores = plain_scores(load(folder), [ids[0, 2:-1].tolist(), ids[1, :-1].tolist()])
    assert values[:, -1].tolist() == pytest.approx(scores.tolist(), abs=1e-5)
