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

from tests.support.naive_policy import ADVANTAGES, LOG_RATIO, MASK, NEW, OLD, differences, naive_loss, ragged_batch
from trl_ext.algorithms import PolicyObjective
from trl_ext.losses import (
    PolicyScores,
    aggregate,
    cispo,
    clipped_surrogate,
    masked_mean,
    reinforce,
    sequence_log_ratio,
    token_log_ratio,
    unclipped_surrogate,
)

CLIPPED = clipped_surrogate(LOG_RATIO, ADVANTAGES)


def value(losses, kind, **options):
    return aggregate(losses, MASK, kind, **options).item()


def test_clipped_losses():
    expected = [[-1.2, -0.904837, -1.051271], [0.8, 1.221403]]
    assert CLIPPED[0].tolist() == pytest.approx(expected[0], abs=1e-6)
    assert CLIPPED[1, :2].tolist() == pytest.approx(expected[1], abs=1e-6)


@pytest.mark.parametrize(
    "kind, options, expected",
    [
        # Rows: -3.156108 / 3 = -1.052036 and 2.021403 / 2 = 1.010701; their mean.
        ("sequence_mean", {}, -0.020667),
        # (-3.156108 + 2.021403) / 5.
        ("token_mean", {}, -0.226941),
        # -1.134705 / (2 * 4).
        ("constant", {"constant": 4}, -0.141838),
        # -1.134705 / 2.
        ("sum", {}, -0.567353),
        # Two such micro-batches of 5 tokens, summed: -1.134705 / 10.
        ("token_mean", {"token_count": 10}, -0.113471),
    ],
)
def test_aggregations_of_the_clip(kind, options, expected):
    assert value(CLIPPED, kind, **options) == pytest.approx(expected, abs=1e-6)


def test_higher_upper_clip():
    """The first token is clipped at 1.28: (-1.134705 - 0.08) / 5; the last has a negative advantage and is not."""
    losses = clipped_surrogate(LOG_RATIO, ADVANTAGES, clip_high=0.28)
    assert value(losses, "token_mean") == pytest.approx(-0.242941, abs=1e-6)


def test_no_clip():
    """Rows: -(1.349859 + 0.904837 + 1.051271) / 3 = -1.101989 and (0.670320 + 1.221403) / 2 = 0.945861."""
    assert value(unclipped_surrogate(LOG_RATIO, ADVANTAGES), "sequence_mean") == pytest.approx(-0.078064, abs=1e-6)


def test_reinforce():
    """Raw rewards 1 and 0: rows (1 + 0.7 + 0.5) / 3 = 0.733333 and 0. Advantages 1 and -1: 0.733333 and -1.15."""
    raw = reinforce(NEW, torch.tensor([1.0, 0.0]))
    assert masked_mean(raw, MASK, 1).tolist() == pytest.approx([0.733333, 0.0], abs=1e-6)
    assert value(raw, "sequence_mean") == pytest.approx(0.366667, abs=1e-6)
    with_baseline = reinforce(NEW, ADVANTAGES)
    assert masked_mean(with_baseline, MASK, 1).tolist() == pytest.approx([0.733333, -1.15], abs=1e-6)
    assert value(with_baseline, "sequence_mean") == pytest.approx(-0.208333, abs=1e-6)


def test_sequence_ratios():
    """exp(0.25 / 3) = 1.086904 and exp(-0.2 / 2) = 0.904837."""
    log_ratio = sequence_log_ratio(NEW, OLD, MASK)
    assert log_ratio.shape == (2, 1)
    assert log_ratio.exp().flatten().tolist() == pytest.approx([1.086904, 0.904837], abs=1e-6)


@pytest.mark.parametrize(
    "clip, kind, expected",
    [
        # Neither is clipped: (-1.086904 + 0.904837) / 2.
        ((0.2, 0.2), "sequence_mean", -0.091033),
        # Both are: (-1.0004 + 0.9997) / 2.
        ((3e-4, 4e-4), "sequence_mean", -0.00035),
        # Weighted by length, which is not GSPO: (-3 * 1.086904 + 2 * 0.904837) / 5.
        ((0.2, 0.2), "token_mean", -0.290207),
        # LUSPO does that on purpose: (-3.260711 + 1.809675) / 2.
        ((0.2, 0.2), "sum", -0.725519),
    ],
)
def test_sequence_clip(clip, kind, expected):
    losses = clipped_surrogate(sequence_log_ratio(NEW, OLD, MASK), ADVANTAGES, clip_low=clip[0], clip_high=clip[1])
    assert value(losses, kind) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "cap, expected",
    [
        # 1.349859 + 0.7 * 0.904837 + 0.5 * 1.051271 = 2.508880; 2 * 0.670320 + 0.3 * 1.221403 = 1.707061; over 5.
        (5.0, 0.160364),
        # 1.2 in place of 1.349859 and of 1.221403: (2.359021 - 1.700640) / 5.
        (1.2, 0.131676),
    ],
)
def test_cispo(cap, expected):
    losses = cispo(LOG_RATIO, NEW, ADVANTAGES, ratio_cap=cap)
    assert value(losses, "token_mean") == pytest.approx(expected, abs=1e-6)


