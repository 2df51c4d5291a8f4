"""What must hold of the preference losses: minimisers, symmetries, stability, and refusals of wrong options."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.support.preference_pairs import (
    BATCH_COUPLED,
    REFERENCE_FREE,
    REGISTERED,
    Pair,
    canonical,
    scores_of,
    scores_of_log_ratios,
)
from trl_ext.losses import (
    PreferenceScores,
    aot,
    cdpo,
    cpo,
    dpo,
    dpop,
    ipo,
    nca,
    orpo,
    repo,
    robust_dpo,
    simpo,
    sppo,
)
from trl_ext.losses.objective import PreferenceObjective
from trl_ext.registry import preference_losses, preference_weightings

# ------------------------------------------------------------------------------------------ closed-form minimisers


def minimiser(function, low, high) -> float:
    """Where the derivative of a convex function of a float64 scalar changes its sign, by bisection."""
    for _ in range(100):
        point = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(function(point), point)
        low, high = (point.item(), high) if slope < 0 else (low, point.item())
    return (low + high) / 2


def at(h_w, h_l=0.0) -> PreferenceScores:
    """One pair with the given log-ratios, numbers or scalar tensors."""
    h_w, h_l = (torch.as_tensor(h, dtype=torch.float64).reshape(1) for h in (h_w, h_l))
    return PreferenceScores(h_w - 7, h_l - 9, torch.full_like(h_w, -7), torch.full_like(h_l, -9))


@pytest.mark.parametrize(
    "loss, expected, arithmetic",
    [
        (ipo, 5.0, "1 / (2 * 0.1)"),
        (cdpo, 21.972246, "log(0.9 / 0.1) / 0.1 = 10 log 9"),
        (nca, 6.931472, "s(-u) = s(u) / 2 at s(u) = 2/3, u = log 2; divided by 0.1"),
        (sppo, 5.0, "(1 - 1/2) / 0.1"),
    ],
)
def test_minimiser_in_the_chosen_log_ratio(loss, expected, arithmetic):
    assert minimiser(lambda h: loss(at(h), beta=0.1).sum(), -50, 100) == pytest.approx(expected, abs=1e-6), arithmetic


@pytest.mark.parametrize("loss, expected", [(ipo, 3.0), (dpo, 13.862944)])
def test_minimiser_when_the_label_is_right_with_probability_0_8(loss, expected):
    """IPO: (2 * 0.8 - 1) / (2 * 0.1). DPO: log(0.8 / 0.2) / 0.1."""

    def expected_loss(margin):
        return (0.8 * loss(at(margin), beta=0.1) + 0.2 * loss(at(-margin), beta=0.1)).sum()

    assert minimiser(expected_loss, -50, 100) == pytest.approx(expected, abs=1e-6)


def test_minimiser_of_sppo_in_the_rejected_log_ratio():
    """(0.3 - 1/2) / 0.1."""
    found = minimiser(lambda h: sppo(at(0.0, h), beta=0.1, rejected_win_probability=0.3).sum(), -50, 100)
    assert found == pytest.approx(-2.0, abs=1e-6)


# -------------------------------------------------------------------------------------------------------- properties


class TestOptimalTransport:
    def test_ties_keep_their_order(self):
        """Equal chosen log-ratios take the rejected ones 0 < 2 < 4 in their own order: differences 1, -1, -3."""
        losses = aot(scores_of_log_ratios([1.0, 1.0, 1.0], [4.0, 0.0, 2.0]), beta=1.0)
        assert losses.tolist() == pytest.approx([0.313262, 1.313262, 3.048587], abs=1e-6)

    def test_tied_rejected_responses_keep_their_order_in_the_gradient(self):
        """h_w = 3, 1 meets the tied h_l = 0, 0: the lower chosen takes the first, so d/dh_l = s(-1)/2, s(-3)/2."""
        scores = scores_of_log_ratios([3.0, 1.0], [0.0, 0.0], requires_grad=True)
        aot(scores, beta=1.0).mean().backward()
        assert scores.rejected.grad.tolist() == pytest.approx([0.268941 / 2, 0.047426 / 2], abs=1e-6)
        assert scores.chosen.grad.tolist() == pytest.approx([-0.047426 / 2, -0.268941 / 2], abs=1e-6)


@pytest.mark.parametrize("name", REGISTERED)
def test_reference_is_read_exactly_where_the_registry_says_so(name):
    entry = preference_losses[name]
    assert entry.needs_reference == (name not in REFERENCE_FREE)
    scores = canonical()
    without = replace(scores, ref_chosen=None, ref_rejected=None)
    if entry.needs_reference:
        with pytest.raises(ValueError, match="reads reference log-probabilities.*needs_reference=True"):
            entry.function(without)
        shifted = replace(scores, ref_chosen=scores.ref_chosen + 3.0)
        assert (entry.function(shifted) - entry.function(scores)).abs().max() > 1e-3
    else:
        shifted = replace(scores, ref_chosen=scores.ref_chosen + 3.0, ref_rejected=scores.ref_rejected - 5.0)
        assert torch.equal(entry.function(scores), entry.function(shifted))
        assert torch.equal(entry.function(scores), entry.function(without))


@pytest.mark.parametrize("name", REGISTERED)
def test_pairs_are_coupled_exactly_where_the_registry_says_so(name):
    entry = preference_losses[name]
    assert entry.batch_coupled == (name in BATCH_COUPLED)
    alone = torch.cat([entry.function(canonical(pair), beta=0.2) for pair in "ABC"])
    assert torch.allclose(alone, entry.function(canonical(), beta=0.2), atol=1e-9) == (not entry.batch_coupled)


# ----------------------------------------------------------------------------------------------- numerical stability


@pytest.mark.parametrize("name", REGISTERED)
def test_extreme_margins_stay_finite_in_float32(name):
    """Every combination of 0 and -1e4 for the four log-probabilities: margins up to 2e4 either way."""
    ends = (0.0, -1e4)
    pairs = [Pair(*values, 1, 50) for values in itertools.product(ends, repeat=4)]
    scores = scores_of(pairs, dtype=torch.float32, requires_grad=True)
    losses = preference_losses[name].function(scores)
    losses.mean().backward()
    for values in (losses, scores.chosen.grad, scores.rejected.grad):
        assert values.dtype == torch.float32
        assert torch.isfinite(values).all()


@pytest.mark.parametrize("loss, slope", [(dpo, -0.1), (cdpo, -0.09), (robust_dpo, -0.1125), (dpop, -0.1 * 51)])
def test_the_gradient_of_a_very_wrong_pair_does_not_vanish(loss, slope):
    """At margin -1e4, s(-beta margin) = 1: -0.1; -0.1 * 0.9; -0.1 * 0.9 / 0.8; DPOP's penalty adds 50 times -0.1."""
    scores = scores_of([Pair(-1e4, 0.0, 0.0, 0.0)], dtype=torch.float32, requires_grad=True)
    loss(scores, beta=0.1).sum().backward()
    assert scores.chosen.grad.item() == pytest.approx(slope, rel=1e-5)


