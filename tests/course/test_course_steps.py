"""The course's policy losses and micro-batch steps: by hand, and token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch

from trl_ext import course

# The batch of tests/losses/test_policy_losses.py: two responses of 3 and 2 tokens. Ratios 1.349859, 0.904837, 1.051271
# and 0.670320, 1.221403; the clip at 0.2 makes the loss larger at the first token of each.
LOG_RATIO = torch.tensor([[0.3, -0.1, 0.05], [-0.4, 0.2, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
REWARDS = torch.tensor([[1.0], [0.0]])
ADVANTAGES = torch.tensor([[1.0], [-1.0]])
NEW = torch.tensor([[-1.0, -0.7, -0.5], [-2.0, -0.3, -0.9]])
GIVEN = {"raw_rewards": REWARDS, "advantages": ADVANTAGES, "old_log_probs": NEW - LOG_RATIO, "cliprange": 0.2}


# ------------------------------------------------------------------------------------------------- policy losses


def test_naive_loss_by_hand():
    """-1 * -1, -1 * -0.7, ...; and 1 * -2, 1 * -0.3, ..."""
    expected = torch.tensor([[1.0, 0.7, 0.5], [-2.0, -0.3, -0.9]])
    assert torch.equal(course.naive_policy_gradient_loss(ADVANTAGES, NEW), expected)
    assert torch.equal(course.naive_policy_gradient_loss(ADVANTAGES[:, 0], NEW), expected)
    assert torch.equal(course.naive_policy_gradient_loss(ADVANTAGES.expand(2, 3), NEW), expected)


def test_clip_loss_by_hand():
    """Row 1: -1.2 (clipped), -0.904837, -1.051271. Row 2: 0.8 (clipped), 1.221403, which no clip may lower, and 1."""
    losses, metadata = course.grpo_clip_loss(ADVANTAGES, NEW, NEW - LOG_RATIO, 0.2)
    expected = torch.tensor([[-1.2, -0.904837, -1.051271], [0.8, 1.221403, 1.0]])
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=0)
    assert metadata["clipped"].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert metadata["clip_fraction"].item() == pytest.approx(2 / 6)


def token_loss(loss_type: str, log_prob: float, old: float, reward: float, advantage: float, cliprange: float):
    """Loss of one token, and its derivative by the token's log-probability."""
    if loss_type == "no_baseline":
        return -reward * log_prob, -reward, False
    if loss_type == "reinforce_with_baseline":
        return -advantage * log_prob, -advantage, False
    ratio = math.exp(log_prob - old)
    clipped_ratio = min(max(ratio, 1 - cliprange), 1 + cliprange)
    if loss_type == "grpo_clip" and clipped_ratio * advantage < ratio * advantage:
        return -clipped_ratio * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


