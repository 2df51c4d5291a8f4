"""A curriculum: how prompts are drawn, and that runs with one resume and split exactly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.support.rollout_once import build, evens, prompts, train, train_in_processes
from tests.support.train_once import largest_difference, parameters, result
from tests.trainers.test_resampling import GROUP, PROMPTS
from trl_ext.resilience.faults import TrainingFault
from trl_ext.trainers.policy.curriculum import draw_prompts

pytestmark = pytest.mark.usefixtures("in_float64")

ARGS = {
    "per_device_train_batch_size": 3 * GROUP,
    "num_generations": GROUP,
    "curriculum": f"{__file__}:spread",
    "shuffle_dataset": True,
}


def spread(rewards: torch.Tensor) -> float:
    """The variance of a group, which is what its gradient comes from."""
    return rewards.var().item()


def negative(rewards: torch.Tensor) -> float:
    return -1.0


def only_row5(completion_ids, row_id, **_) -> list[float]:
    """Rewards that differ within a group for row5 alone."""
    return [float(place) * (row == "row5") for place, row in enumerate(row_id)]


def specification(policy_path, **args) -> dict:
    return {"model": policy_path, "perturb": 1, "prompts": PROMPTS, "args": {**ARGS, **args}}


# ---- Draws ----


def test_prompts_are_drawn_in_proportion():
    """One draw of weights 1, 2 and an unknown, which counts as their mean; and no prompt twice."""
    random, count = np.random.default_rng(0), 6000
    found = Counter(draw_prompts([1.0, 2.0, None, 0.0], 1, random)[0] for _ in range(count))
    expected = [count * weight / 4 for weight in (1, 2, 1)]
    assert found[3] == 0
    # The 99.9th percentile of chi-square with two degrees of freedom.
    assert sum((found[i] - expected[i]) ** 2 / expected[i] for i in range(3)) < 13.8
    pairs = Counter(tuple(draw_prompts([1.0, 2.0, 3.0], 2, random)) for _ in range(count))
    # The second in proportion to what is left: P(2 then 1) = 3/6 * 2/3.
    assert pairs[2, 1] / count == pytest.approx(1 / 3, abs=0.025)
    assert all(first != second for first, second in pairs)


def test_prompts_without_weight_come_last():
    random = np.random.default_rng(1)
    assert draw_prompts([0.0, 1.0, 0.0, 2.0], 2, random) in ([1, 3], [3, 1])
    assert sorted(draw_prompts([0.0, 1.0, 0.0, 2.0], 4, random)[2:]) == [0, 2]
    # More than there are, and all of weight 0.
    assert Counter(draw_prompts([0.0, 0.0], 4, random)) == {0: 2, 1: 2}
    assert sorted(draw_prompts([None] * 3, 3, random)) == [0, 1, 2]


# ---- In a trainer ----


def test_what_has_a_signal_is_drawn_again(policy_path, tmp_path):
    """Every prompt is seen before those that taught nothing come again, and row5 is in each later rollout."""
    trainer = train(specification(policy_path, max_steps=8), str(tmp_path), reward_funcs=only_row5)
    assert [index for index, weight in enumerate(trainer.curriculum.weights) if weight] == [5]
    logged = [entry for entry in trainer.state.log_history if "curriculum/seen" in entry]
    seen = [entry["curriculum/seen"] for entry in logged]
    assert seen[0] == pytest.approx(3 / PROMPTS) and seen == sorted(seen)
    found = [entry["reward_std"] > 0 for entry in logged]
    assert all(found[found.index(True) :])


def test_columns_and_raw_rewards(policy_path, tmp_path):
    """Reward functions see the drawn rows, and weights follow from rewards before the penalties."""
    seen, by_row = [], {row["row_id"]: row for row in prompts(PROMPTS)}

    def reward(prompts, completion_ids, row_id, bonus, **_):
        assert [by_row[row]["prompt"] for row in row_id] == prompts
        assert [by_row[row]["bonus"] for row in row_id] == bonus
        seen.append([int(row[3:]) for row in row_id[::GROUP]])
        return evens(completion_ids)

    spec = specification(policy_path, missing_eos_penalty=5.0, max_steps=1)
    trainer = train(spec, str(tmp_path), reward_funcs=reward)
    rewards = trainer._rollout[0][:, 0].view(-1, GROUP)
    assert [trainer.curriculum.weights[index] for index in seen[-1]] == [spread(group) for group in rewards]
    assert trainer.curriculum.weights.count(None) == PROMPTS - 3


def test_rewards_that_are_missing(policy_path, tmp_path):
    """The function gets the others, and a prompt without any keeps its weight."""

    def reward(completion_ids, **_):
        rewards = evens(completion_ids)
        return [None if place == 0 or place >= 2 * GROUP else reward for place, reward in enumerate(rewards)]

    trainer = train(specification(policy_path, max_steps=1), str(tmp_path), reward_funcs=reward)
    rewards = trainer._rollout[0][:, 0].view(-1, GROUP)
    known = [weight for weight in trainer.curriculum.weights if weight is not None]
    assert sorted(known) == sorted([spread(rewards[0, 1:]), spread(rewards[1])])


def test_draws_are_made_once_for_a_rollout(policy_path, tmp_path, monkeypatch):
    from trl_ext.trainers.policy import curriculum

    drawn = []
    monkeypatch.setattr(curriculum, "draw_prompts", lambda *args: drawn.append(draw_prompts(*args)) or drawn[-1])
    args = {"num_iterations": 2, "per_device_train_batch_size": GROUP, "generation_batch_size": 3 * GROUP}
    trainer = train(specification(policy_path, max_steps=12, **args), str(tmp_path), reward_funcs=evens)
    assert len(drawn) == trainer.rollouts == 2


@pytest.mark.slow
def test_a_resumed_run_is_the_straight_one(policy_path, tmp_path):
    args = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 0.001}
    spec = specification(policy_path, **args)
    straight = train(spec, str(tmp_path / "straight"), reward_funcs=evens)
    resumed = build(spec, str(tmp_path / "resumed"), reward_funcs=evens)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0.0
    assert resumed.curriculum.weights == straight.curriculum.weights


@pytest.mark.slow
def test_two_processes_draw_as_one(policy_path, tmp_path):
    spec = {**specification(policy_path, max_steps=3, learning_rate=0.01), "rewards": ["evens"], "fixed": True}
    whole = result(train(spec, str(tmp_path / "whole")))
    spec = {**spec, "args": {**spec["args"], "per_device_train_batch_size": 3 * GROUP // 2}}
    (parts,) = train_in_processes([spec], 2, tmp_path)
    assert largest_difference(parts.parameters, whole.parameters) < 1e-11
    names = ("reward", "curriculum/seen")
    assert [[e[n] for n in names] for e in parts.logs] == [pytest.approx([e[n] for n in names]) for e in whole.logs]


def test_what_is_refused(policy_path, tmp_path):
    with pytest.raises(ValueError, match="both choose the prompts of a rollout"):
        build(specification(policy_path, resample_groups=1), str(tmp_path), reward_funcs=evens)
    with pytest.raises(ValueError, match="has no curriculum 'spred'"):
        build(specification(policy_path, curriculum=f"{__file__}:spred"), str(tmp_path), reward_funcs=evens)
    with pytest.raises(TrainingFault, match="negative must give a weight of 0 or more, and gave -1 for the rewards"):
        train(specification(policy_path, curriculum=f"{__file__}:negative"), str(tmp_path), reward_funcs=evens)
