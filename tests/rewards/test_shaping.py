"""Reward shaping: values worked by hand, invariances, order, state, faults, and statistics over all processes."""

from __future__ import annotations

import json
import math

import pytest

from trl_ext.rewards import RewardEnsemble, ShapedReward, parse_shaping
from trl_ext.rewards.shaping import STEPS, innermost

REWARDS = [2.0, 1.0, 0.0, -1.0, 3.0]


def given(values):
    """A reward function that gives these values, whatever it is asked."""

    def fixed(prompts, completions, **columns):
        return list(values)[: len(completions)]

    return fixed


def shape(values, *steps, **columns) -> list[float | None]:
    count = len(values)
    return ShapedReward(given(values), steps)(["p"] * count, ["c"] * count, **columns)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # Mean 1; squares 1 + 0 + 1 + 4 + 4 = 10: deviations sqrt(2) of the population, sqrt(2.5) of the sample.
        ({"kind": "whiten", "ddof": 0}, [0.707107, 0, -0.707107, -1.414214, 1.414214]),
        ({"kind": "whiten", "ddof": 1}, [0.632456, 0, -0.632456, -1.264911, 1.264911]),
        ({"kind": "clip", "limit": 0.5}, [0.5, 0.5, 0, -0.5, 0.5]),
        ("center", [1, 0, -1, -2, 2]),
    ],
    ids=str,
)
def test_values_worked_by_hand(step, expected):
    assert shape(REWARDS, step) == pytest.approx(expected, abs=1e-6)


def test_running_mean():
    """Batches [1, 3], [5]: means of everything 2 and 3."""
    source = iter([[1.0, 3.0], [5.0]])
    shaped = ShapedReward(lambda prompts, completions: next(source), ["center"])
    assert shaped(["p"] * 2, ["c"] * 2) == [-1, 1]
    assert shaped(["p"], ["c"]) == [2]
    assert shaped.state_dict()["steps"] == [{"kind": "center", "count": 3.0, "mean": 3.0}]


def test_penalty_on_length():
    """Two tokens beyond three free ones cost 0.1 each."""
    length = {"kind": "length_penalty", "per_token": 0.1, "free": 3}
    assert shape([1.0] * 3, length, completion_ids=[[1] * 5, [1] * 3, []]) == pytest.approx([0.8, 1, 1])
    with pytest.raises(ValueError, match="length_penalty counts tokens, and the caller gives no completion_ids"):
        shape([1.0], length)


def test_the_order_is_the_one_given():
    """Clip to 1, then subtract 0.5: 0.5; subtract, then clip: 1."""
    clip, length = {"kind": "clip", "limit": 1}, {"kind": "length_penalty", "per_token": 0.5}
    assert shape([2.0], clip, length, completion_ids=[[7]]) == [0.5]
    assert shape([2.0], length, clip, completion_ids=[[7]]) == [1.0]
    shaped = ShapedReward(given([2.0]), [clip, length])
    assert shaped.__name__ == "fixed+clip+length_penalty"
    assert innermost(shaped).__name__ == "fixed"


def test_large_rewards_that_differ_by_little():
    """1e8 + {0, 1}: a sum of squares in doubles would lose the difference."""
    assert shape([1e8, 1e8 + 1], {"kind": "whiten", "ddof": 0}) == pytest.approx([-1, 1], abs=1e-6)


def test_no_reward_stays_none_and_faults_stay_faults():
    """The mean is that of 1 and 3; neither None nor what is not finite is in it."""
    shaped = shape([1.0, None, 3.0, math.nan, -math.inf], "center", {"kind": "clip", "limit": 5})
    assert shaped[:3] == [-1, None, 1]
    assert not math.isfinite(shaped[3]) and not math.isfinite(shaped[4])
    assert shape([None, None], {"kind": "whiten", "ddof": 1}) == [None, None]
    assert shape([2.0, 2.0], {"kind": "whiten", "ddof": 0}) == [0, 0]
    assert shape([2.0], {"kind": "whiten", "ddof": 1}) == [0]
    # The mean of seven equal doubles is not always that double.
    for equal in (1e8 / 3, 0.1):
        assert shape([equal] * 7, {"kind": "whiten", "ddof": 0}) == [0] * 7


def test_calibration_is_at_its_place():
    """References score 1 and 3. Clipped to 2 first they average 1.5, and 2 as they are."""
    clip = {"kind": "clip", "limit": 2}
    for steps, value, expected in ((["center_reference", clip], 2.0, 2.0), ([clip, "center_reference"], 1.5, 0.5)):
        scores = {"one": 1.0, "three": 3.0, "high": 9.0}
        shaped = ShapedReward(lambda prompts, completions, scores=scores: [scores[c] for c in completions], steps)
        assert shaped.needs_calibration
        with pytest.raises(ValueError, match="center_reference has no value"):
            shaped(["p"], ["high"])
        shaped.calibrate(["p", "p"], ["one", "three"])
        assert not shaped.needs_calibration
        assert shaped.state_dict()["steps"][steps.index("center_reference")]["value"] == value
        assert shaped(["p"], ["high"]) == [expected]
        resumed = ShapedReward(shaped.reward, steps)
        resumed.load_state_dict(shaped.state_dict())
        assert resumed(["p"], ["high"]) == [expected]


def test_calibration_leaves_running_statistics():
    """A running mean of nothing is 0: references of mean 2 stay so, and the first reward is its own mean."""
    shaped = ShapedReward(given([1.0, 3.0]), ["center", "center_reference"])
    shaped.calibrate(["p", "p"], ["c", "c"])
    assert shaped.state_dict()["steps"][0] == {"kind": "center", "count": 0, "mean": 0}
    assert shaped(["p"], ["c"]) == [-2]


