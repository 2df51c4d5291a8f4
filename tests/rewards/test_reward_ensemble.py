"""Ensembles and shaping of rewards: values worked by hand, calibration, names, faults, and what is logged."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.support.reward_adapters import COMPLETIONS, PROMPTS, save_full_model
from trl_ext.rewards import RewardEnsemble, RewardModel, ShapedReward, combine, parse_shaping
from trl_ext.rewards.shaping import innermost

# Scores of three members for two responses.
SCORES = torch.tensor([[1.0, 0.9], [0.4, 0.8], [0.7, 0.85]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # (1.0 + 0.4 + 0.7) / 3 and (0.9 + 0.8 + 0.85) / 3
        ({"aggregate": "mean"}, [0.7, 0.85]),
        ({"aggregate": "min"}, [0.4, 0.8]),
        # Squared deviations 0.09 + 0.09 + 0 and 0.0025 + 0.0025 + 0, over 3: variances 0.06 and 0.0016667.
        ({"aggregate": "uwo"}, [0.7 - 0.5 * 0.06, 0.85 - 0.5 * 0.005 / 3]),
        ({"aggregate": "uwo", "coefficient": 0.0}, [0.7, 0.85]),
        ({"aggregate": "uwo", "coefficient": 2.0}, [0.58, 0.85 - 0.01 / 3]),
        # The roots of 0.06 and 0.0016667 are 0.244949 and 0.040825.
        ({"aggregate": "mean_minus_std"}, [0.455051, 0.809175]),
        # Halfway between the lowest and the middle of three: position 0.25 * (3 - 1).
        ({"aggregate": "quantile"}, [0.55, 0.825]),
        ({"aggregate": "quantile", "quantile": 0.0}, [0.4, 0.8]),
        ({"aggregate": "quantile", "quantile": 0.5}, [0.7, 0.85]),
    ],
)
def test_combine(settings, expected):
    combined = combine(SCORES, **settings)
    assert combined.dtype == torch.float64
    assert combined.tolist() == pytest.approx(expected, abs=5e-7)


def test_combine_carries_what_is_missing_and_nothing_else():
    scores = torch.tensor([[1.0, math.nan], [3.0, 2.0]])
    for aggregate in ("mean", "min", "uwo", "mean_minus_std", "quantile"):
        combined = combine(scores, aggregate)
        assert combined.isnan().tolist() == [False, True], aggregate


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregate": "max"}, "unknown --aggregate 'max'.* Known: mean, min, mean_minus_std, uwo, quantile"),
        ({"aggregate": "mean", "coefficient": 0.5}, "coefficient .* is read by mean_minus_std and uwo alone"),
        ({"aggregate": "uwo", "coefficient": -1.0}, "coefficient must be at least 0, .* got -1.0"),
        *(
            ({"aggregate": "quantile", "quantile": value}, rf"quantile must lie in \[0, 1\], got {value}")
            for value in (1.5, math.nan)
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        combine(SCORES, **settings)
    with pytest.raises(ValueError, match=message):
        RewardEnsemble([length, length], **settings)
    with pytest.raises(ValueError, match="at least one member"):
        RewardEnsemble([])


def length(prompts, completions, **kwargs):
    """Characters of the completion."""
    return [float(len(completion)) for completion in completions]


def vowels(prompts, completions, **kwargs):
    return [float(sum(completion.count(vowel) for vowel in "aeiou")) for completion in completions]


def table(values, name="table"):
    """A reward function that returns fixed values for completions that are their indices."""

    def reward(prompts, completions, **kwargs):
        return [values[int(completion)] for completion in completions]

    reward.__name__ = name
    return reward


def test_an_ensemble_of_functions():
    """Lengths 4 and 2, vowels 1 and 2: means 2.5 and 2, population variances 2.25 and 0, mean deviation 0.75."""
    prompts, completions, metrics = ["p", "p"], ["tres", "ae"], {}
    ensemble = RewardEnsemble([length, vowels])
    assert (ensemble.__name__, ensemble.names) == ("ensemble", ["length", "vowels"])
    assert ensemble.member_scores(prompts, completions).tolist() == [[4.0, 2.0], [1.0, 2.0]]
    assert ensemble(prompts, completions, log_metric=metrics.__setitem__) == [2.5, 2.0]
    assert metrics["ensemble_std"] == pytest.approx(0.75)
    assert RewardEnsemble([length, vowels], aggregate="min")(prompts, completions) == [1.0, 2.0]
    assert RewardEnsemble([length, vowels], aggregate="uwo")(prompts, completions) == [2.5 - 0.5 * 2.25, 2.0]
    assert RewardEnsemble([length])(prompts, completions, log_metric=metrics.__setitem__) == [4.0, 2.0]
    assert metrics["ensemble_std"] == 0
    assert ensemble([], []) == []


def test_a_completion_that_a_member_cannot_score_has_no_reward():
    """Whatever the other members say; a NaN is a fault, and stays one to be seen."""
    partial = table([None, 2.0, math.nan, 4.0], "partial")
    whole = table([1.0, 1.0, 1.0, 2.0], "whole")
    ensemble = RewardEnsemble([whole, partial], aggregate="min")
    prompts, completions = ["p"] * 4, ["0", "1", "2", "3"]
    metrics, columns = {}, {}
    rewards = ensemble(prompts, completions, log_extra=columns.__setitem__, log_metric=metrics.__setitem__)
    assert [rewards[index] for index in (0, 1, 3)] == [None, 1.0, 2.0] and math.isnan(rewards[2])
    scores = ensemble.member_scores(prompts, completions)
    assert scores.isfinite().tolist() == [[True] * 4, [False, True, False, True]]
    assert scores[1].isnan().tolist() == [True, False, False, False], "no score, and one at fault"
    assert columns == {"reward/whole": [1.0, 1.0, 1.0, 2.0], "reward/partial": [None, 2.0, None, 4.0]}
    # Of the completions that both score, the population deviations of (1, 2) and (2, 4) are 0.5 and 1.
    assert metrics == {
        "rewards/whole/mean": pytest.approx(1.25),
        "rewards/partial/mean": pytest.approx(3.0),
        "ensemble_std": pytest.approx(0.75),
    }
    nothing = RewardEnsemble([table([None], "nothing")])
    metrics.clear()
    assert nothing(["p"], ["0"], log_metric=metrics.__setitem__) == [None]
    assert metrics == {}, "a mean of nothing is not logged"


def test_members_get_what_the_trainer_passes():
    seen = []

    def member(prompts, completions, answer, log_metric=None, **kwargs):
        seen.append((prompts, completions, answer, log_metric, kwargs))
        return [1.0 if a == c else 0.0 for a, c in zip(answer, completions, strict=True)]

    def log_metric(name, value):
        pass

    ensemble = RewardEnsemble([member, length])
    arguments = {"completion_ids": [[1], [2]], "answer": ["4", "5"], "trainer_state": "state"}
    rewards = ensemble(prompts=["a", "b"], completions=["4", "4"], log_metric=log_metric, **arguments)
    assert rewards == [1.0, 0.5]
    prompts, completions, answer, hook, others = seen[0]
    assert (prompts, completions, answer) == (["a", "b"], ["4", "4"], ["4", "5"])
    assert hook is log_metric
    assert others == {"completion_ids": [[1], [2]], "trainer_state": "state"}, "no flags where none were given"
    ensemble(["a", "b"], ["4", "4"], finished=[True, False], **arguments)
    assert seen[1][4]["finished"] == [True, False]

    def short(prompts, completions, **kwargs):
        return [0.0]

    with pytest.raises(ValueError, match="member short returned 1 rewards for 2 completions"):
        RewardEnsemble([short])(["a", "b"], ["4", "4"])


def test_calibration_makes_members_comparable():
    """Scores 2, 4, 6 (mean 4, variance 8/3) and 100, 100, 130 (mean 110, variance 200).

    Their z-scores are -+sqrt(1.5), 0 and -1/sqrt(2), -1/sqrt(2), sqrt(2).
    """
    low, high = table([2.0, 4.0, 6.0, 8.0], "low"), table([100.0, 100.0, 130.0, 100.0], "high")
    ensemble = RewardEnsemble([low, high], aggregate="min")
    prompts, completions = ["p"] * 3, ["0", "1", "2"]
    assert ensemble(prompts, completions) == [2.0, 4.0, 6.0], "raw, the minimum follows one member only"
    assert ensemble.calibrate(prompts, completions) is ensemble
    z = math.sqrt(1.5)
    expected = torch.tensor([[-z, 0.0, z], [-(0.5**0.5), -(0.5**0.5), 2**0.5]])
    assert torch.allclose(ensemble.member_scores(prompts, completions), expected, atol=1e-6)
    assert ensemble(prompts, completions) == pytest.approx([-z, -(0.5**0.5), z], abs=1e-6)
    # The calibration stays for other completions: 8 is twice as far from 4 as 6 is.
    assert ensemble.member_scores(["p"], ["3"]).flatten().tolist() == pytest.approx([2 * z, -(0.5**0.5)], abs=1e-6)
    assert ensemble.shifts == pytest.approx([4.0, 110.0])
    assert ensemble.scales == pytest.approx([math.sqrt(8 / 3), math.sqrt(200)])


def test_calibration_sets_that_are_refused():
    prompts, completions = ["p"] * 3, ["0", "1", "2"]
    # Alike, missing or infinite, and equal but for the rounding of float32.
    for values in ([5.0, 5.0, 5.0], [None, 1.0, 2.0], [0.0, 1.0, math.inf], [5.0, 5.0000005, 5.0]):
        with pytest.raises(ValueError, match="member bad: its 3 calibration scores are not finite or all alike"):
            RewardEnsemble([table([1.0, 2.0, 3.0]), table(values, "bad")]).calibrate(prompts, completions)


def test_what_it_says_of_itself():
    ensemble = RewardEnsemble([length, vowels], aggregate="uwo", coefficient=0.1)
    ensemble.calibrate(["p"] * 2, ["aaaa", "bb"])
    assert json.loads(json.dumps(ensemble.to_dict())) == {
        "aggregate": "uwo",
        "coefficient": 0.1,
        "quantile": 0.25,
        "calibrated_on": 2,
        "members": [
            {"name": "length", "source": "length", "shift": 3.0, "scale": 1.0},
            {"name": "vowels", "source": "vowels", "shift": 2.0, "scale": 2.0},
        ],
    }


def test_names_of_members_never_agree(tiny_model_path, tmp_path):
    """Two folders called `best` of two runs, and one folder twice: every log has its own name."""
    first = save_full_model(tiny_model_path, tmp_path / "a" / "best", seed=1)
    second = save_full_model(tiny_model_path, tmp_path / "b" / "best", seed=2)
    models = [RewardModel(first), RewardModel(second), RewardModel(first)]
    ensemble = RewardEnsemble(models)
    assert ensemble.names == ["a-best", "b-best", "a-best-2"]
    metrics, columns = {}, {}
    ensemble(PROMPTS, COMPLETIONS, log_extra=columns.__setitem__, log_metric=metrics.__setitem__)
    assert list(columns) == ["reward/a-best", "reward/b-best", "reward/a-best-2"]
    assert columns["reward/b-best"] == models[1].score(PROMPTS, COMPLETIONS).tolist()
    assert columns["reward/a-best"] != columns["reward/b-best"]
    assert metrics["rewards/a-best/mean"] == pytest.approx(models[0].score(PROMPTS, COMPLETIONS).mean().item())
    # A number does not take a name that another member has.
    members = [table([0.0], name) for name in ("best", "best-2", "best", "best")]
    assert RewardEnsemble(members).names == ["best", "best-2", "best-3", "best-4"]
    assert ensemble.to_dict()["members"][0]["source"] == first


# ---- Shaping ----


def test_clipping_and_faults():
    """No reward stays none, and what is not finite is neither clipped nor hidden."""
    reward = table([2.0, 0.25, None, -1.0, math.nan, -math.inf])
    rewards = ShapedReward(reward, [{"kind": "clip", "limit": 0.5}])(["p"] * 6, list("012345"))
    assert rewards[:4] == [0.5, 0.25, None, -0.5]
    assert not math.isfinite(rewards[4]) and not math.isfinite(rewards[5])
    with pytest.raises(ValueError, match="the reward returned 1 rewards for 2 completions"):
        ShapedReward(lambda prompts, completions: [1.0], ["center_reference"]).calibrate(["p"] * 2, ["c"] * 2)


def test_calibration_is_at_its_place():
    """References score 1 and 3. Clipped to 2 first they average 1.5, and 2 as they are."""
    clip = {"kind": "clip", "limit": 2}
    for steps, value, expected in ((["center_reference", clip], 2.0, 2.0), ([clip, "center_reference"], 1.5, 0.5)):
        shaped = ShapedReward(table([1.0, 3.0, None, 9.0]), steps)
        assert shaped.needs_calibration
        with pytest.raises(ValueError, match="center_reference has no value"):
            shaped(["p"], ["3"])
        shaped.calibrate(["p"] * 3, ["0", "2", "1"])
        assert not shaped.needs_calibration
        centre = {"kind": "center_reference", "value": value}
        assert shaped.to_dict()["steps"] == [clip if step == clip else centre for step in steps]
        assert shaped(["p"], ["3"]) == [expected]


def test_what_it_wraps_is_told_everything_and_reports():
    """An ensemble behind a step: members' means are logged by the ensemble, its own before shaping by the wrapper."""
    logged, seen = {}, {}

    def one(prompts, completions, finished, column, log_metric=None, **rest):
        seen.update(finished=finished, column=column)
        return [2.0, 4.0]

    ensemble = RewardEnsemble([one, table([0.0, 2.0])])
    shaped = ShapedReward(ensemble, [{"kind": "clip", "limit": 1.5}])
    rewards = shaped(["p"] * 2, ["0", "1"], finished=[True, False], column=[7, 8], log_metric=logged.__setitem__)
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
def test_steps_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_shaping(text)