# ----------------------------------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize("loss", [cdpo, robust_dpo])
@pytest.mark.parametrize("value", [0.5, -0.1, 1.0, math.nan])
def test_label_smoothing_outside_its_range(loss, value):
    with pytest.raises(ValueError, match=rf"label_smoothing must lie in \[0, 0\.5\), got {value}"):
        loss(canonical(), label_smoothing=value)


@pytest.mark.parametrize(
    "loss, option, message",
    [
        ("dpop", "penalty", "penalty must be a number from 0 up"),
        ("cpo", "nll_weight", "nll_weight must be a number from 0 up"),
        ("sppo", "chosen_win_probability", r"a win probability must lie in \[0, 1\]"),
        ("sppo", "rejected_win_probability", r"a win probability must lie in \[0, 1\]"),
        ("wpo", "max_weight", "max_weight must be positive"),
        ("confidence", "floor", "floor must not be negative"),
    ],
)
@pytest.mark.parametrize("value", [-0.5, math.nan])
def test_options_outside_their_range_are_refused_before_training(loss, option, message, value):
    options = {option: value}
    weighting = {"weightings": [loss], "weighting_options": options, "columns": ("avg_confidence",)}
    given = weighting if loss in preference_weightings else {"loss_options": options}
    with pytest.raises(ValueError, match=f"{message}, got {value}"):
        PreferenceObjective("dpo" if given is weighting else loss, beta=0.1, **given)


@pytest.mark.parametrize(
    "loss, options", [(simpo, {}), (repo, {}), (cpo, {}), (orpo, {}), (ipo, {"length_normalized": True})]
)
def test_missing_lengths(loss, options):
    with pytest.raises(ValueError, match="needs chosen_length and rejected_length"):
        loss(replace(canonical(), chosen_length=None, rejected_length=None), **options)


def test_an_empty_response_counts_as_one_token():
    assert repo(scores_of([Pair(0.0, -2.0, 0.0, 0.0, 0, 4)])).tolist() == pytest.approx(
        [0.1]
    )  # 0.6 - (0 / 1 - -2 / 4)