def random_batch(seed: int = 0):
    """5 responses of 0 to 9 tokens with ratios of about 0.5 to 2, in float64."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -3 * torch.rand(5, 9, generator=generator, dtype=torch.float64)
    old = log_probs + 0.4 * torch.randn(5, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [4], [1], [0], [6]])
    mask[0, 2:5] = False
    rewards, advantages = torch.randn(2, 5, 1, generator=generator, dtype=torch.float64)
    arguments = {"raw_rewards": rewards, "advantages": advantages, "old_log_probs": old, "cliprange": 0.15}
    return log_probs.requires_grad_(), mask, arguments


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"])
def test_losses_and_gradients_token_by_token(loss_type):
    """Per token, and then the step: each row's mean, over 5 rows and 3 micro-batches; an empty row counts as 0."""
    log_probs, mask, arguments = random_batch()
    losses, metadata = course.policy_gradient_loss(log_probs, loss_type, **arguments)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    loss, step_metadata = course.policy_microbatch_step(log_probs, mask, 3, loss_type, **arguments)
    total, clipped_tokens, clipped_counted = 0.0, 0, 0
    for row in range(5):
        length = int(mask[row].sum())
        for t in range(9):
            value, slope, clipped = token_loss(
                loss_type,
                log_probs[row, t].item(),
                arguments["old_log_probs"][row, t].item(),
                arguments["raw_rewards"][row].item(),
                arguments["advantages"][row].item(),
                0.15,
            )
            weight = 1 / (length * 5 * 3) if mask[row, t] else 0.0
            assert losses[row, t].item() == pytest.approx(value, rel=1e-12)
            assert gradient[row, t].item() == pytest.approx(slope, rel=1e-12)
            assert log_probs.grad[row, t].item() == pytest.approx(weight * slope, rel=1e-12)
            assert metadata["clipped"][row, t].item() == clipped
            total += weight * value
            clipped_tokens += clipped
            clipped_counted += clipped and bool(mask[row, t])
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert metadata["clip_fraction"].item() == pytest.approx(clipped_tokens / 45)
    assert torch.equal(step_metadata["clipped"], metadata["clipped"] & mask)
    assert step_metadata["clip_fraction"].item() == pytest.approx(clipped_counted / int(mask.sum()))
    assert (clipped_counted > 2) == (loss_type == "grpo_clip")


def test_no_gradient_through_the_old_policy():
    """The same tensor for both: ratio 1, and the gradient of -A log p, not zero."""
    log_probs = NEW.clone().requires_grad_()
    losses, _ = course.policy_gradient_loss(log_probs, "grpo_no_clip", advantages=ADVANTAGES, old_log_probs=log_probs)
    losses.sum().backward()
    assert losses.tolist() == [[-1] * 3, [1] * 3]
    assert log_probs.grad.tolist() == [[-1] * 3, [1] * 3]


@pytest.mark.parametrize(
    "loss_type, missing",
    [
        ("no_baseline", ["raw_rewards"]),
        ("reinforce_with_baseline", ["advantages"]),
        ("grpo_clip", ["advantages"]),
        ("grpo_clip", ["old_log_probs", "cliprange"]),
        ("grpo_no_clip", ["old_log_probs"]),
    ],
)
def test_a_missing_argument_is_named(loss_type, missing):
    given = {name: None if name in missing else value for name, value in GIVEN.items()}
    message = f"^missing for the loss_type '{loss_type}': {', '.join(missing)}$"
    with pytest.raises(ValueError, match=message):
        course.policy_gradient_loss(NEW, loss_type, **given)
    with pytest.raises(ValueError, match=message):
        course.policy_microbatch_step(NEW.clone().requires_grad_(), MASK, 1, loss_type, **given)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"^policy_log_probs must have the shape \[B, T\], got \[3\]$"):
        course.naive_policy_gradient_loss(ADVANTAGES, NEW[0])
    message = r"^raw_rewards_or_advantages must have the shape \[2, 1\], \[2\] or \[2, 3\], got \[3\]$"
    with pytest.raises(ValueError, match=message):
        course.naive_policy_gradient_loss(torch.ones(3), NEW)
    with pytest.raises(ValueError, match=r"^advantages must have the shape \[2, 1\]"):
        course.grpo_clip_loss(ADVANTAGES.T, NEW, NEW, 0.2)
    with pytest.raises(ValueError, match=r"^old_log_probs must have the shape of policy_log_probs, \[2, 3\], got \[2"):
        course.grpo_clip_loss(ADVANTAGES, NEW, NEW[:, :2], 0.2)
    with pytest.raises(ValueError, match="^cliprange must be a number from 0 up, got -0.2$"):
        course.grpo_clip_loss(ADVANTAGES, NEW, NEW, -0.2)
    with pytest.raises(ValueError, match="^unknown loss_type 'grpo-clip'; did you mean 'grpo_clip'. Known: no_base"):
        course.policy_gradient_loss(NEW, "grpo-clip", **GIVEN)


