"""Policy losses of 2025 and 2026: values and gradients of one batch to six decimals, and loops in float64.

The batch: two responses of 3 and 2 tokens, advantages 1 and -1, and three policies.

    log-prob          -1    -0.7  -0.5   |  -2    -0.3
    when sampled      -1.3  -0.6  -0.55  |  -1.6  -0.5
    by the sampler    -1.8  -0.4  -0.65  |  -0.6  -1.4
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.naive_policy import ragged_batch, surrogate_by_loops
from trl_ext.algorithms import PolicyObjective, algorithms
from trl_ext.losses import PolicyLoss, PolicyScores, clip_cov, dppo_kl, dppo_tv, sapo
from trl_ext.settings import LOSS_SETTINGS

NEW = torch.tensor([[-1.0, -0.7, -0.5], [-2.0, -0.3, -0.9]], dtype=torch.float64)
OLD = torch.tensor([[-1.3, -0.6, -0.55], [-1.6, -0.5, -0.9]], dtype=torch.float64)
SAMPLER = torch.tensor([[-1.8, -0.4, -0.65], [-0.6, -1.4, -0.9]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0], dtype=torch.float64)
TOKEN_ADVANTAGES = torch.tensor([[1.0, 0.5, 1.5], [-1.0, -1.0, 0.0]], dtype=torch.float64)
ROWS = ["sapo", "gmpo", "gspo_token", "luspo", "vespo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"]


def evaluate(objective, new, *, old, mask, advantages, sampler=None):
    """The loss and its gradient."""
    log_probs = new.clone().requires_grad_()
    loss = objective(PolicyScores(log_probs, old, mask, advantages, sampler_log_probs=sampler), constant=7.0)
    loss.backward()
    return loss.item(), log_probs.grad


@pytest.mark.parametrize(
    "name, settings, value, gradient",
    [
        ("sapo", {}, -0.124540, [-0.218230, -0.150465, -0.175097, 0.162658, 0.301262]),
        ("gmpo", {}, -0.091033, [-0.181151, -0.181151, -0.181151, 0.226209, 0.226209]),
        ("gmpo", {"options": {"log_clip": 0.1}}, 0.017232, [0, -0.169468, -0.169468, 0, 0.262818]),
        ("gspo_token", {"epsilon": 0.2, "epsilon_high": 0.2}, -0.091033, [*[-0.181151] * 3, 0.226209, 0.226209]),
        ("gspo_token", {}, -0.000350, [0] * 5),
        ("luspo", {"epsilon": 0.2, "epsilon_high": 0.2}, -0.725519, [*[-0.543452] * 3, 0.452419, 0.452419]),
        ("luspo", {}, -0.505750, [0] * 5),
        ("vespo", {}, -0.053349, [*[-0.140645] * 3, 0.157725, 0.157725]),
        # The reference's values are of a mean over tokens.
        ("dppo_tv", "token_mean", 0.039648, [0, -0.148164, -0.232367, 0, 0.600833]),
        ("dppo_kl", "token_mean", 0.039648, [0, -0.148164, -0.232367, 0, 0.600833]),
        ("clip_cov", {}, -0.416913, [-0.269972, -0.180967, -0.210254, 0, 0.244281]),
        # The only token in the window of covariances is clipped already: PPO.
        ("clip_cov", {"epsilon": 0.2, "epsilon_high": 0.2}, -0.226941, [0, -0.180967, -0.210254, 0, 0.244281]),
        ("kl_cov", {}, -0.202849, [-0.269972, -0.180967, -0.210254, -0.065936, 0.244281]),
    ],
)
def test_value_and_gradient_on_the_batch(name, settings, value, gradient):
    objective = PolicyObjective(name, **({"aggregation": settings} if isinstance(settings, str) else settings))
    if settings == {} and name == "clip_cov":
        assert objective.epsilon == objective.epsilon_high == 1.0
    loss, found = evaluate(objective, NEW, old=OLD, mask=MASK, advantages=ADVANTAGES, sampler=SAMPLER)
    assert loss == pytest.approx(value, abs=6e-7)
    assert found.flatten().tolist() == pytest.approx([*gradient, 0], abs=6e-7)


def test_gspo_token_takes_an_advantage_for_each_token():
    """The same value as with their means, and gradients in proportion to them."""
    objective = PolicyObjective("gspo_token", epsilon=0.2, epsilon_high=0.2)
    loss, found = evaluate(objective, NEW, old=OLD, mask=MASK, advantages=TOKEN_ADVANTAGES)
    assert loss == pytest.approx(-0.091033, abs=6e-7)
    expected = [-0.181151, -0.090575, -0.271726, 0.226209, 0.226209, 0]
    assert found.flatten().tolist() == pytest.approx(expected, abs=6e-7)
    plain = PolicyObjective("gspo", epsilon=0.2, epsilon_high=0.2)
    for advantages in (ADVANTAGES, -ADVANTAGES):
        whole = evaluate(plain, NEW, old=OLD, mask=MASK, advantages=advantages)
        tokens = evaluate(objective, NEW, old=OLD, mask=MASK, advantages=advantages)
        assert tokens[0] == pytest.approx(whole[0]) and torch.allclose(tokens[1], whole[1], atol=1e-15)


@pytest.mark.parametrize(
    "tau, ratio, weight",
    [(1.0, 1.0, 1.0), (1.0, 2.0, 0.786448), (1.0, 0.5, 0.940015), (1.05, 2.0, 0.768110), (1.05, 0.5, 0.934140)],
)
def test_the_gate_of_sapo(tau, ratio, weight):
    """What it leaves of the gradient of -ratio A."""
    log_ratio = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    sapo(log_ratio, torch.ones(1, dtype=torch.float64), temperature_pos=tau).backward()
    assert log_ratio.grad.item() == pytest.approx(-ratio * weight, abs=6e-7 * ratio)


@pytest.mark.parametrize(
    "before, after, variation, divergence",
    [(1e-5, 1e-3, 0.000990, 0.000944), (0.99, 0.8, 0.19, 0.181005), (0.5, 0.62, 0.12, 0.029663)],
)
def test_the_bounds_of_dppo(before, after, variation, divergence):
    """A token is kept at a bound just above its divergence and dropped just below, if A pushes it further."""
    new, old = (torch.tensor([[p]], dtype=torch.float64).log() for p in (after, before))
    outward = torch.ones(1, dtype=torch.float64) if after > before else -torch.ones(1, dtype=torch.float64)
    for function, distance in ((dppo_tv, variation), (dppo_kl, divergence)):
        for factor, kept in ((1 + 1e-3, True), (1 - 1e-3, False)):
            bounds = {"delta_low": distance * factor, "delta_high": distance * factor}
            assert bool(function(new, old, outward, **bounds)) == kept
            assert bool(function(new, old, -outward, **bounds))
    # A ratio of 100 is capped.
    cap = dppo_tv(new, old, outward, delta_low=1.0, delta_high=1.0) / (-outward * new)
    assert cap.item() == pytest.approx(min(after / before, 10.0))


def test_dppo_of_certain_tokens_is_finite():
    """Probabilities that round to 1."""
    new = torch.tensor([[0.0, -1e-9, -2.0, 0.0]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0, 0.0, -2.0]])
    loss = dppo_kl(new, old, torch.tensor([[1.0, 1.0, -1.0, 1.0]])).sum()
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()
    assert new.grad[0, :2].tolist() == pytest.approx([-1.0, -1.0]) and new.grad[0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_is_of_the_old_policy_where_the_sampler_recorded_nothing(name):
    objective = PolicyObjective(name)
    fixed = {"old": OLD, "mask": MASK, "advantages": ADVANTAGES}
    nothing = evaluate(objective, NEW, sampler=torch.full_like(OLD, float("nan")), **fixed)
    for sampler in (None, OLD):
        loss, gradient = evaluate(objective, NEW, sampler=sampler, **fixed)
        assert loss == nothing[0] and torch.equal(gradient, nothing[1])
    partly = SAMPLER.clone()
    partly[0, 1:] = float("nan")
    mixed = torch.where(partly.isnan(), OLD, SAMPLER)
    assert evaluate(objective, NEW, sampler=partly, **fixed)[0] == evaluate(objective, NEW, sampler=mixed, **fixed)[0]
    assert evaluate(objective, NEW, sampler=SAMPLER, **fixed)[0] != nothing[0]


# ---- Against loops, with autograd of scalars ----


# name -> options that make each branch occur on a few tokens.
OPTIONS = {
    "sapo": {"temperature_pos": 0.7, "temperature_neg": 1.9},
    "gmpo": {"log_clip": 0.2},
    "gspo_token": {"epsilon": 0.05, "epsilon_high": 0.1},
    "luspo": {"epsilon": 0.05, "epsilon_high": 0.1},
    "vespo": {"k_pos": 1.5, "lambda_pos": 2.5, "k_neg": 3.5, "lambda_neg": 1.0},
    "dppo_tv": {"delta_low": 0.1, "delta_high": 0.05, "ratio_cap": 1.3},
    "dppo_kl": {"delta_low": 0.02, "delta_high": 0.01, "ratio_cap": 1.3},
    # All candidates are drawn, so that there is no choice among them.
    "clip_cov": {"epsilon": 0.3, "epsilon_high": 0.3, "share": 1.0, "cov_low": 0.3, "cov_high": 1.5},
    "kl_cov": {"share": 0.25, "coefficient": 0.6},
}


def negative_batch(seed):
    """A ragged batch whose log-probabilities are all below 0, as those of probabilities are."""
    new, old, sampler, mask, advantages = ragged_batch(seed)
    return new - 0.6, old - 0.6, sampler - 0.6, mask, advantages


def objective_of(name):
    flags = {key: value for key, value in OPTIONS[name].items() if key in LOSS_SETTINGS}
    return PolicyObjective(name, **flags, options={k: v for k, v in OPTIONS[name].items() if k not in flags})


# One geometric mean for each response has one advantage.
CASES = [(name, each) for name in ROWS for each in (False, True) if (name, each) != ("gmpo", True)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name, has_token_advantages", CASES)
def test_value_and_gradient_against_loops(name, has_token_advantages, seed):
    """At padding everything is NaN for the tensors, and the loops never look there."""
    new, old, sampler, mask, advantages = negative_batch(seed)
    if has_token_advantages:
        advantages = advantages[:, None] + torch.linspace(-0.8, 0.9, mask.numel(), dtype=new.dtype).view(mask.shape)
    objective = objective_of(name)
    leaves = [[value.clone().requires_grad_() for value in row] for row in new]
    shared = advantages if has_token_advantages else advantages[:, None].expand_as(new)
    surrogate = "clip" if name == "luspo" else name
    rows = surrogate_by_loops(
        surrogate, leaves, old.tolist(), sampler.tolist(), mask.tolist(), shared.tolist(), OPTIONS[name]
    )
    expected = {
        "sequence_mean": lambda: sum(sum(row) / len(row) for row in rows if row) / len(rows),
        "token_mean": lambda: sum(map(sum, rows)) / sum(map(len, rows)),
        "constant": lambda: sum(map(sum, rows)) / len(rows) / 7.0,
        "sum": lambda: sum(map(sum, rows)) / len(rows),
    }[objective.aggregation]()
    expected.backward()
    slope = torch.stack([torch.stack([v.grad if v.grad is not None else 0 * v.detach() for v in r]) for r in leaves])

    padding, nan = mask == 0, float("nan")
    shown = advantages.masked_fill(padding, nan) if has_token_advantages else advantages
    found = evaluate(
        objective,
        new.masked_fill(padding, nan),
        old=old.masked_fill(padding, -math.inf),
        mask=mask,
        advantages=shown,
        sampler=sampler.masked_fill(padding, nan),
    )
    assert found[0] == pytest.approx(expected.item(), abs=1e-9)
    assert torch.allclose(found[1], slope, atol=1e-9, rtol=0)
    assert slope.abs().max() > 1e-3


# ---- What holds for all ----


@pytest.mark.parametrize("name", ROWS)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """-A at each token, times the weight of the reduction; `clip_cov` drops no token here, for lack of a candidate."""
    _, old, _, mask, advantages = ragged_batch(seed=4)
    objective = PolicyObjective(name, options={"cov_low": 100.0, "cov_high": 200.0} if name == "clip_cov" else None)
    _, gradient = evaluate(objective, old, old=old, mask=mask, advantages=advantages, sampler=old)
    plain = PolicyLoss(surrogate="reinforce", ratio="none", aggregation=objective.aggregation)
    _, expected = evaluate(plain, old, old=old, mask=mask, advantages=advantages)
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_padding_and_the_order_of_rows_change_nothing(name):
    new, old, sampler, mask, advantages = negative_batch(seed=7)
    options = {
        key: value for key, value in OPTIONS[name].items() if key not in ("epsilon", "epsilon_high", "ratio_cap")
    }
    objective = PolicyObjective(name, options=options)
    fixed = {"old": old, "mask": mask, "advantages": advantages, "sampler": sampler}
    loss, gradient = evaluate(objective, new, **fixed)
    order = torch.tensor([3, 1, 4, 0, 2])
    moved = evaluate(objective, new[order], **{key: value[order] for key, value in fixed.items()})
    assert moved[0] == pytest.approx(loss, abs=1e-12) and torch.allclose(moved[1], gradient[order], atol=1e-12)

    def wider(values):
        return torch.cat([values, torch.full((len(values), 2), 0 if values is mask else math.nan)], 1).to(values.dtype)

    tensors = {key: value if key == "advantages" else wider(value) for key, value in fixed.items()}
    padded = evaluate(objective, wider(new), **tensors)
    assert padded[0] == pytest.approx(loss, abs=1e-12)
    assert (
        torch.allclose(padded[1][:, : new.shape[1]], gradient, atol=1e-12) and not padded[1][:, new.shape[1] :].any()
    )


def test_a_repeated_response_has_the_same_gradients_in_luspo_alone():
    """Each token twice: GSPO's gradient of a token halves, since 1 / L does."""
    for name, factor in (("gspo", 0.5), ("gspo_token", 0.5), ("luspo", 1.0)):
        objective = PolicyObjective(name, epsilon=0.5, epsilon_high=0.5)
        _, once = evaluate(objective, NEW[:1], old=OLD[:1], mask=MASK[:1], advantages=ADVANTAGES[:1])
        twice = {"old": OLD[:1].repeat(1, 2), "mask": MASK[:1].repeat(1, 2), "advantages": ADVANTAGES[:1]}
        _, gradient = evaluate(objective, NEW[:1].repeat(1, 2), **twice)
        assert torch.allclose(gradient[:, :3], factor * once, atol=1e-12)


