"""Pairs from groups, the replay buffer and its importance weights, against values worked by hand.

The pairs A, B, C of DPO losses 0.554355, 0.798139, 0.798139 are those of `test_preference_losses`: margins 3, -2, -2
at beta 0.1, so l(0.3) and twice l(-0.2).
"""

from __future__ import annotations

import math
from array import array

import pytest
import torch

from trl_ext.losses import PreferenceScores, dpo
from trl_ext.rollouts.replay import (
    ReplayBuffer,
    Response,
    SampledPair,
    effective_sample_size,
    importance_weights,
    replayed_count,
    select_pairs,
    weighted_mean,
)

NAN = float("nan")


# ---- Selection ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Best 3 (index 1) against worst 0 (index 2); all alike are one tie; the first of equal bests and worsts.
        (([1, 3, 0, 2, 5, 5, 5, 5, 2, 7, 2, 7], 4), ([(1, 2), (9, 8)], 1, 0)),
        # Pairs (0,1), (0,2), (1,2): the second is a tie, and in the others 1 wins.
        (([1, 3, 1], 3, "all"), ([(1, 0), (1, 2)], 1, 0)),
        (([4, 1, 3], 3, "all"), ([(0, 1), (0, 2), (2, 1)], 0, 0)),
        # Responses without a reward are left out, and one alone makes no pair.
        (([NAN, 2, 1, NAN, 5, NAN], 3, "all"), ([(1, 2)], 0, 1)),
        (([NAN, 2, 1], 3), ([(1, 2)], 0, 0)),
        # Differences of 0.5 and 0.25, exact in binary, at a tolerance of 0.25.
        (([0.5, 0.0, 0.25, 0.0], 2, "best_worst", 0.25), ([(0, 1)], 1, 0)),
    ],
)
def test_pairs_worked_by_hand(given, expected):
    assert select_pairs(*given) == expected


# ---- The buffer ----


def pair(version: int, length: int = 3, reward_version: str = "1 thirds") -> SampledPair:
    chosen = Response(array("i", range(length)), -1.5 - version / 3, -1.0)
    rejected = Response(array("i", [9]), -2.25, NAN)
    return SampledPair(array("i", [version, 7]), chosen, rejected, version, reward_version)


def versions(pairs) -> list[int]:
    return [one.version for one in pairs]


def test_what_is_kept():
    """The most recent three; at version 6 with a maximum age of 4, version 2 stays (6 - 2 = 4) and version 1 goes."""
    replay = ReplayBuffer(3, max_age=4)
    replay.add([pair(0), pair(1)])
    replay.add([pair(2), pair(5)])
    assert versions(replay.pairs) == [1, 2, 5]
    replay.drop_old(6)
    assert versions(replay.pairs) == [2, 5]


def test_draws_depend_on_seed_and_version_alone():
    def drawn(seed: int, version: int) -> list[int]:
        replay = ReplayBuffer(50, max_age=100, seed=seed)
        replay.add(map(pair, range(50)))
        return versions(replay.draw(10, version))

    first = drawn(0, 7)
    assert len(set(first)) == 10, "without replacement"
    torch.manual_seed(3)
    assert drawn(0, 7) == first
    assert drawn(0, 8) != first
    assert drawn(1, 7) != first


def test_fraction_of_all_pairs():
    """8 new pairs at 1/2 take 8 replayed ones; at 1/5, 2 of 10 in all; at 0.9, 72 of 80."""
    assert [replayed_count(8, fraction) for fraction in (0.5, 0.2, 0.9)] == [8, 2, 72]
    assert replayed_count(0, 0.5) == 0


@pytest.mark.parametrize("capacity", [3, 2])
def test_saved_and_loaded_exactly(capacity, tmp_path):
    replay = ReplayBuffer(3, max_age=4)
    replay.add([pair(0, length=0), pair(4, reward_version="2 évens"), pair(5)])
    replay.save(tmp_path / "replay.json")
    again = ReplayBuffer(capacity, max_age=4)
    again.add([pair(9)])
    again.load(tmp_path / "replay.json")
    assert list(map(repr, again.pairs)) == list(map(repr, replay.pairs[-capacity:]))
    assert [path.name for path in tmp_path.iterdir()] == ["replay.json"]


# ---- Importance weights ----

LOG_RATIOS = torch.tensor([0.05, -0.4, 1.2], dtype=torch.float64)


def test_effective_sample_size():
    """(1.051271 + 0.670320 + 3.320117)^2 / (1.105171 + 0.449329 + 11.023176) = 25.418820 / 12.577676."""
    assert effective_sample_size(importance_weights(LOG_RATIOS)).item() == pytest.approx(2.020947, abs=1e-6)
    assert effective_sample_size(torch.ones(5)).item() == 5
    assert effective_sample_size(torch.tensor([0.0, 3.0])).item() == 1


def test_weighted_dpo_loss():
    """Capped weights on A, B, C: (1.051271 x 0.554355 + 0.670320 x 0.798139 + 2 x 0.798139) / 3.721591 = 0.729275."""
    scores = PreferenceScores(*(torch.tensor(v, dtype=torch.float64) for v in ([-20, -15, -10], [-30, -12, -18])))
    scores.ref_chosen = torch.tensor([-22, -14, -9.5], dtype=torch.float64)
    scores.ref_rejected = torch.tensor([-29, -13, -19.5], dtype=torch.float64)
    losses, weights = dpo(scores), importance_weights(LOG_RATIOS, cap=2.0)
    assert weighted_mean(losses, weights).item() == pytest.approx(0.729275, abs=1e-6)
    assert (weights * losses).mean().item() == pytest.approx(0.904688, abs=1e-6), "not normalised"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # exp of 0.05, -0.4 and 1.2; the last above the cap of 2.
        ({}, [1.051271, 0.670320, 3.320117]),
        ({"cap": 2.0}, [1.051271, 0.670320, 2.0]),
        ({"kind": "none"}, [1.0, 1.0, 1.0]),
        # exp(0.05 / 5), exp(-0.4 / 2), and exp(1.2 / 1) capped at 2.
        (
            {"kind": "length_normalized", "lengths": torch.tensor([5, 2, 1]), "cap": 2.0},
            [math.exp(0.01), math.exp(-0.2), 2.0],
        ),
    ],
)
def test_weights(options, expected):
    assert importance_weights(LOG_RATIOS, **options).tolist() == pytest.approx(expected, abs=1e-6)


def test_a_weight_has_no_gradient_and_does_not_overflow():
    log_ratio = torch.tensor([1000.0, -1000.0], requires_grad=True)
    weights = importance_weights(log_ratio, cap=2.0)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([2.0, 0.0])
    assert weighted_mean(torch.ones(2), torch.zeros(2)).item() == 0
