"""Distillation: divergences and advantages of worked numbers, and the trainer against plain arithmetic in float64."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.support.rollout_once import build, prompts, train, train_in_processes
from tests.support.tiny import perturbed, token_ids, token_log_probs
from tests.support.train_once import largest_difference, result
from trl_ext import DistillationConfig
from trl_ext.losses import distillation, generalized_jsd, reinforce, teacher_advantages, with_tail
from trl_ext.losses.policy import unclipped_surrogate

pytestmark = pytest.mark.usefixtures("in_float64")

LOGITS = [0.5, 0.0, -0.5]
TEACHER = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
# beta -> value, and gradient by the student's logits.
WORKED = {
    0.0: (0.300617, [0.306480, 0.007196, -0.313676]),
    1.0: (0.293963, [0.321719, -0.083023, -0.238697]),
    0.5: (0.071596, [0.072935, -0.009300, -0.063634]),
    0.1: (0.026611, [0.026929, -0.000276, -0.026652]),
    0.9: (0.026153, [0.028034, -0.006506, -0.021528]),
    0.01: (0.002971, None),
}


def student():
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(dim=-1)


@pytest.mark.parametrize("beta", WORKED)
def test_worked_divergences(beta):
    expected, gradient = WORKED[beta]
    logits, log_probs = student()
    value = generalized_jsd(log_probs, TEACHER, beta=beta)
    assert value.item() == pytest.approx(expected, abs=6e-7)
    value.backward()
    if gradient is not None:
        assert logits.grad.tolist() == pytest.approx(gradient, abs=6e-7)
    else:
        # Nearer to the forward divergence, once divided by beta.
        assert value.item() / beta == pytest.approx(0.297061, abs=6e-7)


def test_worked_losses_of_sampled_tokens():
    """Their expectation over the sampled token has the gradient of the reverse divergence."""
    values, gradients = [], []
    for token in range(3):
        logits, log_probs = student()
        own = log_probs[token].reshape(1, 1)
        advantages = teacher_advantages(own, TEACHER[token].reshape(1, 1), torch.ones(1, 1))
        assert not advantages.requires_grad
        loss = reinforce(own, advantages).sum()
        loss.backward()
        values.append((advantages.item(), loss.item()))
        gradients.append(logits.grad)
    assert [a for a, _ in values] == pytest.approx([-0.929168, -0.023703, 0.987122], abs=6e-7)
    assert [loss for _, loss in values] == pytest.approx([-0.632085, -0.027976, 1.658632], abs=6e-7)
    known = [0.458563, -0.285437, -0.173126, -0.012005, 0.016422, -0.004416, 0.499958, 0.303240, -0.803198]
    assert torch.cat(gradients).tolist() == pytest.approx(known, abs=6e-7)
    probs = student()[1].exp().detach()
    assert sum(p * a for p, (a, _) in zip(probs.tolist(), values, strict=True)) == pytest.approx(
        -WORKED[1.0][0], abs=6e-7
    )
    mean = probs @ torch.stack(gradients)
    assert mean.tolist() == pytest.approx(WORKED[1.0][1], abs=6e-7)
    variance = probs @ (torch.stack(gradients) - mean).square().sum(dim=1)
    assert variance.item() == pytest.approx(0.179618, abs=6e-7)


@pytest.mark.parametrize(
    "discount, advantages, expected, gradient",
    [
        (0, [1, -0.5, 0.25, -0.4, 0.8, 0], -4.450284, [-2.225541, 0.370409, -0.290459, 0.098639, -2.403333, 0]),
        (1, [0.75, -0.25, 0.25, 0.4, 0.8, 0], -4.276381, [-1.669156]),
    ],
)
def test_worked_advantages_of_a_batch(discount, advantages, expected, gradient):
    log_probs = torch.tensor([[-1.0, -0.7, -0.5], [-2.0, -0.3, -0.9]], requires_grad=True)
    sampler = torch.tensor([[-1.8, -0.4, -0.65], [-0.6, -1.4, -0.9]])
    taught = torch.tensor([[-0.8, -0.9, -0.4], [-1.0, -0.6, -0.9]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    found = teacher_advantages(sampler, taught, mask, discount=discount)
    assert found.flatten().tolist() == pytest.approx(advantages)
    loss = (unclipped_surrogate(log_probs - sampler, found) * mask).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=6e-7)
    assert log_probs.grad.flatten()[: len(gradient)].tolist() == pytest.approx(gradient, abs=6e-7)


def test_a_discount_passes_over_tokens_that_the_policy_did_not_choose():
    sampler, taught = torch.zeros(1, 4), torch.tensor([[1.0, 9.0, 2.0, 9.0]])
    found = teacher_advantages(sampler, taught, torch.tensor([[1, 0, 1, 0]]), discount=0.5)
    assert found.tolist() == [[2.0, 0.0, 2.0, 0.0]]


@pytest.mark.parametrize("tokens, reverse, forward", [([0, 1], 0.204848, 0.175379), ([1, 2], 0.064889, 0.064171)])
def test_worked_divergences_with_a_tail(tokens, reverse, forward):
    p = torch.tensor([1.0, 0.5, 0.0, -1.0]).log_softmax(dim=-1)
    q = torch.tensor([0.2, 1.0, 0.3, 0.1]).log_softmax(dim=-1)
    few = [with_tail(log_probs, torch.tensor(tokens)) for log_probs in (p, q)]
    assert few[0].exp().sum().item() == pytest.approx(1)
    for beta, expected, whole in ((1, reverse, 0.221478), (0, forward, 0.204270)):
        assert generalized_jsd(*few, beta=beta).item() == pytest.approx(expected, abs=6e-7)
        assert generalized_jsd(p, q, beta=beta).item() == pytest.approx(whole, abs=6e-7) and expected < whole


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [None, 2])
def test_hidden_states_in_pieces(beta, top_k, monkeypatch):
    """Equal to the whole, and without gradient where the teacher is the student; a longer vocabulary is cut."""
    torch.manual_seed(0)
    hidden, taught = torch.randn(7, 4), torch.randn(7, 3)
    head, other = torch.nn.Linear(4, 5), torch.nn.Linear(3, 6)
    monkeypatch.setattr(distillation, "PIECE", 10)
    results = []
    for in_pieces in (True, False):
        own = hidden.clone().requires_grad_()
        head.zero_grad()
        if in_pieces:
            settings = {"beta": beta, "top_k": top_k, "temperature": 0.7}
            values = distillation.divergence_from_hidden_states(own, taught, head, other, **settings)
        else:
            p, q = ((logits[:, :5] / 0.7).log_softmax(-1) for logits in (head(own), other(taught).detach()))
            if top_k:
                ids = p.topk(top_k).indices
                p, q = (
                    torch.cat([x.gather(1, ids), (1 - x.gather(1, ids).exp().sum(1, keepdim=True)).log()], 1)
                    for x in (p, q)
                )
            m = (beta * q.exp() + (1 - beta) * p.exp()).log()
            forward, reverse = (
                (x.exp() * (x - y)).sum(1) for x, y in ((q, m if 0 < beta < 1 else p), (p, m if 0 < beta < 1 else q))
            )
            values = {0.0: forward, 1.0: reverse}.get(beta, beta * forward + (1 - beta) * reverse)
        (values * torch.arange(7)).sum().backward()
        results.append([values.detach(), own.grad, head.weight.grad.clone()])
    for one, expected in zip(*results, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
    own = hidden.clone().requires_grad_()
    distillation.divergence_from_hidden_states(own, own.detach(), head, head, beta=beta, top_k=top_k).sum().backward()
    assert own.grad.abs().max() < 1e-15
    assert other.weight.grad is None


# ---- In a trainer ----

ARGS = {"num_generations": None, "temperature": 0.7, "teacher_prompt": "hint"}
SETTINGS = {
    "reverse": {},
    "forward": {"beta": 0.0, "aggregation": "sequence_mean"},
    "jsd": {"beta": 0.4, "divergence_top_k": 5},
    "sampled_token": {"divergence": "sampled_token", "discount": 0.5},
}


def rows(count: int = 8) -> list[dict]:
    """Prompts with a longer one for the teacher."""
    return [
        {
            **row,
            "hint": [{"role": "user", "content": row["prompt"][0]["content"] + f" it is {index} " * (1 + index % 3)}],
        }
        for index, row in enumerate(prompts(count))
    ]


def another(policy_path, seed: int = 3):
    return perturbed(AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64), seed=seed)


def specification(policy_path, **args) -> dict:
    return {
        "trainer": "DistillationTrainer",
        "model": policy_path,
        "perturb": 1,
        "args": {**ARGS, **args},
        "fixed": True,
    }


def built(policy_path, folder, teacher, *, spec=(), rewards=None, **args):
    given = {"teacher_model": teacher, "reward_funcs": rewards, "train_dataset": Dataset.from_list(rows())}
    spec = {**specification(policy_path, **args), **dict(spec)}
    trainer = build({name: value for name, value in spec.items() if value is not None}, str(folder), **given)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def update(trainer) -> tuple[float, dict, dict]:
    """The loss of a rollout, its gradient by parameter, and the rollout."""
    output = trainer._generate_and_score_completions(rows())
    tokens = trainer._token_mask(output).sum().clamp(min=1)
    loss = trainer._compute_loss(trainer.model, {**output, "mean_tokens": tokens})
    loss.backward()
    found = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), found, output


def plain_loss(name: str, settings: dict, policy, teacher, tokenizer, output: dict):
    """Of each response by itself, without padding, the teacher's prompt from the chat template."""
    losses = []
    kept = [o[m.bool()].tolist() for o, m in zip(output["completion_ids"], output["completion_mask"], strict=True)]
    taught = output.get("taught", [1] * len(kept))
    for row, response in (pair for pair, counts in zip(zip(rows(), kept, strict=True), taught, strict=True) if counts):
        own, hint = (
            token_ids(tokenizer, {"prompt": row[side], "chosen": [], "rejected": []})[0] for side in ("prompt", "hint")
        )
        p = (token_log_probs(policy, own, response) / 0.7).log_softmax(-1)
        with torch.no_grad():
            q = (token_log_probs(teacher, hint, response) / 0.7).log_softmax(-1)
        if name == "sampled_token":
            ids = torch.tensor(response)[:, None]
            terms, p = (q.gather(1, ids) - p.gather(1, ids))[:, 0].detach(), p.gather(1, ids)[:, 0]
            sums = [sum(0.5 ** (j - i) * terms[j] for j in range(i, len(terms))) for i in range(len(terms))]
            losses.append(-torch.stack(sums) * (p - p.detach()).exp())
            continue
        if "divergence_top_k" in settings:
            ids = p.topk(5).indices
            p, q = (
                torch.cat([x.gather(1, ids), (-x.gather(1, ids).exp().sum(1, keepdim=True)).log1p()], 1)
                for x in (p, q)
            )
        beta = settings.get("beta", 1.0)
        m = (beta * q.exp() + (1 - beta) * p.exp()).log() if 0 < beta < 1 else None
        forward = (q.exp() * (q - (p if m is None else m))).sum(1)
        reverse = (p.exp() * (p - (q if m is None else m))).sum(1)
        losses.append({0.0: forward, 1.0: reverse}.get(beta, beta * forward + (1 - beta) * reverse))
    if settings.get("aggregation") == "sequence_mean":
        return sum(row.mean() for row in losses) / len(losses)
    return torch.cat(losses).mean()


