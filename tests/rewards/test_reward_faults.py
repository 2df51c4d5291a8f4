"""Reward functions and modules that fail: on which rows, in sampling, in greedy baselines and in evaluation."""

from __future__ import annotations

import asyncio
import statistics
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.reward_adapters import save_full_model
from tests.support.rollout_once import build, evens, prompts, thirds, train
from tests.support.train_once import entries
from tests.support.trl_private import logged_samples, score_rollout
from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
from trl_ext.resilience.reward_guard import RewardError, RewardGuard
from trl_ext.trainers.policy.reward_functions import reward_columns

NO_FAULT = {"reward": 0, "loss": 0, "gradient": 0}
NAN, INFINITY = float("nan"), float("inf")


def a_rollout(trainer) -> dict:
    """Eight scored responses to two prompts, as training makes them."""
    trainer.model.train()
    return score_rollout(trainer, [dict(row) for row in prompts(2) for _ in range(4)])


def as_async(function):
    async def later(**arguments):
        return function(**arguments)

    later.__name__ = function.__name__
    return later


# ---- Several functions ----


class OneBadResponse:
    """Two reward functions, `first` and `second`; the second one fails on the third of the latest eight responses."""

    def __init__(self, fault):
        self.fault = fault
        self.responses: list = []

    def first(self, completion_ids, **_):
        self.responses = list(completion_ids)
        return thirds(completion_ids)

    def second(self, completion_ids, **_):
        bad = [ids == self.responses[2] for ids in completion_ids]
        if any(bad) and self.fault == "raises":
            raise KeyError("no answer")
        return [self.fault if b else reward for b, reward in zip(bad, evens(completion_ids), strict=True)]

    def advantages(self) -> tuple[list[float], list[float]]:
        """Advantages where the third response is not there at all, and the totals of the seven others."""
        totals = [a + b for a, b in zip(thirds(self.responses), evens(self.responses), strict=True)]
        groups = [[totals[i] for i in (0, 1, 3)], totals[4:]]
        normalized = [
            [(x - statistics.fmean(group)) / (statistics.pstdev(group) + 1e-6) for x in group] for group in groups
        ]
        return [*normalized[0][:2], 0.0, normalized[0][2], *normalized[1]], [*groups[0], *groups[1]]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fault", [NAN, INFINITY], ids=str)
