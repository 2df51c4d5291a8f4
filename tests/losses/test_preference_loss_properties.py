"""What must hold of the preference losses: minimisers, symmetries, stability, and refusals of wrong options."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from tests.support.preference_pairs import (
    BATCH_COUPLED,
    PAIRS,
    REFERENCE_FREE,
    REGISTERED,
    Pair,
    canonical,
    random_pairs,
    scores_of,
    scores_of_log_ratios,
    select,
)
from trl_ext.losses import (
    PreferenceScores,
    aot,
    aot_paired,
    apo_down,
    apo_zero,
    cdpo,
    cpo,
    dpo,
    dpop,
    hinge,
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


def random_batches(count=20):
    generator = random.Random(11)
    for _ in range(count):
        yield scores_of(random_pairs(generator) + random_pairs(generator))


class TestOptimalTransport:
    @pytest.mark.parametrize("loss", [aot, aot_paired])
    def test_at_most_the_mean_dpo_loss(self, loss):
        """Pairing by rank minimises the sum of a convex function of the differences."""
        strict = 0
        for scores in random_batches():
            sorted_mean, paired_mean = loss(scores, beta=0.1).mean(), dpo(scores, beta=0.1).mean()
            assert sorted_mean <= paired_mean + 1e-12
            strict += bool(sorted_mean < paired_mean - 1e-6)
        assert strict > 10

    @pytest.mark.parametrize("loss", [aot, aot_paired])
    @pytest.mark.parametrize("name", "ABC")
    def test_one_pair_is_dpo(self, loss, name):
        assert loss(canonical(name), beta=0.2).tolist() == pytest.approx(dpo(canonical(name), beta=0.2).tolist())

    def test_permuting_the_rejected_responses_changes_nothing(self):
        generator = torch.Generator().manual_seed(5)
        for scores in random_batches():
            order = torch.randperm(scores.chosen.numel(), generator=generator)
            torch.testing.assert_close(aot(select(scores, order, side="rejected")), aot(scores), rtol=0, atol=1e-12)
        swapped = select(canonical(), torch.tensor([1, 2, 0]), side="rejected")
        assert not torch.allclose(dpo(swapped), dpo(canonical()), atol=0.01)

    def test_permuting_the_chosen_responses_permutes_the_losses(self):
        order = torch.tensor([2, 0, 1])
        permuted = select(canonical(), order, side="chosen")
        torch.testing.assert_close(aot(permuted, beta=0.2), aot(canonical(), beta=0.2)[order], rtol=0, atol=1e-12)

    def test_entry_i_belongs_to_chosen_response_i(self):
        """h_w = 5, -3, 1 has ranks 3, 1, 2; h_l = 2, 4, -6 sorted is -6, 2, 4. Differences 1, 3, -1 at beta 1:
        l(1) = 0.313262, l(3) = 0.048587, l(-1) = 1.313262."""
        losses = aot(scores_of_log_ratios([5.0, -3.0, 1.0], [2.0, 4.0, -6.0]), beta=1.0)
        assert losses.tolist() == pytest.approx([0.313262, 0.048587, 1.313262], abs=1e-6)

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

    @pytest.mark.parametrize("loss", [aot, aot_paired])
    def test_gradient_is_that_of_sorting_both_sides(self, loss):
        """The paper's form, which forgets which value belongs to which pair, by autograd in float64."""

        def sorted_on_both_sides(scores):
            if loss is aot:
                left, right = scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected
            else:
                left, right = scores.chosen - scores.rejected, scores.ref_chosen - scores.ref_rejected
            return torch.log1p(torch.exp(-0.2 * (left.sort().values - right.sort().values)))

        for scores in random_batches():
            sides = scores.chosen.clone().requires_grad_(), scores.rejected.clone().requires_grad_()
            own = replace(scores, chosen=sides[0], rejected=sides[1])
            gradients = [
                torch.stack(torch.autograd.grad(losses.mean(), sides))
                for losses in (loss(own, beta=0.2), sorted_on_both_sides(own))
            ]
            assert (gradients[1].abs().amax(dim=1) > 1e-4).all()
            torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


class TestRobustDPO:
    def test_unbiased_under_flipped_labels(self):
        """(1-e) L(margin) + e L(-margin) = l(beta margin). Pair A: 0.9 * 0.516855 + 0.1 * 0.891855 = 0.554355."""
        flipped = [Pair(p.rejected, p.chosen, p.ref_rejected, p.ref_chosen) for p in PAIRS.values()]
        kept, swapped = robust_dpo(canonical()), robust_dpo(scores_of(flipped))
        assert swapped[0].item() == pytest.approx(0.891855, abs=1e-6)
        torch.testing.assert_close(0.9 * kept + 0.1 * swapped, dpo(canonical()), rtol=0, atol=1e-12)

    def test_unbounded_below(self):
        """At beta margin = 10: (0.9 * 0.0000454 - 0.1 * 10.0000454) / 0.8 = -1.249955."""
        assert robust_dpo(at(100.0), beta=0.1).item() == pytest.approx(-1.249955, abs=1e-6)


def test_no_label_smoothing_is_dpo():
    for loss in (cdpo, robust_dpo):
        torch.testing.assert_close(loss(canonical(), label_smoothing=0.0), dpo(canonical()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "loss, beta, expected",
    [(f, 0.1, math.log(2)) for f in (dpo, cdpo, robust_dpo, dpop, aot, aot_paired)]
    + [(ipo, 0.1, 25.0), (hinge, 0.1, 1.0), (apo_zero, 0.1, 1.0), (apo_down, 0.1, 1.0)]
    + [(nca, 0.1, 2 * math.log(2)), (sppo, 0.1, 25.0), (sppo, 1e-3, 250_000.0)],
)
def test_value_where_the_policy_is_the_reference(loss, beta, expected):
    """IPO: 1 / (4 beta^2). SPPO: (1 / (2 beta))^2. NCA: 2 log 2. A margin of 0 is log 2 for the logistic losses."""
    scores = canonical()
    scores = replace(scores, ref_chosen=scores.chosen, ref_rejected=scores.rejected)
    assert loss(scores, beta=beta).tolist() == pytest.approx([expected] * 3, rel=1e-12)


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


@pytest.mark.parametrize(
    "dtype, mean, expected", [(torch.float64, -1e-7, 17.659421), (torch.float32, -1e-5, 13.054251)]
)
def test_orpo_is_accurate_for_a_near_certain_response(dtype, mean, expected):
    """Log odds of -1 are -1 - log(1 - 0.367879) = -0.541325, of -1e-7 -1e-7 - log(1e-7 - 5e-15) = 16.118096, and of
    -1e-5 -1e-5 - log(1e-5 - 5e-11) = 11.512920. With the certain response rejected and beta 1:
    1 + l(-0.541325 - 16.118096) = 1 + 16.659421 and 1 + l(-0.541325 - 11.512920) = 1 + 12.054245 + 0.000006."""
    losses = orpo(scores_of([Pair(-4.0, 6 * mean, 0.0, 0.0, 4, 6)], dtype=dtype), beta=1.0)
    assert losses.item() == pytest.approx(expected, abs=3e-6)


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