def test_dual_clip():
    """Ratio 5: with advantage -1 the loss 5 is cut to 3, without gradient; with advantage 1 it is -1.2 as ever."""
    log_ratio = torch.full((2, 1), math.log(5.0), requires_grad=True)
    losses = clipped_surrogate(log_ratio, torch.tensor([-1.0, 1.0]), dual_clip=3.0)
    assert losses.flatten().tolist() == pytest.approx([3.0, -1.2])
    losses.sum().backward()
    assert log_ratio.grad.flatten().tolist() == [0.0, 0.0]
    assert clipped_surrogate(log_ratio, torch.tensor([-1.0, 1.0])).flatten().tolist() == pytest.approx([5.0, -1.2])


SURROGATES = {
    "clip": lambda ratio, log_probs, advantages: clipped_surrogate(ratio, advantages),
    "clip_high": lambda ratio, log_probs, advantages: clipped_surrogate(
        ratio, advantages, clip_low=0.1, clip_high=0.3, dual_clip=1.2
    ),
    "no_clip": lambda ratio, log_probs, advantages: unclipped_surrogate(ratio, advantages),
    "cispo": lambda ratio, log_probs, advantages: cispo(ratio, log_probs, advantages, ratio_cap=1.1),
    "reinforce": lambda ratio, log_probs, advantages: reinforce(log_probs, advantages),
}
NAIVE_OPTIONS = {
    "clip_high": {"surrogate": "clip", "epsilon": 0.1, "epsilon_high": 0.3, "dual_clip": 1.2},
    "cispo": {"ratio_cap": 1.1},
}


