"""Policy losses and their reduction: values worked by hand, loops over rows and tokens, and facts about gradients.

The batch of the values: two responses of 3 and 2 tokens, advantages 1 and -1.

    log-ratio         0.3      -0.1       0.05   |  -0.4      0.2
    ratio             1.349859  0.904837  1.051271 |  0.670320  1.221403
    clipped at 0.2    1.2       0.904837  1.051271 |  0.8       1.2
    loss of the clip -1.2      -0.904837 -1.051271 |  0.8       1.221403
    new log-prob     -1        -0.7      -0.5    |  -2        -0.3
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.naive_policy import (
    ADVANTAGES,
    LOG_RATIO,
    MASK,
    NEW,
    OLD,
    REFERENCE,
    algorithm,
    by_loops,
    ragged_batch,
)
from trl_ext.losses import (
    PolicyScores,
    aggregate,
    cispo,
    clipped_surrogate,
    gmpo,
    kl_estimate,
    masked_mean,
    masked_normalize,
    masked_sum,
    reinforce,
    sapo,
    sequence_log_ratio,
    token_log_ratio,
    unclipped_surrogate,
)

CLIPPED = clipped_surrogate(LOG_RATIO, ADVANTAGES)
SEQUENCE = sequence_log_ratio(NEW, OLD, MASK)


@pytest.mark.parametrize(
    "losses, kind, options, expected",
    [
        # Rows: -3.156108 / 3 = -1.052036 and 2.021403 / 2 = 1.010701; their mean.
        (CLIPPED, "sequence_mean", {}, -0.020667),
        # (-3.156108 + 2.021403) / 5, and -1.134705 / (2 * 4) and / 2.
        (CLIPPED, "token_mean", {}, -0.226941),
        (CLIPPED, "constant", {"constant": 4}, -0.141838),
        (CLIPPED, "sum", {}, -0.567353),
        # Two such micro-batches of 5 tokens, summed: -1.134705 / 10.
        (CLIPPED, "token_mean", {"token_count": 10}, -0.113471),
        # The first token is clipped at 1.28: (-1.134705 - 0.08) / 5; the last has a negative advantage and is not.
        (clipped_surrogate(LOG_RATIO, ADVANTAGES, clip_high=0.28), "token_mean", {}, -0.242941),
        # Rows: -(1.349859 + 0.904837 + 1.051271) / 3 = -1.101989 and (0.670320 + 1.221403) / 2 = 0.945861.
        (unclipped_surrogate(LOG_RATIO, ADVANTAGES), "sequence_mean", {}, -0.078064),
        # Raw rewards 1 and 0: rows (1 + 0.7 + 0.5) / 3 = 0.733333 and 0. Advantages 1 and -1: 0.733333 and -1.15.
        (reinforce(NEW, torch.tensor([1.0, 0.0])), "sequence_mean", {}, 0.366667),
        (reinforce(NEW, ADVANTAGES), "sequence_mean", {}, -0.208333),
        # 1.349859 + 0.7 * 0.904837 + 0.5 * 1.051271 = 2.508880; 2 * 0.670320 + 0.3 * 1.221403 = 1.707061; over 5.
        (cispo(LOG_RATIO, NEW, ADVANTAGES, ratio_cap=5.0), "token_mean", {}, 0.160364),
        # 1.2 in place of 1.349859 and of 1.221403: (2.359021 - 1.700640) / 5.
        (cispo(LOG_RATIO, NEW, ADVANTAGES, ratio_cap=1.2), "token_mean", {}, 0.131676),
        # Neither ratio of a sequence is clipped: (-1.086904 + 0.904837) / 2. Both are: (-1.0004 + 0.9997) / 2.
        (clipped_surrogate(SEQUENCE, ADVANTAGES), "sequence_mean", {}, -0.091033),
        (clipped_surrogate(SEQUENCE, ADVANTAGES, clip_low=3e-4, clip_high=4e-4), "sequence_mean", {}, -0.00035),
        # Weighted by length, which is not GSPO: (-3 * 1.086904 + 2 * 0.904837) / 5.
        (clipped_surrogate(SEQUENCE, ADVANTAGES), "token_mean", {}, -0.290207),
        # LUSPO does that on purpose: (-3.260711 + 1.809675) / 2.
        (clipped_surrogate(SEQUENCE, ADVANTAGES), "sum", {}, -0.725519),
    ],
)
def test_values_worked_by_hand(losses, kind, options, expected):
    assert aggregate(losses, MASK, kind, **options).item() == pytest.approx(expected, abs=1e-6)


# name -> (function of the ratio, log-probabilities, mask and advantages; the loops' name and options)
SURROGATES = {
    "clip": (lambda ratio, lp, mask, a: clipped_surrogate(ratio, a), "clip", {"clip_low": 0.2, "clip_high": 0.2}),
    "clip_high": (
        lambda ratio, lp, mask, a: clipped_surrogate(ratio, a, clip_low=0.1, clip_high=0.3, dual_clip=1.2),
        "clip",
        {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2},
    ),
    "no_clip": (lambda ratio, lp, mask, a: unclipped_surrogate(ratio, a), "no_clip", {}),
    "cispo": (lambda ratio, lp, mask, a: cispo(ratio, lp, a, ratio_cap=1.1), "cispo", {"ratio_cap": 1.1}),
    "reinforce": (lambda ratio, lp, mask, a: reinforce(lp, a), "reinforce", {}),
    "sapo": (
        lambda ratio, lp, mask, a: sapo(ratio, a, temperature_pos=0.7, temperature_neg=1.9),
        "sapo",
        {"temperature_pos": 0.7, "temperature_neg": 1.9},
    ),
    "gmpo": (lambda ratio, lp, mask, a: gmpo(ratio, mask, a, log_clip=0.2), "gmpo", {"log_clip": 0.2}),
}


@pytest.mark.parametrize("kind", ["sequence_mean", "token_mean", "constant", "sum"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_value_and_gradient_against_loops(surrogate, ratio, kind):
    """With an advantage for each token, but for GMPO, whose responses have one each."""
    new, old, _, mask, advantages = ragged_batch(seed=len(surrogate) + len(kind))
    if surrogate == "gmpo":
        ratio = "token"
    else:
        advantages = advantages[:, None] + torch.linspace(-0.8, 0.9, mask.numel(), dtype=new.dtype).view(mask.shape)
    function, name, options = SURROGATES[surrogate]
    expected, slope = by_loops(name, kind, new, old, mask, advantages, {**options, "ratio": ratio})
    new.requires_grad_()
    log_ratio = token_log_ratio(new, old) if ratio == "token" else sequence_log_ratio(new, old, mask)
    loss = aggregate(function(log_ratio, new, mask, advantages), mask, kind, constant=7.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(new.grad, slope, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- invariances


def test_shapes_of_advantages():
    column, grid = ADVANTAGES[:, None], ADVANTAGES[:, None].expand(2, 3)
    for advantages in (column, grid):
        assert torch.equal(clipped_surrogate(LOG_RATIO, advantages), CLIPPED)
        assert torch.equal(reinforce(NEW, advantages), reinforce(NEW, ADVANTAGES))
        assert torch.equal(PolicyScores(NEW, OLD, MASK, advantages).advantages, advantages)
    assert torch.equal(PolicyScores(NEW, OLD, MASK, ADVANTAGES).advantages, column)


def test_ratios_that_overflow_are_bounded():
    log_ratio = torch.tensor([[500.0, -500.0]], requires_grad=True)
    losses = unclipped_surrogate(log_ratio, torch.ones(1))
    losses.sum().backward()
    assert losses[0].tolist() == pytest.approx([-math.exp(20), 0.0], rel=1e-6)
    assert log_ratio.grad.tolist() == [[0.0, 0.0]], "none beyond the bound"


@pytest.mark.parametrize(
    "name, settings, expected",
    [
        # Tokens, of 5: the importance ratio's, the reference's, both; padding counts for nothing.
        ("grpo", {"beta": 0.0}, 1),
        ("grpo", {"beta": 0.1}, 2),
        ("grpo", {"beta": 0.1, "kl_estimator": "k2"}, 1),
        # The mean of a response's log-ratios is below 20; REINFORCE has no ratio, and CISPO lets no gradient through.
        ("gspo", {}, 0),
        ("rloo", {}, 0),
        ("cispo", {}, 0),
    ],
)
def test_share_of_tokens_beyond_the_bound(name, settings, expected):
    old, reference = NEW.clone(), NEW.clone()
    old[0, 0], old[1, 2] = NEW[0, 0] - 21, NEW[1, 2] - 21
    # A reference that is less likely is not clamped.
    reference[0, 1], reference[1, :2] = NEW[0, 1] + 21, NEW[1, :2] - 21
    scores = PolicyScores(NEW, old, MASK, ADVANTAGES, ref_log_probs=reference)
    _, metrics = algorithm(name, **settings).loss(scores)
    assert metrics["log_ratio/clamped"].item() == pytest.approx(expected / 5)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        # Above 1.2 with advantage 1: the first token. Below 0.8 with advantage -1: the fourth. Of the first response's
        # tokens a third, of the second's a half.
        (
            "grpo",
            {},
            {"low_mean": 0.2, "high_mean": 0.2, "region_mean": 0.4, "low_min": 0.0, "high_max": 1 / 3},
        ),
        ("grpo", {"epsilon": 0.35}, {"low_mean": 0.0, "high_mean": 0.0, "region_mean": 0.0, "high_max": 0.0}),
        # Ratios of 1.086904 and 0.904837, each of a whole response.
        ("gspo", {}, {"low_mean": 0.5, "high_mean": 0.5, "region_mean": 1.0, "low_min": 0.0, "high_max": 1.0}),
        ("cispo", {"ratio_cap": 1.05}, {"cispo": 0.4}),
        ("gmpo", {}, {}),
        ("grpo_no_clip", {}, {}),
    ],
)
def test_shares_that_are_clipped(name, settings, expected):
    """The first token's k3 of 0.1 and so on: see the tests of values on the batch; mean 0.006069."""
    _, metrics = algorithm(name, **settings).loss(PolicyScores(NEW, OLD, MASK, ADVANTAGES, ref_log_probs=REFERENCE))
    names = {"cispo": "cispo_clip_ratio", **{key: f"clip_ratio/{key}" for key in expected if key != "cispo"}}
    assert {key: metrics[names[key]].item() for key in expected} == pytest.approx(expected)
    assert any("clip_ratio" in key for key in metrics) == bool(expected)
    assert metrics["kl"].item() == pytest.approx(0.006069, abs=1e-6)
    assert not any(value.requires_grad or value.dim() for value in metrics.values())


