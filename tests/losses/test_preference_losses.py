"""The losses of pairs, of reward models and of KTO: values worked by hand, gradients, properties, stability, refusals.

The pairs A, B and C: sums of log-probabilities under the policy and the reference, and numbers of tokens.

    pair  chosen  rejected  ref_chosen  ref_rejected  lengths   h_w   h_l  margin  mean chosen, mean rejected
    A       -20       -30       -22         -29        8, 10    2.0  -1.0     3.0     -2.5, -3.0
    B       -15       -12       -14         -13        6,  5   -1.0   1.0    -2.0     -2.5, -2.4
    C       -10       -18        -9.5       -19.5      4,  6   -0.5   1.5    -2.0     -2.5, -3.0
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import mpmath
import pytest
import torch
from datasets import Dataset

from tests.support.preference_pairs import (
    BATCH_COUPLED,
    REFERENCE_FREE,
    REGISTERED,
    Pair,
    canonical,
    scores_of,
    scores_of_log_ratios,
)
from trl_ext.data.unpaired import pairs_to_unpaired
from trl_ext.losses import (
    PreferenceScores,
    aot,
    aot_paired,
    apo_down,
    apo_zero,
    bradley_terry,
    cdpo,
    cpo,
    dpo,
    dpop,
    hinge,
    ipo,
    kto,
    nca,
    orpo,
    repo,
    robust_dpo,
    simpo,
    sppo,
)
from trl_ext.losses.objective import PreferenceObjective
from trl_ext.registry import preference_losses, preference_weightings

# ---------------------------------------------------------------------------------------------- values worked by hand

# With l(u) = log(1 + exp(-u)) and s(u) = 1 / (1 + exp(-u)); beta is 0.1 unless a row says otherwise.
TABLE = [
    # A: l(0.3) = log(1 + 0.740818) = 0.554355. B and C share their margin: l(-0.2) = 0.598139 + 0.2.
    (dpo, {"beta": 0.1}, (0.554355, 0.798139, 0.798139)),
    # A: l(0.015) = log(1 + 0.985112) = 0.685675.
    (dpo, {"beta": 0.005}, (0.685675, 0.698160, 0.698160)),
    # A: 0.9 l(0.3) + 0.1 l(-0.3) = 0.9 * 0.554355 + 0.1 * 0.854355.
    (cdpo, {"beta": 0.1, "label_smoothing": 0.1}, (0.584355, 0.778139, 0.778139)),
    # A: (0.9 * 0.554355 - 0.1 * 0.854355) / 0.8 = 0.413484 / 0.8.
    (robust_dpo, {"beta": 0.1, "label_smoothing": 0.1}, (0.516855, 0.823139, 0.823139)),
    # The target is 1 / 0.2 = 5. A: (3 - 5)^2; B: (-2 - 5)^2.
    (ipo, {"beta": 0.1}, (4.0, 49.0, 49.0)),
    # A: (2/8 + 1/10 - 5)^2 = (-4.65)^2. C: (-0.5/4 - 1.5/6 - 5)^2 = (-5.375)^2.
    (ipo, {"beta": 0.1, "length_normalized": True}, (21.6225, 28.801111, 28.890625)),
    # A: 1 - 0.3; B: 1 + 0.2.
    (hinge, {"beta": 0.1}, (0.7, 1.2, 1.2)),
    # A has h_w > 0, so there is no penalty. B: l(0.1 (-2 - 5 * 1)) = l(-0.7) = 0.7 + log(1 + 0.496585).
    (dpop, {"beta": 0.1, "penalty": 5.0}, (0.554355, 1.103186, 0.943249)),
    # B: l(0.1 (-2 - 50 * 1)) = l(-5.2) = 5.2 + log(1 + 0.005517). C: l(0.1 (-2 - 50 * 0.5)) = l(-2.7).
    (dpop, {"beta": 0.1, "penalty": 50.0}, (0.554355, 5.205501, 2.765044)),
    # A: 1 - s(0.2) + s(-0.1) = 1 - 0.549834 + 0.475021.
    (apo_zero, {"beta": 0.1}, (0.925187, 1.049958, 1.049927)),
    # A: s(0.2) + 1 - s(0.3) = 0.549834 + 1 - 0.574443.
    (apo_down, {"beta": 0.1}, (0.975391, 1.024855, 1.037337)),
    # A: l(0.2) + l(-0.2)/2 + l(0.1)/2 = 0.598139 + 0.399069 + 0.322198.
    (nca, {"beta": 0.1}, (1.319407, 1.438793, 1.438168)),
    # Hard labels: targets +5 and -5. A: ((2 - 5)^2 + (-1 + 5)^2) / 2 = (9 + 16) / 2. B: (36 + 36) / 2.
    (sppo, {"beta": 0.1}, (12.5, 36.0, 36.25)),
    # Targets 0.3 / 0.1 = 3 and -0.2 / 0.1 = -2. A: ((2 - 3)^2 + (-1 + 2)^2) / 2. B: (16 + 9) / 2.
    (sppo, {"beta": 0.1, "chosen_win_probability": 0.8, "rejected_win_probability": 0.3}, (1.0, 12.5, 12.25)),
    # A and C: l(2.5 * 0.5 - 1.375) = l(-0.125). B: l(2.5 * -0.1 - 1.375) = l(-1.625).
    (simpo, {"beta": 2.5, "gamma": 1.375}, (0.757599, 1.804745, 0.757599)),
    # The same: gamma = 0.55 * 2.5.
    (simpo, {"beta": 2.5, "gamma_beta_ratio": 0.55}, (0.757599, 1.804745, 0.757599)),
    # A: gamma = 1.375 * 2.5 = 3.4375, l(1.25 - 3.4375) = l(-2.1875).
    (simpo, {"beta": 2.5, "gamma_beta_ratio": 1.375}, (2.293837, 3.712226, 2.293837)),
    # A and C: 0.6 - 0.5. B: 0.6 + 0.1.
    (repo, {"gamma": 0.6}, (0.1, 0.7, 0.1)),
    # The preference term. A: l(0.1 * 10) = log(1 + 0.367879). C: l(0.8).
    (cpo, {"beta": 0.1, "nll_weight": 0.0}, (0.313262, 0.854355, 0.371101)),
    # With the mean token loss, 2.5 for each of the three.
    (cpo, {"beta": 0.1, "nll_weight": 1.0}, (2.813262, 3.354355, 2.871101)),
    # log odds(-2.5) = -2.5 - log(1 - 0.082085) = -2.414350 and log odds(-3) = -3 - log(1 - 0.049787) = -2.948931.
    # A: 2.5 + 0.1 l(0.534581) = 2.5 + 0.046116.
    (orpo, {"beta": 0.1}, (2.546116, 2.574937, 2.546116)),
    # h_w = 2, -1, -0.5 have ranks 3, 1, 2; h_l sorted is -1, 1, 1.5. So A meets 1.5, B meets -1, C meets 1:
    # l(0.2 * 0.5) = l(0.1), l(0.2 * 0), l(0.2 * -1.5) = l(-0.3).
    (aot, {"beta": 0.2}, (0.644397, 0.693147, 0.854355)),
    # Policy margins 10, -3, 8 have ranks 3, 1, 2; reference margins 7, -1, 10 sorted are -1, 7, 10. So A meets 10,
    # B meets -1, C meets 7: l(0.2 * 0), l(0.2 * -2) = l(-0.4), l(0.2 * 1) = l(0.2).
    (aot_paired, {"beta": 0.2}, (0.693147, 0.913015, 0.598139)),
]


@pytest.mark.parametrize("loss, options, expected", TABLE, ids=[f"{row[0].__name__}-{row[1]}" for row in TABLE])
def test_canonical_values(loss, options, expected):
    """The gradient is that of central differences of the values."""
    scores = canonical(requires_grad=True)
    assert loss(scores, **options).tolist() == pytest.approx(expected, abs=1e-6)

    def losses(chosen, rejected):
        return loss(replace(scores, chosen=chosen, rejected=rejected), **options)

    assert torch.autograd.gradcheck(losses, (scores.chosen, scores.rejected))


def test_every_registered_loss_has_values_worked_by_hand():
    assert {loss.__name__ for loss, _, _ in TABLE} == set(REGISTERED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "chosen, rejected", [(-0.5, -1e-3), (-0.5, -2.5e-8), (-1e-8, -3e-9), (-1e-30, -2.0), (-60, -40)]
)
def test_orpo_at_any_probability(chosen, rejected, dtype):
    """Value and gradient against 50 digits. Log odds of up to 69 round to 69 eps, and by as much a sigmoid of them."""
    pair = [torch.tensor([value], dtype=dtype, requires_grad=True) for value in (chosen, rejected)]
    ones = torch.ones(1)
    losses = orpo(PreferenceScores(*pair, None, None, ones, ones), beta=0.1)
    losses.sum().backward()
    with mpmath.workdps(50):
        own, other = (mpmath.mpf(value.item()) for value in pair)
        odds_ratio = mpmath.expm1(-other) / mpmath.expm1(-own)
        share = 0.1 / (1 + odds_ratio)
        expected = (
            -own + 0.1 * mpmath.log1p(1 / odds_ratio),
            -1 + share / mpmath.expm1(own),
            -share / mpmath.expm1(other),
        )
        found = (losses, pair[0].grad, pair[1].grad)
        close = pytest.approx([float(value) for value in expected], rel=100 * torch.finfo(dtype).eps)
        assert [value.item() for value in found] == close


def test_sppo_takes_win_probabilities_per_pair():
    """A at (0.8, 0.3): 1.0; B at (1, 0): 36; C at (0.5, 0.5), targets 0: (0.25 + 2.25) / 2 = 1.25."""
    chosen, rejected = torch.tensor([0.8, 1.0, 0.5]).double(), torch.tensor([0.3, 0.0, 0.5]).double()
    losses = sppo(canonical(), beta=0.1, chosen_win_probability=chosen, rejected_win_probability=rejected)
    assert losses.tolist() == pytest.approx([1.0, 36.0, 1.25], abs=1e-12)


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


@pytest.mark.parametrize(
    "loss, option, message",
    [
        ("cdpo", "label_smoothing", r"label_smoothing must lie in \[0, 0\.5\)"),
        ("robust_dpo", "label_smoothing", r"label_smoothing must lie in \[0, 0\.5\)"),
        ("dpop", "penalty", "penalty must be a number from 0 up"),
        ("cpo", "nll_weight", "nll_weight must be a number from 0 up"),
        ("sppo", "chosen_win_probability", r"a win probability must lie in \[0, 1\]"),
        ("sppo", "rejected_win_probability", r"a win probability must lie in \[0, 1\]"),
        ("wpo", "max_weight", "max_weight must be positive"),
        ("confidence", "floor", "floor must not be negative"),
    ],
)
@pytest.mark.parametrize("value", [-0.5, math.nan])
def test_options_outside_their_range(loss, option, message, value):
    options = {option: value}
    weighting = {"weightings": [loss], "weighting_options": options, "columns": ("avg_confidence",)}
    given = weighting if loss in preference_weightings else {"loss_options": options}
    with pytest.raises(ValueError, match=f"{message}, got {value}"):
        objective = PreferenceObjective("dpo" if given is weighting else loss, beta=0.1, **given)
        ones = torch.ones(3)
        weights = {"chosen_policy_weight": ones, "rejected_policy_weight": ones}
        objective(replace(canonical(), columns={"avg_confidence": ones}, **weights))


@pytest.mark.parametrize(
    "loss, options", [(simpo, {}), (repo, {}), (cpo, {}), (orpo, {}), (ipo, {"length_normalized": True})]
)
def test_missing_lengths(loss, options):
    with pytest.raises(ValueError, match="needs chosen_length and rejected_length"):
        loss(replace(canonical(), chosen_length=None), **options)


def test_an_empty_response_counts_as_one_token():
    """0.6 - (0 / 1 - -2 / 4)."""
    assert repo(scores_of([Pair(0.0, -2.0, 0.0, 0.0, 0, 4)])).tolist() == pytest.approx([0.1])


def test_simpo_takes_one_margin():
    with pytest.raises(ValueError, match="give gamma or gamma_beta_ratio, not both"):
        simpo(canonical(), gamma=1.0, gamma_beta_ratio=0.5)


# ---- Reward models ----


@pytest.mark.parametrize(
    "options, expected",
    [
        # l(u) = log(1 + exp(-u)). Scores 1.2 and 0.4: l(0.8) = log(1 + 0.449329).
        ({}, 0.371101),
        # l(0.8 - 1) = l(-0.2) = 0.2 + log(1 + 0.818731).
        ({"margin": 1.0}, 0.798139),
        # l(0.8 - 1/3) = l(0.466667).
        ({"margin": 1 / 3}, 0.486793),
        # 0.9 l(0.8) + 0.1 l(-0.8) = 0.371101 + 0.1 * 0.8, as l(-u) = l(u) + u.
        ({"label_smoothing": 0.1}, 0.451101),
        # A judge that agrees with probability 0.7: 0.371101 + 0.3 * 0.8.
        ({"label_smoothing": 0.3}, 0.611101),
        # 0.371101 + 0.01 (1.2 + 0.4)^2.
        ({"centering": 0.01}, 0.396701),
        # l(-0.2) + 0.1 * -0.2 with the margin inside both logistics, + 0.01 * 2.56.
        ({"margin": 1.0, "label_smoothing": 0.1, "centering": 0.01}, 0.798139 - 0.02 + 0.0256),
    ],
    ids=str,
)
def test_values(options, expected):
    losses = bradley_terry(torch.tensor([1.2]), torch.tensor([0.4]), **options)
    assert losses.tolist() == pytest.approx([expected], abs=1e-6)


def test_gradient():
    """d/d chosen of (1-e) l(d) + e l(-d) is sigmoid(d) - (1 - e); of the centering 2 c (chosen + rejected).
    sigmoid(0.3) = 0.574443 with d = 0.8 - 0.5."""
    chosen, rejected = torch.tensor([1.2], requires_grad=True), torch.tensor([0.4], requires_grad=True)
    bradley_terry(chosen, rejected, margin=0.5, label_smoothing=0.1, centering=0.01).sum().backward()
    slope, pull = 1 / (1 + math.exp(-0.3)) - 0.9, 2 * 0.01 * 1.6
    assert chosen.grad.item() == pytest.approx(slope + pull, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(-slope + pull, abs=1e-6)


def test_far_scores_stay_finite():
    """l(-2000) = 2000, l(2000) = 0."""
    losses = bradley_terry(torch.tensor([-1000.0, 1000.0]), torch.tensor([1000.0, -1000.0]))
    assert losses.tolist() == [2000.0, 0.0]


# ---- KTO ----


LOG_RATIO = torch.tensor([2.0, -1.0, -1.0, 1.0], dtype=torch.float64)
DESIRABLE = torch.tensor([True, True, False, False])
# Mean 0.2.
KL = torch.tensor([0.5, -0.1, 0.3, 0.1], dtype=torch.float64)


def test_kto_values():
    """z = 0.2. 1 - s(0.1 (2 - 0.2)) = s(-0.18) = 0.455121; s(0.12) = 0.529964; s(0.1 (-1 - 0.2)) = 0.470036;
    s(0.08) = 0.519989. Their mean is 0.493778, and with the last two times 1.5, 0.617531."""
    losses = kto(LOG_RATIO, DESIRABLE, KL)
    assert losses.tolist() == pytest.approx([0.455121, 0.529964, 0.470036, 0.519989], abs=1e-6)
    assert losses.mean().item() == pytest.approx(0.493778, abs=1e-6)
    assert kto(LOG_RATIO, DESIRABLE, KL, undesirable_weight=1.5).mean().item() == pytest.approx(0.617531, abs=1e-6)


def test_weights_are_in_the_precision_of_the_log_ratios():
    """1.1 and 0.7 have no finite binary form: taken through float32 they would be off by 2e-8 relative."""
    zeros = torch.zeros(2, dtype=torch.float64)
    losses = kto(zeros, DESIRABLE[1:3], zeros, desirable_weight=1.1, undesirable_weight=0.7)
    assert losses.tolist() == pytest.approx([0.55, 0.35], rel=1e-15)


def test_the_mean_is_clamped_and_not_its_terms():
    """Mean of -0.5, -0.1, 0.3, 0.1 is -0.05, so z = 0; clamped terms would average 0.1."""
    negative = torch.tensor([-0.5, -0.1, 0.3, 0.1], dtype=torch.float64)
    expected = kto(LOG_RATIO, DESIRABLE, torch.zeros(1, dtype=torch.float64))
    assert torch.equal(kto(LOG_RATIO, DESIRABLE, negative), expected)
    # s(-0.2) = 0.450166.
    assert expected[0].item() == pytest.approx(0.450166, abs=1e-6)


def test_kto_gradient():
    """Of the desirable A: -beta s(u) (1 - s(u)) at u = 0.18, -0.1 x 0.544879 x 0.455121; none through z."""
    log_ratio, kl = LOG_RATIO.clone().requires_grad_(), KL.clone().requires_grad_()
    kto(log_ratio, DESIRABLE, kl).sum().backward()
    assert log_ratio.grad[0].item() == pytest.approx(-0.1 * 0.544879 * 0.455121, abs=1e-7)
    assert (log_ratio.grad[:2] < 0).all() and (log_ratio.grad[2:] > 0).all()
    assert kl.grad is None


# ---- Pairs taken apart ----


def pairs(count: int) -> Dataset:
    names = {"row_id": "row", "prompt": "p", "chosen": "c", "rejected": "r"}
    return Dataset.from_list([{n: f"{text}{i}" for n, text in names.items()} | {"bonus": i} for i in range(count)])


@pytest.mark.parametrize("count", [4, 5, 9])
def test_labels_alternate_and_neighbours_answer_other_prompts(count):
    rows = list(pairs_to_unpaired(pairs(count)))
    assert [row["label"] for row in rows] == [True, False] * count
    for row in rows:
        assert row["completion"] == ("c" if row["label"] else "r") + row["prompt"][1:]
        assert row["row_id"] == f"row{row['bonus']}"
    assert sorted(row["completion"] for row in rows) == sorted(f"{side}{i}" for i in range(count) for side in "cr")
    assert all(one["prompt"] != other["prompt"] for one, other in zip(rows, rows[1:], strict=False))


ZEROS = torch.zeros(2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bradley_terry(ZEROS, ZEROS, label_smoothing=0.5), r"label_smoothing must lie in \[0, 0.5\), got 0.5"),
        (lambda: bradley_terry(ZEROS, ZEROS, centering=-1.0), "centering must be a number from 0 up"),
        (lambda: bradley_terry(ZEROS, ZEROS[:, None]), r"shapes \[2\] for chosen and \[2, 1\] for rejected"),
        (lambda: kto(LOG_RATIO, DESIRABLE, torch.zeros(0)), "kl_log_ratio, and it is empty"),
        (lambda: kto(LOG_RATIO, DESIRABLE, KL, undesirable_weight=0), "undesirable_weight must be positive"),
        (lambda: pairs_to_unpaired(pairs(2).remove_columns("rejected")), "'rejected' is missing"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