@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_against_plain_arithmetic(name, packing, policy_path, tmp_path):
    """The teacher's longer prompts are aligned by the responses; all at temperature 0.7."""
    settings = SETTINGS[name]
    trainer = built(policy_path, tmp_path, another(policy_path), packing=packing, **settings)
    found, gradients, output = update(trainer)
    assert trainer.packing is None if packing == "off" else trainer.packing.packed_tokens
    assert output["teacher_prompt_ids"].shape[1] > output["prompt_ids"].shape[1]
    policy = perturbed(AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64), seed=1, scale=0.02)
    expected = plain_loss(name, settings, policy, another(policy_path), trainer.processing_class, output)
    expected.backward()
    assert found == pytest.approx(expected.item(), abs=1e-11)
    for parameter, weight in policy.named_parameters():
        torch.testing.assert_close(gradients[parameter], weight.grad, rtol=0, atol=1e-11)
    assert all(weight.grad is None for weight in trainer.teacher.model.parameters())
    logged = trainer._metrics["train"]["divergence"][-1]
    if name == "reverse":
        assert logged == pytest.approx(found)


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_learned_from_a_teacher_that_is_the_policy(name, policy_path, tmp_path):
    teacher = perturbed(AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64), seed=1, scale=0.02)
    trainer = built(policy_path, tmp_path, teacher, **SETTINGS[name], teacher_prompt=None)
    assert max(gradient.abs().max().item() for gradient in update(trainer)[1].values()) < 1e-12


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_is_the_same_however_the_batch_is_split(name, policy_path, tmp_path):
    splits = []
    for size in (8, 2):
        spec = specification(
            policy_path, **SETTINGS[name], per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
        )
        given = {"teacher_model": another(policy_path), "reward_funcs": None}
        trainer = train(spec, str(tmp_path / str(size)), train_dataset=Dataset.from_list(rows()), **given)
        splits.append({n: p.detach() for n, p in trainer.model.named_parameters()})
    assert largest_difference(*splits) < 1e-11


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(policy_path, tmp_path):
    """With a teacher by its name, a prompt of its own, and rewards that are only logged."""
    specs = {}
    for size in (8, 4):
        teaching = {"teacher_model_name_or_path": policy_path, "teacher_prompt": f"{__file__}:with_hint", "beta": 0.3}
        specs[size] = specification(policy_path, **teaching, per_device_train_batch_size=size)
    whole = result(train(specs[8], str(tmp_path / "whole")))
    (spread,) = train_in_processes([specs[4]], 2, tmp_path)
    assert largest_difference(spread.parameters, whole.parameters) < 1e-11
    for name in ("divergence", "reward"):
        assert spread.logs[0][name] == pytest.approx(whole.logs[0][name]) != 0


