"""Evolution strategies: worked numbers, the update against its definition, and that parameters are restored."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.rollout_once import build, prompts, thirds, train, train_in_processes
from tests.support.train_once import largest_difference, parameters, result
from trl_ext import EvolutionConfig
from trl_ext.rewards import ShapedReward, parse_shaping
from trl_ext.trainers.evolution.trainer import noise_like, standardised

ARGS = {
    "num_generations": None,
    "population": 3,
    "perturbation": 0.02,
    "learning_rate": 0.5,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


def specification(policy_path, **args) -> dict:
    return {"trainer": "EvolutionTrainer", "model": policy_path, "args": {**ARGS, **args}, "dtype": "float32"}


def test_worked_update():
    noise = torch.tensor([[1, -1], [0.5, 0.2], [-1.2, 0.4], [0.3, -0.6]])
    weights = standardised(torch.tensor([1, 0, 0.5, 0.5]))
    assert weights.tolist() == pytest.approx([1.414214, -1.414214, 0, 0], abs=1e-6)
    update = (weights[:, None] * noise).mean(dim=0)
    assert update.tolist() == pytest.approx([0.176777, -0.424264], abs=1e-6)
    assert (torch.tensor([0.5, -0.2]) + 5e-4 * update).tolist() == pytest.approx([0.500088, -0.200212], abs=1e-6)


def test_members_without_a_reward_and_equal_ones():
    nan = math.nan
    assert standardised(torch.tensor([1.0, nan, 3.0])).tolist() == pytest.approx([-1, 0, 1], abs=1e-6)
    assert standardised(torch.tensor([0.3, 0.3, nan])).tolist() == [0, 0, 0]
    assert standardised(torch.tensor([nan, nan])).tolist() == [0, 0]


def test_equal_rewards_of_other_prompts_change_nothing(policy_path, tmp_path):
    """Rewards whose float32 sums depend on their order."""
    turn = iter(range(100))

    def reward(completions, **_):
        start = next(turn)
        return [((start + place) % 8 + 1) / 7 for place in range(len(completions))]

    trainer = build(specification(policy_path, max_steps=2), str(tmp_path), reward_funcs=reward)
    before = parameters(trainer)
    trainer.train()
    assert largest_difference(parameters(trainer), before) == 0 and not trainer._seen_signal


def test_evaluation_is_greedy(policy_path, tmp_path):
    trainer = build(specification(policy_path), str(tmp_path), reward_funcs=thirds)
    trainer.model.eval()
    responses = [trainer._generate_and_score_completions(prompts())["completion_ids"] for _ in range(2)]
    assert responses[0].equal(responses[1])


def test_parameters_of_one_shape_get_different_noise():
    generator, parameter = torch.Generator().manual_seed(0), torch.zeros(3, 4)
    assert not noise_like(parameter, generator).equal(noise_like(parameter, generator))


def test_an_update_is_that_of_its_definition(policy_path, tmp_path):
    """Perturbed copies answer greedily by transformers' own generate, and the update is summed in float64."""
    trainer = build(specification(policy_path, max_steps=1), str(tmp_path), reward_funcs=thirds)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    seen = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (seen.extend(inputs), generate(inputs))[1]
    trainer.train()
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    trainer.state.global_step, noises, rewards = 0, [], []
    for member in range(3):
        generator = trainer._generator(member)
        noises.append({name: noise_like(weight, generator) for name, weight in before.items()})
        copy = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32).eval()
        for name, weight in copy.named_parameters():
            weight.data = before[name] + 0.02 * noises[-1][name]
        responses = []
        for row in seen:
            ids = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            output = copy.generate(
                **ids, do_sample=False, max_new_tokens=8, eos_token_id=trainer.eos_token_ids, pad_token_id=0
            )
            responses.append(output[0, ids["input_ids"].shape[1] :].tolist())
        rewards.append(sum(thirds(responses)) / len(responses))
    assert len(set(rewards)) > 1
    logged = trainer.state.log_history[0]
    assert logged["population/best"] == pytest.approx(max(rewards)) and logged["reward"] == pytest.approx(
        sum(rewards) / 3
    )
    centred = [reward - sum(rewards) / 3 for reward in rewards]
    deviation = math.sqrt(sum(value**2 for value in centred) / 3)
    for name, weight in trainer.model.named_parameters():
        update = sum(value / deviation * noise[name].double() for value, noise in zip(centred, noises, strict=True))
        expected = before[name].double() + 0.5 / 3 * update
        torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_restored_exactly(dtype, policy_path, tmp_path):
    spec = {**specification(policy_path), "dtype": dtype}
    trainer = build(spec, str(tmp_path), reward_funcs=thirds)
    trainer.model.train()
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer._generate_and_score_completions(prompts())
    assert largest_difference(parameters(trainer), before) == 0
    assert trainer._metrics["train"]["population/std"][0] > 0


def test_only_an_adapter_is_perturbed_and_trained(policy_path, tmp_path):
    spec = {**specification(policy_path, max_steps=1), "lora": True}
    trainer = build(spec, str(tmp_path), reward_funcs=thirds)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not weight.equal(before[name])}
    assert moved == {name for name in before if "lora_" in name}


@pytest.mark.slow
def test_a_resumed_run_is_the_straight_one(policy_path, tmp_path):
    spec = specification(policy_path, save_strategy="steps", save_steps=2, max_steps=4)
    straight = train(spec, str(tmp_path / "straight"), reward_funcs=thirds)
    resumed = build(spec, str(tmp_path / "resumed"), reward_funcs=thirds)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0.0


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(policy_path, tmp_path):
    spec = {**specification(policy_path, max_steps=2), "rewards": ["thirds"]}
    whole = result(train(spec, str(tmp_path / "whole")))
    (parts,) = train_in_processes([{**spec, "args": {**spec["args"], "per_device_train_batch_size": 4}}], 2, tmp_path)
    assert largest_difference(parts.parameters, whole.parameters) < 2e-6


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"population": 1}, "population must be at least 2"),
        ({"perturbation": 0.0}, "perturbation must be positive"),
        ({"temperature": 0.5}, "responses are greedy"),
        ({"num_generations": 4}, "responses to a prompt are all the same"),
        ({"beta": 0.1}, "the rewards of the population alone"),
        ({"gradient_accumulation_steps": 2}, "its responses are one batch"),
    ],
)
def test_what_is_refused(settings, expected, tmp_path):
    with pytest.raises(ValueError, match=expected):
        EvolutionConfig(str(tmp_path), use_cpu=True, report_to="none", **settings)


def test_shaping_by_the_batch_is_refused(policy_path, tmp_path):
    with pytest.raises(ValueError, match="center and whiten would remove"):
        build(
            specification(policy_path),
            str(tmp_path),
            reward_funcs=ShapedReward(thirds, parse_shaping('[{"kind": "whiten", "ddof": 1}]')),
        )
