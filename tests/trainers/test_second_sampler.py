"""Pairs of the policy and a second sampler: what is sampled, XPO and Nash-MD in a trainer, and what is refused."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.rollout_once import evens, initial_model, online_preference_specification, train
from tests.support.tiny import response_log_prob
from tests.support.train_once import largest_difference, parameters, relative_difference, result
from tests.trainers.test_online_preference_judges import Shorter
from trl_ext import OnlinePreferenceConfig
from trl_ext.trainers.online_preference.judge_rewards import JudgeRewards

pytestmark = pytest.mark.usefixtures("in_float64")


class Recorder:
    """A reward function that keeps what it is given."""

    __name__ = "evens"

    def __init__(self):
        self.responses: list[tuple[list, list[int], float]] = []

    def __call__(self, prompts, completion_ids, **_):
        rewards = evens(completion_ids)
        self.responses += zip(prompts, completion_ids, rewards, strict=True)
        return rewards


# ---- Sampling ----


@torch.no_grad()
def greedy(models: list[tuple], prompt: list[int], length: int, ends: list[int]) -> list[int]:
    """The likeliest tokens under a geometric mixture, without a cache and one prompt at a time."""
    ids = list(prompt)
    while len(ids) < len(prompt) + length and ids[-1] not in ends:
        ids.append(sum(w * model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for w, model in models).argmax())
    return [int(token) for token in ids[len(prompt) :]]


@pytest.mark.parametrize(
    ("loss", "weight", "fast", "lora"),
    [
        ("xpo", 1.0, "auto", False),
        ("xpo", 1.0, "auto", True),
        ("xpo", 1.0, "off", True),
        ("nash_md", 0.8, "auto", False),
        ("nash_md", 0.6, "auto", True),
    ],
)
def test_second_half_of_each_group_is_the_second_samplers(loss, weight, fast, lora, policy_path, tmp_path):
    """The likeliest tokens, of prompts of several lengths: the policy's, and those of the reference or the mixture."""
    recorder, own = Recorder(), {} if loss == "xpo" else {"mixture_weight": weight}
    spec = online_preference_specification(
        policy_path, loss=loss, temperature=1e-4, fast_rollouts=fast, learning_rate=0.0, **own
    )
    spec = {**spec, "fixed": False, "lora": lora, "prompts": 4}
    if lora:
        del spec["perturb"]
    trainer = train(spec, str(tmp_path), reward_funcs=[recorder])
    sampler = trainer.sampler
    assert (sampler is None) == (fast == "off")
    assert sampler is None or "generate" in vars(sampler.model), "the fast sampler is in place again"
    policy = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model)).eval()
    reference = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64).eval()
    tokenizer, different = AutoTokenizer.from_pretrained(policy_path), 0
    for place, (prompt, response, _) in enumerate(recorder.responses):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        args = tokenizer(text)["input_ids"], 8, trainer.eos_token_ids
        plain = greedy([(1.0, policy)], *args)
        expected = greedy([(1 - weight, policy), (weight, reference)], *args) if place % 4 > 1 else plain
        assert response == expected
        different += expected != plain
    assert different, "the second sampler says something else"


# ---- Loss and gradient ----


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("loss", ["xpo", "nash_md"])
def test_loss_and_gradient(loss, accumulation, policy_path, tmp_path):
    """One step of SGD at learning rate 1 on sampled responses, against log-probabilities without padding.

    With policies P and Q of two responses each, four pairs a prompt. Nash-MD keeps ties, at one half.
    """
    recorder = Recorder()
    split = {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}
    options = {"loss_kwargs": {"alpha": 0.2}} if loss == "xpo" else {"beta": 0.3}
    spec = {**online_preference_specification(policy_path, loss=loss, **split, **options), "fixed": False}
    run = result(train(spec, str(tmp_path), reward_funcs=[recorder]))
    model = initial_model(policy_path).double()
    reference = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    losses, won, log_ratios, tokens = [], [], [], 0
    for start in range(0, 16, 4):
        group = []
        for prompt, response, reward in recorder.responses[start : start + 4]:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text)["input_ids"]
            with torch.no_grad():
                ref = response_log_prob(reference, ids, response)
            group.append((response_log_prob(model, ids, response), ref, reward, len(response)))
        for (own, own_ref, reward, length), (other, other_ref, other_reward, _) in itertools.product(
            group[:2], group[2:]
        ):
            probability = 0.5 + 0.5 * ((reward > other_reward) - (reward < other_reward))
            if loss == "nash_md":
                losses.append(-(probability - 0.5 - 0.3 * (own - own_ref).item()) * own)
            elif probability != 0.5:
                margin = (own - own_ref - other + other_ref) * (1 if probability == 1 else -1)
                losses.append(torch.log1p(torch.exp(-0.1 * margin)) + 0.2 * other)
            else:
                continue
            won.append(probability)
            log_ratios.append((own - own_ref).item())
            tokens += length
    value = sum(losses) / len(losses)
    value.backward()
    assert len(set(won)) == (3 if loss == "nash_md" else 2), "wins and losses, and ties for Nash-MD"
    start = dict(initial_model(policy_path).named_parameters())
    moved = torch.cat([(start[n].detach() - run.parameters[n]).flatten() for n in start]).double()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert relative_difference(moved, gradient) < 1e-9
    assert run.losses == pytest.approx([value.item()], rel=1e-8)
    assert run.logs[0]["pairs/win_rate"] == pytest.approx(sum(won) / len(won), rel=1e-8)
    assert run.logs[0]["kl"] == pytest.approx(sum(log_ratios) / tokens, rel=1e-8), "of the policy's responses alone"