def test_metrics_of_responses_without_tokens():
    """An empty response has no share of its own; nothing but empty responses have no extremes."""
    mask = MASK * torch.tensor([[1], [0]])
    _, metrics = algorithm("grpo", beta=0.0).loss(PolicyScores(NEW, OLD, mask, ADVANTAGES))
    assert metrics["clip_ratio/high_max"].item() == pytest.approx(1 / 3) == metrics["clip_ratio/high_mean"].item()
    _, metrics = algorithm("grpo", beta=0.0).loss(PolicyScores(NEW, OLD, 0 * mask, ADVANTAGES))
    assert metrics["clip_ratio/low_mean"].item() == 0 and metrics["clip_ratio/low_min"].isnan()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: aggregate(CLIPPED, MASK, "token_maen"), "did you mean 'token_mean'"),
        (lambda: aggregate(CLIPPED, MASK, "constant"), "'constant' divides by constant, which must be positive"),
        (lambda: masked_normalize(NEW, MASK, 0), "constant, which must be positive, got 0"),
        (lambda: kl_estimate(NEW, OLD, "k4"), "unknown KL estimator 'k4'"),
        (lambda: algorithm("grpo", surrogate="gmpo", ratio="sequence"), "--ratio sequence and --surrogate gmpo"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- Estimates of the KL divergence ----


LOG_PROBS = torch.tensor([[-1.0, -0.5]])
REFERENCE_LOG_PROBS = torch.tensor([[-1.2, -0.4]])


@pytest.mark.parametrize(
    "kind, expected",
    [
        # d = log policy - log reference = 0.2, -0.1.
        ("k1", [0.2, -0.1]),
        # 0.04 / 2, 0.01 / 2.
        ("k2", [0.02, 0.005]),
        # exp(-0.2) - 1 + 0.2 = 0.818731 - 0.8; exp(0.1) - 1 - 0.1 = 1.105171 - 1.1. (Swapped: 0.021403, 0.004837.)
        ("k3", [0.018731, 0.005171]),
    ],
)
def test_kl_values(kind, expected):
    assert kl_estimate(LOG_PROBS, REFERENCE_LOG_PROBS, kind)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_exponent_is_bounded():
    log_probs = torch.tensor([-200.0, -19.0, 0.0], requires_grad=True)
    k3 = kl_estimate(log_probs, torch.zeros(3), "k3")
    k3.sum().backward()
    # exp(20) - 21 at the bound; exp(19) - 20 below it, where the gradient 1 - exp(19) lowers what is too unlikely.
    assert k3.tolist() == pytest.approx([math.exp(20) - 21, math.exp(19) - 20, 0.0], rel=1e-6)
    assert log_probs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(19), 0.0], rel=1e-6)
    # A reference to which the response is nearly impossible: k3 is near d - 1, with a gradient near 1.
    far = torch.tensor([0.0], requires_grad=True)
    k3 = kl_estimate(far, torch.tensor([-300.0]), "k3")
    k3.sum().backward()
    assert k3.item() == pytest.approx(299.0) and far.grad.item() == pytest.approx(1.0)