@pytest.mark.parametrize("kind", ["base", "adapter"])
@pytest.mark.parametrize("divergence", ["full", "sampled_token"])
def test_a_teacher_on_the_policys_base_needs_no_copy(kind, divergence, policy_path, tmp_path):
    """It scores as a copy does, only the policy's own adapter gets a gradient, and no file holds the teacher's."""
    teacher, copy = policy_path, AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    if kind == "adapter":
        torch.manual_seed(5)
        # With the dropout of the teacher's own training, which it must not draw.
        lora = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
        lora.init_lora_weights = False
        copy = PeftModel(copy, lora)
        copy.save_pretrained(tmp_path / "teacher")
        teacher = str(tmp_path / "teacher")
    results = []
    for given in (teacher, copy.merge_and_unload() if kind == "adapter" else copy):
        trainer = built(
            policy_path,
            tmp_path / "run",
            given,
            spec={"lora": True, "perturb": None},
            divergence=divergence,
            gradient_checkpointing=True,
        )
        results.append(update(trainer))
        assert trainer.teacher.is_policy == isinstance(given, str)
        assert all(".default." in name for name in results[-1][1])
        assert all((".default." in n) == p.requires_grad for n, p in trainer.model.named_parameters())
        if isinstance(given, str):
            trainer.save_model(str(tmp_path / "saved"))
            assert not (tmp_path / "saved" / "teacher").exists()
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-11)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("divergence", ["full", "sampled_token"])
def test_rewards_are_only_logged(divergence, policy_path, tmp_path):
    """A NaN does not skip the update, and no metric passes rewards off as advantages."""
    trainer = built(policy_path, tmp_path, another(policy_path), divergence=divergence)
    trainer.reward_funcs[0] = trainer.reward_guard.wrap(lambda completions, **_: [float("nan"), *[1.0] * 7])
    output = trainer._generate_and_score_completions(rows())
    metrics = trainer._metrics["train"]
    assert trainer.reward_guard.not_finite == {0} and not output["bad_reward"].any()
    if divergence == "full":
        assert "advantages/mean" not in metrics
    else:
        mask = output["completion_mask"]
        means = (output["advantages"] * mask).sum(1) / mask.sum(1)
        assert metrics["advantages/max"] == pytest.approx([means.max().item()])