def test_a_judge_gives_the_probability(policy_path, tmp_path, monkeypatch):
    """The share of its comparisons with the second sampler's two responses that a response wins."""
    lengths, rewards = [], JudgeRewards.__call__

    def recording(self, prompts, completions, **given):
        lengths.extend(len(completion[-1]["content"]) for completion in completions)
        return rewards(self, prompts, completions, **{**given, "finished": None})

    monkeypatch.setattr(JudgeRewards, "__call__", recording)
    spec = online_preference_specification(policy_path, loss="nash_md", max_completion_length=24)
    trainer = train(spec, str(tmp_path), reward_funcs=None, judge=Shorter())
    shares = [
        sum((lengths[own] < lengths[other]) + 0.5 * (lengths[own] == lengths[other]) for other in others) / 2
        for start in range(0, 16, 4)
        for own, others in itertools.product((start, start + 1), [(start + 2, start + 3)])
    ]
    found = torch.cat([batch["win_probability"] for batch in trainer._buffered_inputs])
    assert sorted(found.tolist()) == sorted(share for share in shares for _ in range(2))


@pytest.mark.parametrize("loss", ["xpo", "nash_md"])
def test_resumes_as_it_would_have_gone_on(loss, policy_path, tmp_path):
    """XPO with a replay, whose pairs remember which response was the reference's."""
    replay = {"replay_capacity": 100, "replay_max_age": 2} if loss == "xpo" else {}
    steps = {"max_steps": 4, "learning_rate": 0.02, "save_strategy": "steps", "save_steps": 2, **replay}
    spec = {**online_preference_specification(policy_path, loss=loss, **steps), "fixed": False, "prompts": 16}
    spec["args"]["output_dir"] = str(tmp_path)
    straight = train(spec, str(tmp_path))
    resumed = train({**spec, "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}, str(tmp_path))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0
    if replay:
        assert list(map(repr, resumed.replay.pairs)) == list(map(repr, straight.replay.pairs))
        assert {pair.second_is_chosen for pair in resumed.replay.pairs} == {0.0, 1.0}


# ---- What is refused ----

WRONG = {
    "loss xpo and second_sampler mixture contradict each other": {"loss": "xpo", "second_sampler": "mixture"},
    "loss nash_md and second_sampler policy contradict": {"loss": "nash_md", "second_sampler": "policy"},
    "second_sampler must be one of policy, reference, mixture": {"second_sampler": "base"},
    "pairs is not used .* paired with each of the policy's": {"loss": "xpo", "pairs": "all"},
    "use_vllm is not used .* a second sampler needs transformers": {"loss": "xpo", "use_vllm": True},
    "sync_ref_model is not used": {"second_sampler": "reference", "sync_ref_model": True},
    "replay_weights is not used": {"loss": "xpo", "replay_capacity": 8, "replay_weights": "sequence"},
    "mixture_weight is not used .* for second_sampler mixture": {"loss": "xpo", "mixture_weight": 0.2},
    "mixture_weight must lie in": {"loss": "nash_md", "mixture_weight": 1.5},
    "'simpo' has no reference for second_sampler reference": {"loss": "simpo", "second_sampler": "reference"},
    "'nash_md' trains one update on a rollout": {"loss": "nash_md", "num_iterations": 2},
    "'nash_md' trains one update .* no replay": {"loss": "nash_md", "replay_capacity": 8},
    "num_generations must be even, got 3": {"loss": "xpo", "num_generations": 3, "per_device_train_batch_size": 3},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_configuration(message, tmp_path):
    settings = {"per_device_train_batch_size": 8, "use_cpu": True, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        OnlinePreferenceConfig(str(tmp_path), **settings)


def test_description():
    args = OnlinePreferenceConfig("unused", loss="nash_md", per_device_train_batch_size=8, use_cpu=True)
    description = args.build_objective().describe()
    assert "pairs across" in description and "second_sampler mixture, mixture_weight 0.5" in description