# ------------------------------------------------------------------- one token, three outcomes, every outcome counted

LOGITS = (0.5, 0.0, -0.5)
REFERENCE_PROBABILITIES = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
# Component i is p_i (log(p_i / q_i) - KL): 0.506480 (0.929168 - 0.293963) = 0.321719.
REVERSE = [0.321719, -0.083023, -0.238697]
# Component i is p_i - q_i: 0.506480 - 0.2.
FORWARD = [0.306480, 0.007196, -0.313676]


def softmax_policy():
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(0)


def expected_gradient(**settings):
    """Expected gradient, under the policy, of a loss that is nothing but a KL term with coefficient 1."""
    objective = algorithm("grpo", beta=1.0, aggregation="sum", **settings)
    logits, log_probs = softmax_policy()
    reference = REFERENCE_PROBABILITIES.log()
    total = 0.0
    for probability, log_prob, ref in zip(log_probs.detach().exp(), log_probs, reference, strict=True):
        log_prob, ref, mask = log_prob.view(1, 1), ref.view(1, 1), torch.ones(1, 1)
        if settings.get("kl_in") == "reward":
            loss = objective.reward_penalty(log_prob, ref, mask) * log_prob.sum()
        else:
            scores = PolicyScores(log_prob, log_prob.detach(), mask, torch.zeros(1), ref_log_probs=ref)
            loss, _ = objective.loss(scores)
        total = total + probability * loss.sum()
    return torch.autograd.grad(total, logits)[0].tolist()