def test_the_policy_itself_teaches_with_a_hint(policy_path, tmp_path):
    trainer = built(policy_path, tmp_path, None, teacher_prompt=f"{__file__}:with_hint")
    loss, gradients, output = update(trainer)
    assert trainer.teacher.is_policy and loss > 0 and any(g.abs().max() > 0 for g in gradients.values())
    texts = trainer.processing_class.batch_decode(output["teacher_prompt_ids"][:2])
    assert all("hint: the cat" in text or "hint: a mat" in text for text in texts)


def with_hint(row: dict) -> list[dict]:
    return [{"role": "user", "content": "hint: " + row["prompt"][0]["content"]}]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"beta": 0.5, "divergence": "sampled_token"}, "estimates the reverse KL"),
        ({"beta": 1.5}, "beta must lie in"),
        ({"surrogate": "clip"}, "it is for --divergence sampled_token"),
        ({"advantage": "leave_one_out"}, "the teacher takes the place of rewards"),
        ({"kl_in": "reward"}, "there is no KL term"),
    ],
)
def test_settings_that_are_refused(settings, expected, tmp_path):
    with pytest.raises(ValueError, match=expected):
        DistillationConfig(str(tmp_path), report_to=[], **settings)


def test_teachers_that_are_refused(policy_path, tmp_path):
    with pytest.raises(ValueError, match="no teacher: give --teacher_model_name_or_path"):
        built(policy_path, tmp_path, None, teacher_prompt=None)
    with pytest.raises(ValueError, match="'hunt' is no column of the training data"):
        built(policy_path, tmp_path, None, teacher_prompt="hunt")
    with pytest.raises(ValueError, match="the teacher toy reads other tokens than the policy"):
        built(policy_path, tmp_path, "toy")
    with pytest.raises(ValueError, match="the teacher runs/nothing could not be loaded: no model folder"):
        built(policy_path, tmp_path, "runs/nothing")
    # A prompt of its own that is too long is refused, not cut.
    with pytest.raises(ValueError, match="the model's context holds"):
        built(policy_path, tmp_path, None, teacher_prompt=f"{__file__}:endless")


def endless(row: dict) -> list[dict]:
    return [{"role": "user", "content": "on " * 1500}]