def test_a_response_that_one_of_two_functions_fails_on_has_no_reward(fault, is_async, policy_path, tmp_path):
    """Not what the other function gives it, which would pass for a low reward; an update on NaN is skipped as well."""
    functions = OneBadResponse(fault)
    second = as_async(functions.second) if is_async else functions.second
    spec = {"model": policy_path, "fixed": True, "args": {"reward_errors": "skip", "beta": 0.0}}
    trainer = train(spec, str(tmp_path), reward_funcs=[functions.first, second])
    expected, totals = functions.advantages()
    assert list(logged_samples(trainer)["advantages"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert min(abs(advantage) for advantage in expected[:2]) > 0.01
    (entry,) = entries(trainer)
    assert (entry["unscorable"], entry["reward_errors"]) == (1 / 8, 0.0)
    assert entry["reward"] == pytest.approx(statistics.fmean(totals), rel=1e-5)
    assert (entry["reward_min"], entry["reward_max"]) == pytest.approx((min(totals), max(totals)), rel=1e-6)
    assert trainer.update_guard.skipped == {**NO_FAULT, "reward": 1}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_calls_of_a_function_that_fails(mode, is_async, caplog):
    """It is called once, and its error is told with the rows of the call and its line."""
    seen = []

    def judge(prompts, **_):
        seen.append(len(prompts))
        raise KeyError("no answer")

    guard = RewardGuard(mode)
    guarded = guard.wrap(as_async(judge) if is_async else judge)
    arguments = {"prompts": ["p"] * 64, "row_id": [f"row{index // 2}" for index in range(64)]}

    def call():
        return asyncio.run(guarded(**arguments)) if is_async else guarded(**arguments)

    if mode == "raise":
        with pytest.raises(RewardError) as caught:
            call()
        message = str(caught.value)
    else:
        assert (call(), guard.failed) == ([None] * 64, set(range(64)))
        (message,) = [record.message for record in caplog.records]
        assert "all 64 responses of the call" in message
    assert message.startswith("the reward function 'judge' failed on row_id 'row0', row_id 'row1', row_id 'row2', ")
    assert "...: KeyError: 'no answer' (test_reward_faults.py, line " in message
    assert seen == [64]


def test_where_errors_are_skipped_a_failed_call_trains_nothing(policy_path, tmp_path):
    """Whatever the function beside it gives its responses; the update has no signal and does not fail."""
    functions = OneBadResponse("raises")
    spec = {"model": policy_path, "fixed": True, "args": {"reward_errors": "skip", "beta": 0.0}}
    trainer = train(spec, str(tmp_path), reward_funcs=[functions.first, functions.second])
    assert list(logged_samples(trainer)["advantages"]) == [0.0] * 8
    (entry,) = entries(trainer)
    assert (entry["unscorable"], entry["reward_errors"]) == (1.0, 8.0)
    assert trainer.update_guard.skipped == NO_FAULT


# ---- Greedy baselines ----


def test_a_greedy_reward_that_is_not_finite_is_a_fault_of_its_whole_group(policy_path, tmp_path):
    """Two greedy responses after eight sampled ones, the second NaN; of the sampled ones, the third."""

    def reward(completion_ids, **_):
        rewards = thirds(completion_ids)
        rewards[1 if len(rewards) == 2 else 2] = NAN
        return rewards

    args = {"algorithm": "remax", "beta": 0.0}
    trainer = build({"model": policy_path, "args": args}, str(tmp_path), reward_funcs=[reward])
    assert a_rollout(trainer)["bad_reward"].tolist() == [False, False, True, False, True, True, True, True]


# ---- Evaluation ----


def fails_on_the_second(prompts, completions, row_id, **_):
    if "row1" in row_id:
        raise KeyError("no answer")
    return [float(len(completion[0]["content"])) for completion in completions]


def not_finite(completions, row_id, **_):
    bad = {"row0": NAN, "row2": -INFINITY}
    return [bad.get(row, float(len(c[0]["content"]))) for row, c in zip(row_id, completions, strict=True)]


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_a_comparison_with_the_base_goes_on_or_says_where_it_failed(mode, policy_path, tmp_path):
    """Means are of the rows that have a reward; the token ids are those that were generated, and not re-encoded."""
    seen = {}

    def tokens(completion_ids, row_id, **_):
        seen.update(zip(row_id, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    functions = [tokens, fails_on_the_second, not_finite]
    spec = {"model": policy_path, "perturb": 1, "args": {"reward_errors": mode}}
    trainer = build(spec, str(tmp_path), reward_funcs=functions)
    rows = [{**row, "prompt_text": row["prompt"][0]["content"]} for row in prompts(3)]
    settings = GenerationSettings(max_prompt_tokens=None, max_new_tokens=8, batch_size=4)
    evaluation = GenerationEvaluation(trainer, rows, settings, reward_columns=partial(reward_columns, trainer))
    if mode == "raise":
        with pytest.raises(RewardError, match="failed on row_id 'row0', row_id 'row1'"):
            evaluation.compare()
        return
    comparison = evaluation.compare()
    assert all(row["reward/fails_on_the_second"] is None for row in comparison.rows)
    assert [row["reward/not_finite"] is None for row in comparison.rows] == [True, False, True]
    for name in ("not_finite", "tokens"):
        known = [row[f"reward/{name}"] for row in comparison.rows if row[f"reward/{name}"] is not None]
        assert comparison.summary["rewards"][name]["policy"] == pytest.approx(statistics.fmean(known))
    assert [row["reward/tokens"] for row in comparison.rows] == [
        float(row["generated_num_tokens"]) for row in comparison.rows
    ]


# ---- After a stop ----


def test_under_deepspeed_a_bad_reward_stops_the_run_at_once(policy_path, tmp_path):
    """Its engine takes the step inside the backward pass, and skips for itself what is not finite in the gradient."""
    trainer = build({"model": policy_path}, str(tmp_path))
    guard, loss = trainer.update_guard, torch.tensor(0.5)
    trainer.is_deepspeed_enabled = True
    guard.observe_loss(loss)
    guard.observe_reward(torch.tensor(False))
    guard.observe_loss(loss * NAN)
    with pytest.raises(FloatingPointError, match="a reward at step 0 was not finite, and DeepSpeed cannot skip"):
        guard.observe_reward(torch.tensor(True))


# ---- Modules ----


@pytest.mark.parametrize("value", [INFINITY, NAN])
@pytest.mark.parametrize("beside", [False, True])
def test_a_module_whose_score_is_not_finite_skips_the_update(beside, value, policy_path, tmp_path):
    """TRL scores modules itself, so that no wrapper sees them; of 8 responses the fourth has no reward."""
    folder = save_full_model(policy_path, tmp_path / "module")
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)

    def spoil(_module, _arguments, output):
        output.logits[3] = value

    # The model is one of two functions, and columns of the rewards go by their order.
    functions = [thirds, module] if beside else [module]
    spec = {"model": policy_path, "args": {"beta": 0.0, "max_steps": 2}}
    trainer = build(spec, str(tmp_path / "run"), reward_funcs=functions)
    assert a_rollout(trainer)["bad_reward"].tolist() == [False] * 8
    module.register_forward_hook(spoil)
    output = a_rollout(trainer)
    assert output["bad_reward"].tolist() == [False, False, False, True, False, False, False, False]
    assert output["advantages"].isfinite().all() and output["advantages"][3] == 0
    assert trainer.rewards.by_function[3].isnan().all()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.update_guard.skipped == {**NO_FAULT, "reward": 2}
    assert all(torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))
    # The first entry holds the two rollouts before training as well.
    assert entries(trainer)[1]["unscorable"] == 1 / 8