@pytest.mark.parametrize(
    "settings, expected",
    [
        # The expectation of grad log p is the gradient of the sum of all probabilities, which is 1.
        ({"kl_estimator": "k1"}, [0.0, 0.0, 0.0]),
        ({"kl_estimator": "k2"}, REVERSE),
        ({"kl_estimator": "k3"}, FORWARD),
        ({"kl_estimator": "k3", "kl_ratio_correction": True}, REVERSE),
        ({"kl_estimator": "k1", "kl_ratio_correction": True}, REVERSE),
        ({"kl_estimator": "k1", "kl_in": "reward"}, REVERSE),
    ],
    ids=str,
)
def test_expected_gradients(settings, expected):
    assert expected_gradient(**settings) == pytest.approx(expected, abs=1e-6)


def test_reward_penalty():
    """0.1 times k1 of 0.2 and -0.1, the padded third token left out: 0.02 - 0.01; no gradient flows."""
    objective = algorithm("rloo", beta=0.1)
    log_probs = torch.tensor([[-1.0, -0.5, float("nan")]], requires_grad=True)
    penalty = objective.reward_penalty(log_probs, torch.tensor([[-1.2, -0.4, -9.0]]), torch.tensor([[1, 1, 0]]))
    assert penalty.tolist() == pytest.approx([0.01], abs=1e-7)
    assert not penalty.requires_grad


# ---- Masked sums and means ----


VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
SELECTED = torch.tensor([[1, 0, 1], [0, 1, 0]])


@pytest.mark.parametrize(
    "function, options, expected",
    [
        # 1 + 3 + 5; columns 1, 5, 3; rows 1 + 3, 5.
        (masked_sum, {}, 9.0),
        (masked_sum, {"dim": 0}, [1.0, 5.0, 3.0]),
        (masked_sum, {"dim": -1}, [4.0, 5.0]),
        # All: 9 / 3. Rows: 4 / 2, 5 / 1. Columns: 1, 5, 3, over one each.
        (masked_mean, {}, 3.0),
        (masked_mean, {"dim": 1}, [2.0, 5.0]),
        (masked_mean, {"dim": 0}, [1.0, 5.0, 3.0]),
        # Sums over 4: 9 / 4, and 4 / 4, 5 / 4.
        (masked_normalize, {"constant": 4.0}, 2.25),
        (masked_normalize, {"constant": 4.0, "dim": 1}, [1.0, 1.25]),
    ],
)
def test_masked_reductions(function, options, expected):
    for mask in (SELECTED, SELECTED.bool(), SELECTED.float()):
        assert function(VALUES, mask, **options).tolist() == expected


def test_a_row_without_tokens():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_mean(VALUES, mask, 1).tolist() == pytest.approx([1.5, math.nan], nan_ok=True)
    assert masked_sum(VALUES, mask, 1).tolist() == [3.0, 0.0]
    assert math.isnan(masked_mean(VALUES, torch.zeros(2, 3)).item())


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_values_that_do_not_count_are_never_read(junk):
    values = torch.tensor([[1.0, junk, 3.0]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1]])
    total = masked_sum(values, mask) + masked_mean(values, mask) + masked_normalize(values, mask, 2.0)
    # 4 + 2 + 2; each counted value weighs 1 + 1/2 + 1/2.
    assert total.item() == 8.0
    total.backward()
    assert values.grad.tolist() == [[2.0, 0.0, 2.0]]


def test_one_value_per_row_counts_once_per_token():
    column = torch.tensor([[2.0], [5.0]])
    assert masked_sum(column, SELECTED, 1).tolist() == [4.0, 5.0]
    assert masked_mean(column, SELECTED, 1).tolist() == [2.0, 5.0]