def test_state_goes_on():
    """Two halves with the state between them give what one object gives, and JSON loses nothing of it."""
    batches = [[1.0, 2.5], [4.0, 0.1], [0.3]]

    def run(shaped, rewards):
        return shaped(["p"] * len(rewards), ["c"] * len(rewards), values=rewards)

    def fresh():
        return ShapedReward(lambda prompts, completions, values: values, ["center", {"kind": "clip", "limit": 9}])

    whole, first, second = fresh(), fresh(), fresh()
    expected = [run(whole, batch) for batch in batches]
    assert run(first, batches[0]) == expected[0]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [run(second, batch) for batch in batches[1:]] == expected[1:]
    other = ShapedReward(given([1.0]), ["center"])
    with pytest.raises(ValueError, match=r"of the shaping center\+clip, and this one is center"):
        other.load_state_dict(first.state_dict())


def test_what_it_wraps_is_told_everything_and_reports():
    """An ensemble behind a step: members' means are logged by the ensemble, its own before shaping by the wrapper."""
    logged, seen = {}, {}

    def one(prompts, completions, finished, column, log_metric=None, **rest):
        seen.update(finished=finished, column=column)
        return [2.0, 4.0]

    ensemble = RewardEnsemble([one, given([0.0, 2.0])])
    shaped = ShapedReward(ensemble, [{"kind": "clip", "limit": 1.5}])
    rewards = shaped(["p"] * 2, ["c"] * 2, finished=[True, False], column=[7, 8], log_metric=logged.__setitem__)
    assert rewards == [1.0, 1.5] and seen == {"finished": [True, False], "column": [7, 8]}
    assert logged["rewards/ensemble/mean"] == 2.0 and logged["rewards/one/mean"] == 3.0
    assert shaped.__name__ == "ensemble+clip"


def test_every_kind_and_its_settings():
    entries = [
        {"kind": "center", "count": 0.0, "mean": 0.0},
        {"kind": "center_reference", "value": None},
        {"kind": "whiten", "ddof": 1},
        {"kind": "clip", "limit": 5},
        {"kind": "length_penalty", "per_token": 0.01, "free": 20},
    ]
    steps = parse_shaping(json.dumps(["center", "center_reference", *entries[2:]]))
    assert [step.kind for step in steps] == [*STEPS]
    assert ShapedReward(given([1.0]), steps).state_dict()["steps"] == entries


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "reward_shaping: bad JSON"),
        ("[]", "give a list of steps"),
        ('["center", "clipp"]', "unknown kind 'clipp'; did you mean 'clip'"),
        ('[{"kind": "clip"}]', "clip: .*limit"),
        ('[{"kind": "clip", "limits": 5}]', "clip: .*limits"),
        ('[{"kind": "clip", "limit": 0}]', "clip: limit must be positive"),
        ('[{"kind": "whiten", "ddof": 2}]', "whiten: ddof must be 0 or 1"),
    ],
)
def test_settings_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_shaping(text)


def test_a_wrong_number_of_rewards_is_refused():
    with pytest.raises(ValueError, match="the reward returned 1 rewards for 2 completions"):
        ShapedReward(given([1.0]), ["center"])(["p"] * 2, ["c"] * 2)


# ---- Several processes ----


def test_a_process_whose_reward_fails_adds_nothing_to_the_sums(monkeypatch):
    """It takes part in the sums of the batch; a trainer does not score its rows one by one, which would be others."""
    from trl_ext.rewards import shaping

    calls = []
    monkeypatch.setattr(shaping, "_of_all_ranks", lambda numbers: calls.append(numbers) or [numbers])

    def fails(prompts, completions):
        raise KeyError("bad")

    shaped = ShapedReward(fails, ["center"])
    with pytest.raises(KeyError):
        shaped(["p"] * 3, ["c"] * 3)
    assert calls == [[]]
    assert shaped.scores_groups and not ShapedReward(fails, ["center_reference"]).scores_groups


PROCESS = """
import json
from accelerate import Accelerator
from trl_ext.rewards import ShapedReward
from trl_ext.rollouts import end_processes
state = Accelerator(cpu=True)
rewards = [[2.0, 1.0, 0.0], [-1.0, 3.0]][state.process_index]
def own(prompts, completions, **columns):
    return rewards
steps = [{"kind": "center"}, {"kind": "whiten", "ddof": 0}]
shaped = ShapedReward(own, steps)
found = shaped(["p"] * len(rewards), ["c"] * len(rewards))
def broken(prompts, completions, **columns):
    if state.process_index == 1:
        raise KeyError("no answer")
    return rewards
faulty = ShapedReward(broken, ["center"])
try:
    after = faulty(["p"] * len(rewards), ["c"] * len(rewards))
except KeyError:
    after = "raised"
equal = [1e8 / 3] * (4 if state.process_index else 3)
whitened = ShapedReward(lambda prompts, completions: equal, [steps[1]])(["p"] * len(equal), ["c"] * len(equal))
with open(f"rank{state.process_index}.json", "w") as file:
    json.dump([found, shaped.state_dict(), after, whitened], file)
end_processes(state)
"""


@pytest.mark.slow
def test_statistics_are_those_of_all_processes(tmp_path):
    """Three rewards here and two there whiten as the five together; an error on one process leaves none waiting."""
    from tests.support.train_once import in_processes

    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    in_processes(2, str(script), cwd=tmp_path)
    written = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    (first, state, after, equal), (second, other_state, other_after, others) = written
    assert [*first, *second] == pytest.approx([0.707107, 0, -0.707107, -1.414214, 1.414214], abs=1e-6)
    assert state == other_state and state["steps"][0]["mean"] == 1.0
    assert after == [1.0, 0.0, -1.0] and other_after == "raised"
    assert [*equal, *others] == [0] * 7
