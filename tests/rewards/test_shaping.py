"""Reward shaping: values worked by hand, order, calibration and faults."""

from __future__ import annotations

import math

import pytest

from trl_ext.rewards import RewardEnsemble, ShapedReward, parse_shaping
from trl_ext.rewards.shaping import innermost


def given(values):
    """A reward function that gives these values, whatever it is asked."""

    def fixed(prompts, completions, **columns):
        return list(values)[: len(completions)]

    return fixed


def test_clipping_and_faults():
    """No reward stays none, and what is not finite is neither clipped nor hidden."""
    shaped = ShapedReward(given([2.0, 0.25, None, -1.0, math.nan, -math.inf]), [{"kind": "clip", "limit": 0.5}])
    rewards = shaped(["p"] * 6, ["c"] * 6)
    assert rewards[:4] == [0.5, 0.25, None, -0.5]
    assert not math.isfinite(rewards[4]) and not math.isfinite(rewards[5])
    with pytest.raises(ValueError, match="the reward returned 1 rewards for 2 completions"):
        ShapedReward(given([1.0]), ["center_reference"]).calibrate(["p"] * 2, ["c"] * 2)


def test_calibration_is_at_its_place():
    """References score 1 and 3. Clipped to 2 first they average 1.5, and 2 as they are."""
    clip = {"kind": "clip", "limit": 2}
    for steps, value, expected in ((["center_reference", clip], 2.0, 2.0), ([clip, "center_reference"], 1.5, 0.5)):
        scores = {"one": 1.0, "three": 3.0, "none": None, "high": 9.0}
        shaped = ShapedReward(lambda prompts, completions, scores=scores: [scores[c] for c in completions], steps)
        assert shaped.needs_calibration
        with pytest.raises(ValueError, match="center_reference has no value"):
            shaped(["p"], ["high"])
        shaped.calibrate(["p"] * 3, ["one", "none", "three"])
        assert not shaped.needs_calibration
        centre = {"kind": "center_reference", "value": value}
        assert shaped.to_dict()["steps"] == [clip if step == clip else centre for step in steps]
        assert shaped(["p"], ["high"]) == [expected]


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
    assert shaped.__name__ == "ensemble+clip" and innermost(shaped) is ensemble
    both = ShapedReward(ensemble, parse_shaping('["center_reference", {"kind": "clip", "limit": 1.5}]'))
    assert both.__name__ == "ensemble+center_reference+clip" and both.needs_calibration


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "reward_shaping: bad JSON"),
        ("[]", "give a list of steps"),
        ('["center_reference", "clipp"]', "unknown kind 'clipp'; did you mean 'clip'"),
        ('["clip"]', "clip: .*limit"),
        ('[{"kind": "clip", "limits": 5}]', "clip: .*limits"),
        ('[{"kind": "clip", "limit": 0}]', "clip: .* positive limit"),
        ('[{"kind": "center_reference", "value": 1}]', "center_reference has none"),
    ],
)
def test_settings_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_shaping(text)