@pytest.mark.parametrize("kind", ["sequence_mean", "token_mean", "constant", "sum"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_value_and_gradient_against_loops(surrogate, ratio, kind):
    new, old, _, mask, advantages = ragged_batch(seed=len(surrogate) + len(kind))
    new.requires_grad_()
    log_ratio = token_log_ratio(new, old) if ratio == "token" else sequence_log_ratio(new, old, mask)
    loss = aggregate(SURROGATES[surrogate](log_ratio, new, advantages), mask, kind, constant=7.0)
    loss.backward()
    settings = {"surrogate": surrogate, "ratio": ratio, "kind": kind, "constant": 7.0}
    settings |= NAIVE_OPTIONS.get(surrogate, {})
    fixed = [old.tolist(), mask.tolist(), advantages.tolist()]

    def naive(values):
        return naive_loss(values, *fixed, frozen=new.tolist(), **settings)

    assert loss.item() == pytest.approx(naive(new.tolist()), abs=1e-12)
    assert torch.allclose(new.grad, torch.tensor(differences(naive, new.tolist()), dtype=torch.float64), atol=1e-8)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_at_ratio_one_every_gradient_is_that_of_reinforce(surrogate, ratio):
    """d/d log_prob is -A at each token, times the reduction's weight: here 1 / (B L) under the mean per sequence."""
    old, _, _, mask, advantages = ragged_batch(seed=3)
    new = old.clone().requires_grad_()
    log_ratio = token_log_ratio(new, old) if ratio == "token" else sequence_log_ratio(new, old, mask)
    aggregate(SURROGATES[surrogate](log_ratio, new, advantages), mask, "sequence_mean").backward()
    expected = torch.zeros_like(new)
    for i, advantage in enumerate(advantages.tolist()):
        length = int(mask[i].sum())
        expected[i, :length] = -advantage / (len(mask) * max(length, 1))
    assert torch.allclose(new.grad, expected, atol=1e-12)


def test_cispo_with_a_cap_below_one_is_not_the_policy_gradient():
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    cispo(log_probs - log_probs.detach(), log_probs, torch.ones(1), ratio_cap=0.2).sum().backward()
    assert log_probs.grad.item() == pytest.approx(-0.2)


@pytest.mark.parametrize(
    "ratio, advantage, active",
    [(1.3, 1.0, False), (1.3, -1.0, True), (0.7, 1.0, True), (0.7, -1.0, False), (1.1, 1.0, True), (1.1, -1.0, True)],
)
def test_the_clip_knows_signs(ratio, advantage, active):
    """Above 1.2 only what would rise further is cut, below 0.8 only what would fall further; CISPO cuts nothing."""
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    clipped_surrogate(log_ratio, torch.tensor([advantage])).sum().backward()
    assert log_ratio.grad.item() == pytest.approx(-advantage * ratio if active else 0.0)
    log_probs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    cispo(log_probs, log_probs, torch.tensor([advantage]), ratio_cap=1.2).sum().backward()
    assert log_probs.grad.item() == pytest.approx(-advantage * min(ratio, 1.2))


def test_gradient_of_a_sequence_ratio_is_shared_by_its_tokens():
    """-A s / L at each of the L tokens: s = 1.086904, L = 3 and s = 0.904837, L = 2; over B = 2."""
    new = NEW.clone().requires_grad_()
    aggregate(clipped_surrogate(sequence_log_ratio(new, OLD, MASK), ADVANTAGES), MASK, "sequence_mean").backward()
    assert new.grad[0].tolist() == pytest.approx([-1.086904 / 6] * 3, abs=1e-6)
    assert new.grad[1].tolist() == pytest.approx([0.904837 / 4] * 2 + [0.0], abs=1e-6)


def test_share_of_tokens_without_a_gradient():
    """GSPO's narrow clip cuts far more tokens than a token clip at 0.2.

    With token log-ratios of standard deviation 0.05, a token leaves the clip on its advantage's side with probability
    (P(z > 3.65) + P(z < -4.46)) / 2 = 0.007 %; a mean over 200 to 1000 tokens, of deviation 0.002, on about 44 %.
    """
    generator = torch.Generator().manual_seed(0)
    rows, tokens = 400, 1000
    lengths = torch.randint(200, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()
    old = torch.zeros(rows, tokens)
    new = (0.05 * torch.randn(rows, tokens, generator=generator)).requires_grad_()
    advantages = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)

    def share(log_ratio, low, high):
        losses = clipped_surrogate(log_ratio, advantages, clip_low=low, clip_high=high)
        gradient = torch.autograd.grad(aggregate(losses, mask, "sequence_mean"), new)[0]
        return ((gradient == 0) & (mask == 1)).sum().item() / mask.sum().item()

    token_share = share(token_log_ratio(new, old), 0.2, 0.2)
    sequence_share = share(sequence_log_ratio(new, old, mask), 3e-4, 4e-4)
    assert 2e-5 < token_share < 2e-4
    assert 0.38 < sequence_share < 0.50
    assert sequence_share > 100 * token_share


@pytest.mark.parametrize("stop, drift", [(0.1, 0.155843), (0.5, 0.193147)])
def test_length_bias_of_the_mean_per_sequence(stop, drift):
    """What a constant negative advantage does to the length of responses that stop with probability s at each token.

    The stop logit's gradient of log p(length L) is (1 - s) - (L - 1) s = 1 - L s. Under the mean per sequence the
    expected push is -|A| (E[1 / L] - s), with E[1 / L] = -s ln s / (1 - s): wrong responses grow. Under a sum it is
    -|A| (1 - s E[L]) = 0. Here all lengths up to 600 are counted with their probabilities.
    """
    longest = 600
    logit = torch.tensor(math.log(stop / (1 - stop)), dtype=torch.float64, requires_grad=True)
    lengths = torch.arange(1, longest + 1)
    positions = torch.arange(1, longest + 1)
    go, end = torch.nn.functional.logsigmoid(-logit), torch.nn.functional.logsigmoid(logit)
    log_probs = torch.where(positions == lengths[:, None], end, go)
    mask = (positions <= lengths[:, None]).long()
    weights = stop * (1 - stop) ** (lengths - 1.0) * longest

    def push(kind):
        # The mean over rows, each weighted by its probability, is the expectation.
        losses = reinforce(log_probs, -weights)
        return -torch.autograd.grad(aggregate(losses, mask, kind), logit, retain_graph=True)[0].item()

    assert -stop * math.log(stop) / (1 - stop) - stop == pytest.approx(drift, abs=1e-6)
    assert push("sequence_mean") == pytest.approx(-drift, abs=1e-6)
    assert push("sum") == pytest.approx(0.0, abs=1e-6)


# ------------------------------------------------------------------------------------------------------- invariances


KINDS = [("sequence_mean", {}), ("token_mean", {}), ("constant", {"constant": 5.0}), ("sum", {})]


@pytest.mark.parametrize("kind, options", KINDS)
def test_padding_columns_and_the_order_of_rows_change_nothing(kind, options):
    new, old, _, mask, advantages = ragged_batch(seed=5)
    losses = clipped_surrogate(token_log_ratio(new, old), advantages)
    expected = aggregate(losses, mask, kind, **options)
    junk = torch.full((len(mask), 3), float("nan"), dtype=torch.float64)
    wider = torch.cat([junk, losses, junk], 1)
    wider_mask = torch.cat([torch.zeros(len(mask), 3), mask, torch.zeros(len(mask), 3)], 1)
    assert torch.allclose(aggregate(wider, wider_mask, kind, **options), expected, atol=1e-12)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.allclose(aggregate(losses[order], mask[order], kind, **options), expected, atol=1e-12)


@pytest.mark.parametrize("kind, options", KINDS)
def test_a_response_without_tokens_counts_as_zero(kind, options):
    """One row of losses 2 and 4, and an empty one: 3 / 2, 6 / 2, 6 / (2 * 5) and 6 / 2."""
    mask = torch.tensor([[1, 1], [0, 0]])
    losses = torch.tensor([[2.0, 4.0], [float("nan"), 9.0]], requires_grad=True)
    loss = aggregate(losses, mask, kind, **options)
    assert loss.item() == pytest.approx({"sequence_mean": 1.5, "token_mean": 3.0, "constant": 0.6, "sum": 3.0}[kind])
    loss.backward()
    assert losses.grad[1].tolist() == [0.0, 0.0]
    nothing = aggregate(losses, torch.zeros(2, 2), kind, **options)
    assert nothing.item() == 0.0


def test_token_mean_of_a_batch_in_parts():
    """Parts of unequal length, divided by the whole batch's tokens and summed, are the whole batch's mean; divided by
    the tokens per part, their mean is."""
    new, old, _, mask, advantages = ragged_batch(seed=6)
    losses = clipped_surrogate(token_log_ratio(new, old), advantages)
    whole = aggregate(losses, mask, "token_mean")
    count = mask.sum()
    parts = [slice(0, 1), slice(1, 3), slice(3, 5)]
    total = sum(aggregate(losses[part], mask[part], "token_mean", token_count=count) for part in parts)
    assert torch.allclose(total, whole, atol=1e-12)
    mean = sum(aggregate(losses[part], mask[part], "token_mean", token_count=count / 3) for part in parts) / 3
    assert torch.allclose(mean, whole, atol=1e-12)
    own_means = sum(aggregate(losses[part], mask[part], "token_mean") for part in parts) / 3
    assert not torch.allclose(own_means, whole, atol=1e-3)


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
        # The importance ratio's, the reference's, both; padding counts for nothing.
        ("grpo", {"beta": 0.0}, [[True, False, False], [False, False, False]]),
        ("grpo", {"beta": 0.1}, [[True, True, False], [False, False, False]]),
        ("grpo", {"beta": 0.1, "kl_estimator": "k2"}, [[True, False, False], [False, False, False]]),
        # The mean of a response's log-ratios is below 20; REINFORCE has no ratio, and CISPO lets no gradient through.
        ("gspo", {}, [[False, False, False], [False, False, False]]),
        ("rloo", {}, [[False, False, False], [False, False, False]]),
        ("cispo", {}, [[False, False, False], [False, False, False]]),
    ],
)
def test_tokens_beyond_the_bound(name, settings, expected):
    old, reference = NEW.clone(), NEW.clone()
    old[0, 0], old[1, 2] = NEW[0, 0] - 21, NEW[1, 2] - 21
    reference[0, 1], reference[1, 0] = NEW[0, 1] + 21, NEW[1, 0] - 21
    objective = PolicyObjective(name, **settings)
    scores = PolicyScores(NEW, old, MASK, ADVANTAGES, ratio=objective.ratio)
    assert objective.clamped(scores, reference).tolist() == expected


# --------------------------------------------------------------------------------------------------------- refusals


def test_an_empty_response_has_sequence_ratio_one():
    assert sequence_log_ratio(NEW, OLD, torch.zeros(2, 3)).tolist() == [[0.0], [0.0]]


def test_refusals():
    with pytest.raises(ValueError, match="unknown aggregation 'token_maen'; did you mean 'token_mean'"):
        aggregate(CLIPPED, MASK, "token_maen")
    for constant in (None, 0.0):
        with pytest.raises(ValueError, match="'constant' divides by constant, which must be positive"):
            aggregate(CLIPPED, MASK, "constant", constant=constant)