def test_clip_cov_draws_with_the_seed():
    """Of 40 candidates among 100 tokens 5 are drawn: the same with the same seed, and each one sooner or later."""
    covariance = torch.full((10, 10), 0.5)
    covariance[:4] = 2.0
    zeros, mask = torch.zeros(10, 10), torch.ones(10, 10)

    def drawn(seed):
        torch.manual_seed(seed)
        return clip_cov(zeros, torch.ones(10), covariance, mask, share=0.05) == 0

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    counts = sum(drawn(seed).long() for seed in range(200))
    assert counts[4:].sum() == 0 and counts.sum() == 1000
    # 25 expected of each, with a standard deviation of 4.7.
    assert counts[:4].min() > 5 and counts[:4].max() < 50


@pytest.mark.parametrize("name", [name for name in ROWS if algorithms[name].surrogate != "clip" and name != "sapo"])
def test_a_surrogate_of_one_ratio_refuses_others(name):
    row = algorithms[name]
    other = {"token": "sequence", "sequence": "token"}[row.ratio]
    with pytest.raises(
        ValueError, match=f"--ratio {other} and --surrogate {name} contradict.*use --ratio {row.ratio}"
    ):
        PolicyObjective("grpo", surrogate=name, ratio=other)
    PolicyObjective("grpo", surrogate=name, ratio=row.ratio)