# --------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
    "loss_type, expected",
    [
        # Rows (1 + 0.7 + 0.5) / 3 and 0.
        ("no_baseline", 0.366667),
        # Rows 0.733333 and -(2 + 0.3) / 2.
        ("reinforce_with_baseline", -0.208333),
        # Rows -3.156108 / 3 and 2.021403 / 2.
        ("grpo_clip", -0.020667),
        # Rows -(1.349859 + 0.904837 + 1.051271) / 3 and (0.670320 + 1.221403) / 2.
        ("grpo_no_clip", -0.078064),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_policy_step_by_hand(loss_type, expected, accumulation):
    log_probs = NEW.clone().requires_grad_()
    loss, metadata = course.policy_microbatch_step(log_probs, MASK, accumulation, loss_type, **GIVEN)
    assert loss.item() == pytest.approx(expected / accumulation, abs=1e-6)
    assert not loss.requires_grad and loss.shape == ()
    # Two of the five tokens that count.
    assert metadata["clip_fraction"].item() == pytest.approx(0.4 if loss_type == "grpo_clip" else 0)
    assert log_probs.grad[1, 2] == 0


def test_sft_step_by_hand():
    """Rows 2.2 / 10 and 2.3 / 10; (0.22 + 0.23) / 2 / 4 = 0.05625. A token that counts has -1 / (10 * 2 * 4)."""
    log_probs = NEW.clone().requires_grad_()
    loss, metadata = course.sft_microbatch_step(log_probs, MASK, 4, normalize_constant=10.0)
    assert loss.item() == pytest.approx(0.05625)
    assert not loss.requires_grad
    assert log_probs.grad.tolist() == [pytest.approx([-0.0125] * 3), pytest.approx([-0.0125, -0.0125, 0])]
    assert metadata["token_count"].item() == 5
    assert metadata["mean_log_prob"].item() == pytest.approx(-4.5 / 5)


def test_sft_step_against_loops():
    log_probs, mask, _ = random_batch(seed=1)
    loss, _ = course.sft_microbatch_step(log_probs, mask, 3, 7.0)
    total = sum(log_probs[row, t].item() for row in range(5) for t in range(9) if mask[row, t])
    assert loss.item() == pytest.approx(-total / 7 / 5 / 3, rel=1e-12)
    torch.testing.assert_close(log_probs.grad, -mask.double() / (7 * 5 * 3))


def test_accumulated_steps_are_one_step_of_the_whole_batch():
    log_probs, mask, arguments = random_batch(seed=2)
    rows = [0, 1, 2, 4]
    course.policy_microbatch_step(
        log_probs[rows], mask[rows], 1, "grpo_clip", *(_take(value, rows) for value in arguments.values())
    )
    whole = log_probs.grad.clone()
    log_probs.grad = None
    for part in ([0, 1], [2, 4]):
        selected = [_take(value, part) for value in arguments.values()]
        course.policy_microbatch_step(log_probs[part], mask[part], 2, "grpo_clip", *selected)
    torch.testing.assert_close(log_probs.grad, whole)


def _take(value, rows):
    return value[rows] if isinstance(value, torch.Tensor) else value


def test_bad_steps():
    log_probs = NEW.clone().requires_grad_()
    with pytest.raises(
        ValueError, match=r"^response_mask must have the shape of policy_log_probs, \[2, 3\], got \[2\]"
    ):
        course.sft_microbatch_step(log_probs, MASK[:, 0], 1)
    with pytest.raises(ValueError, match="^gradient_accumulation_steps must be positive, got 0$"):
        course.policy_microbatch_step(log_probs, MASK, 0, "grpo_clip", **GIVEN)
    with pytest.raises(ValueError, match="^normalize_constant must be positive, got -1$"):
        course.sft_microbatch_step(log_probs, MASK, 1, -1)
    with pytest.raises(ValueError, match="^policy_log_probs has no gradient: compute it with the policy outside"):
        course.sft_microbatch_step(NEW, MASK, 1)
