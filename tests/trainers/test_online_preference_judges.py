"""Judges that rank an online trainer's responses: wins, failures, and groups that cannot be compared."""

from __future__ import annotations

import pytest
import torch

from tests.support.rollout_once import online_preference_specification, train
from tests.support.train_once import largest_difference, result
from trl_ext import OnlinePreferenceConfig, OnlinePreferenceTrainer
from trl_ext.evaluation.judging.protocol import JudgeError
from trl_ext.resilience.reward_guard import RewardError, RewardGuard
from trl_ext.trainers.online_preference.judge_rewards import JudgeRewards

pytestmark = pytest.mark.usefixtures("in_float64")


# ---- A judge ----


class Shorter:
    """Prefers the response of fewer characters."""

    sequential, identity = True, None

    def judge(self, prompt, response_a, response_b):
        if len(response_a) == len(response_b):
            return "tie"
        return "A" if len(response_a) < len(response_b) else "B"


def test_a_judge_ranks_as_the_reward_that_it_stands_for(policy_path, tmp_path):
    """Wins against the others of a group order its responses as their lengths do."""

    def shorter(completions, **_):
        return [-float(len(completion[0]["content"])) for completion in completions]

    spec = online_preference_specification(policy_path, max_completion_length=12)
    judged = result(train(spec, str(tmp_path), reward_funcs=None, judge=Shorter()))
    rewarded = result(train(spec, str(tmp_path), reward_funcs=[shorter]))
    assert judged.losses == rewarded.losses
    assert largest_difference(judged.parameters, rewarded.parameters) == 0
    assert judged.logs[0]["pairs/reward_margin"] > 0.5, "the best wins more than half of its comparisons"


def test_a_judge_of_the_order_prefers_no_response():
    config = OnlinePreferenceConfig("unused", per_device_train_batch_size=6, num_generations=3, use_cpu=True)
    function = JudgeRewards(lambda *_: "A", lambda: 3, config)
    assert function(prompts=["p"] * 3, completions=["c", "bad", "ab"]) == [0.5, 0.5, 0.5]


def test_what_the_judge_could_not_compare_has_no_reward():
    """Whatever another function, the first, gives for it."""
    trainer = OnlinePreferenceTrainer.__new__(OnlinePreferenceTrainer)
    trainer._has_judge, trainer.reward_weights = True, torch.tensor([1.0, 2.0])
    total = trainer._weighted_sum(torch.tensor([[1.0, 0.5], [1.0, float("nan")]]))
    assert total[0] == 2 and total[1].isnan()


class Failing:
    """Judges as `Shorter`, and raises `error` where the response "bad" is compared."""

    sequential, identity, name = True, None, "failing"

    def __init__(self, error: Exception):
        self.error, self.calls = error, 0

    def judge(self, prompt, response_a, response_b):
        self.calls += 1
        if "bad" in (response_a, response_b):
            raise self.error
        return Shorter.judge(self, prompt, response_a, response_b)


def guarded(error: Exception, mode: str, completions: list[str], **settings):
    """What a judge brings behind the trainer's guard: rewards, the guard, and the judge."""
    args = {"per_device_train_batch_size": 6, "num_generations": 3, "use_cpu": True, **settings}
    config = OnlinePreferenceConfig("unused", reward_errors=mode, **args)
    judge, guard = Failing(error), RewardGuard(mode)
    function = guard.wrap(JudgeRewards(judge, lambda: 3, config))
    return function(prompts=["p"] * len(completions), completions=completions), guard, judge


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("HTTP 401"), "'failing' failed on the prompt 'p': RuntimeError: HTTP 401"),
        (JudgeError("no verdict"), "'failing' failed on the prompt 'p': TooManyErrors: .* of 3 rows .*no verdict"),
    ],
)
def test_a_judge_that_fails_stops_the_run_with_its_own_error(error, message):
    with pytest.raises(RewardError, match=message):
        guarded(error, "raise", ["c", "bad", "ab"])


def test_a_judge_that_fails_where_errors_are_skipped(caplog):
    """What is no verdict leaves out the response that cannot be compared; another error leaves out all of the call, as
    one by itself cannot be compared. "c" is shorter than "ab", and wins.
    """
    rewards, guard, judge = guarded(JudgeError("no verdict"), "skip", ["c", "bad", "ab"])
    assert (rewards, guard.failed) == ([1.0, None, 0.0], set())
    rewards, guard, judge = guarded(RuntimeError("HTTP 401"), "skip", ["c", "ab", "e", "bad", "x", "yy"])
    assert (rewards, guard.failed) == ([None] * 6, set(range(6)))
    assert "'failing' failed on the prompt 'p': RuntimeError: HTTP 401" in caplog.text
    assert "IndexError" not in caplog.text
    assert judge.calls <= 12, "six pairs, in both orders, once"


def test_groups_that_would_be_divided_are_refused():
    """Evaluation batches of 6 on two processes are 12 responses, three groups of 4, of which the second is divided."""
    args = OnlinePreferenceConfig("unused", per_device_train_batch_size=4, use_cpu=True)
    args.per_device_eval_batch_size = 6
    JudgeRewards(Shorter(), lambda: 4, args)
    message = "6 responses per process do not divide into groups of 4: change per_device_eval_batch_size"
    args.eval_strategy = "steps"
    with pytest.raises(ValueError, match=message):
        JudgeRewards(Shorter(), lambda: 4, args)
    args.num_generations_eval = 3
    JudgeRewards(Shorter(), lambda: 4, args)
    # As on two processes: half of a group of 4 on each.
    args.per_device_train_batch_size = 2
    with pytest.raises(ValueError, match="2 responses per process do not divide into groups of 4"):
        JudgeRewards(Shorter(), lambda: 4, args)
