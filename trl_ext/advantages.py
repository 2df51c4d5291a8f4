"""Advantages as pure functions of rewards, in groups of responses to one prompt.

Rewards are [N], with the `group_size` responses to a prompt consecutive; advantages are [N]. A reward that is not
finite (NaN or an infinity) marks a response that could not be scored: it is left out of the statistics of its group,
and its advantage is 0. Estimators that compare the responses of a group give advantages of exactly 0 if all rewards
of the group are equal, or fewer than two responses could be scored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_ext.names import check_choice, load_function


@dataclass
class _Groups:
    """Rewards as one row per group, [N / group_size, group_size]; `values` is 0 where a reward is not finite."""

    values: Tensor
    scorable: Tensor

    @classmethod
    def of(cls, rewards: Tensor, group_size: int) -> _Groups:
        if rewards.dim() != 1:
            raise ValueError(f"rewards must be one-dimensional, got shape {list(rewards.shape)}")
        if group_size < 1 or rewards.numel() % group_size:
            raise ValueError(
                f"{rewards.numel()} rewards do not divide into groups of {group_size}: group_size must divide them"
            )
        # In half precision, means and deviations would round away the differences between responses.
        values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32)).reshape(-1, group_size)
        scorable = values.isfinite()
        return cls(values.masked_fill(~scorable, 0), scorable)

    @property
    def count(self) -> Tensor:
        return self.scorable.sum(1, keepdim=True)

    @property
    def mean(self) -> Tensor:
        return self.values.sum(1, keepdim=True) / self.count.clamp(min=1)

    @property
    def varied(self) -> Tensor:
        """Whether a group has two different rewards, [groups, 1]. Rounding can move equal ones off their mean."""
        lowest = self.values.masked_fill(~self.scorable, float("inf")).amin(1, keepdim=True)
        return self.values.masked_fill(~self.scorable, float("-inf")).amax(1, keepdim=True) > lowest

    def finish(self, advantages: Tensor, has_signal: Tensor) -> Tensor:
        """Advantages as [N], 0 where a response could not be scored or its group has no signal."""
        return advantages.masked_fill(~(self.scorable & has_signal), 0).reshape(-1)


def _std(values: Tensor, counted: Tensor, ddof: int) -> Tensor:
    """Standard deviation of each row's counted values, [rows, 1]."""
    if ddof not in (0, 1):
        raise ValueError(f"std_ddof must be 0 (population) or 1 (sample), got {ddof}")
    count = counted.sum(1, keepdim=True)
    mean = values.masked_fill(~counted, 0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).masked_fill(~counted, 0).square().sum(1, keepdim=True)
    return (squares / (count - ddof).clamp(min=1)).sqrt()


def group_normalized(rewards: Tensor, group_size: int, std_ddof: int = 0, eps: float = 1e-6) -> Tensor:
    """GRPO: `(r - mean) / (std + eps)` within the group. [N].

    Args:
        rewards: [N]; those that are not finite are left out of the statistics and have advantages 0.
        group_size: responses per prompt.
        std_ddof: 0 for the population's standard deviation, 1 for the sample's. The paper does not say; TRL and verl
            use the sample's. Their ratio is `sqrt((G - 1) / G)`.
        eps: 1e-4 in TRL.

    Raises:
        ValueError: `group_size` does not divide N, or `std_ddof` is neither 0 nor 1.

    Shao et al. 2024, arXiv 2402.03300, section 4.1.2.
    """
    groups = _Groups.of(rewards, group_size)
    scale = _std(groups.values, groups.scorable, std_ddof) + eps
    return groups.finish((groups.values - groups.mean) / scale, groups.varied)


def group_centered(rewards: Tensor, group_size: int) -> Tensor:
    """Dr.GRPO: `r - mean` of the group, not divided by a deviation. [N]. Liu et al. 2025, arXiv 2503.20783."""
    groups = _Groups.of(rewards, group_size)
    return groups.finish(groups.values - groups.mean, groups.varied)


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """RLOO: `r` minus the mean of the group's other rewards, unbiased. [N]. Ahmadian et al. 2024, arXiv 2402.14740."""
    groups = _Groups.of(rewards, group_size)
    # Multiply first: the quotient of two counts would be in single precision.
    scaled = groups.count * (groups.values - groups.mean)
    return groups.finish(scaled / (groups.count - 1).clamp(min=1), groups.varied)


def group_rank(rewards: Tensor, group_size: int, scale: float = 1.0) -> Tensor:
    """Centred rank: `scale (below - above) / (G - 1)`, counting the group's smaller and larger rewards. [N].

    The values range from `-scale` for the worst to `scale` for the best, and are the same for equal rewards; they are
    invariant under monotone transforms of the rewards. `scale=2` is GOPO, arXiv 2602.03876.
    """
    groups = _Groups.of(rewards, group_size)
    own, others = groups.values.unsqueeze(2), groups.values.unsqueeze(1)
    counted = groups.scorable.unsqueeze(1)
    difference = ((own > others) & counted).sum(2) - ((own < others) & counted).sum(2)
    ranks = scale * difference.to(groups.values.dtype) / (groups.count - 1).clamp(min=1)
    return groups.finish(ranks, groups.varied)


def greedy_baseline(rewards: Tensor, group_size: int, greedy_rewards: Tensor) -> Tensor:
    """ReMax: `r` minus the reward of the greedy response to the prompt. [N].

    `greedy_rewards` are [N / group_size]; a group whose greedy response could not be scored has advantages 0. Groups
    may have one response.
    Li et al. 2023, arXiv 2310.10505.
    """
    groups = _Groups.of(rewards, group_size)
    if greedy_rewards.shape != groups.values.shape[:1]:
        raise ValueError(
            f"greedy_rewards must hold one reward per group, [{len(groups.values)}], "
            f"got shape {list(greedy_rewards.shape)}"
        )
    baseline = greedy_rewards.detach().to(groups.values).unsqueeze(1)
    return groups.finish(groups.values - baseline, baseline.isfinite())


def batch_normalized(
    rewards: Tensor,
    group_size: int,
    std_ddof: int = 0,
    eps: float = 1e-6,
    baseline: str = "group",
    std_of: str = "rewards",
) -> Tensor:
    """`(r - baseline) / (std + eps)` with the standard deviation of the whole batch. [N].

    - By default: Lite-PPO, arXiv 2508.08221.
    - `std_of="advantages"`: REINFORCE++-baseline, arXiv 2501.03262: divides by the std of the centred rewards.
    - `baseline="batch"`: REINFORCE++, same paper, for one response per prompt. It ignores groups, so a group of equal
      rewards has a signal; a batch of equal rewards has none.

    Args:
        rewards: [N], the whole batch over all processes; each counts once, whatever the response's length.
        group_size, std_ddof, eps: see `group_normalized`.
        baseline: mean of the `group` or of the `batch`.
        std_of: whether the deviation is that of the `rewards` or of the centred ones, the `advantages`.

    Raises:
        ValueError: `group_size` does not divide N, or an unknown option.
    """
    if baseline not in ("group", "batch"):
        raise ValueError(f"baseline must be 'group' or 'batch', got {baseline!r}")
    if std_of not in ("rewards", "advantages"):
        raise ValueError(f"std_of must be 'rewards' or 'advantages', got {std_of!r}")
    groups = _Groups.of(rewards, group_size)
    batch = _Groups(groups.values.reshape(1, -1), groups.scorable.reshape(1, -1))
    reference = groups if baseline == "group" else batch
    has_signal = reference.varied
    centered = (groups.values - reference.mean).masked_fill(~(groups.scorable & has_signal), 0)
    spread = batch.values if std_of == "rewards" else centered.reshape(1, -1)
    scale = _std(spread, batch.scorable, std_ddof) + eps
    return groups.finish(centered / scale, has_signal)


def mean_normalized(rewards: Tensor, group_size: int, eps: float = 1e-6) -> Tensor:
    """MaxRL: `(r - mean) / (mean + eps)` of the group, for rewards of 0 and 1 or from 0 up. [N].

    For binary rewards, the expected update is that of a sum of pass@k, and of the log-likelihood as the group grows.
    arXiv 2602.02710.

    Raises:
        ValueError: `group_size` does not divide N, or a reward is negative: a negative mean would flip the signs of
            the advantages.
    """
    groups = _Groups.of(rewards, group_size)
    lowest = groups.values.amin() if groups.values.numel() else 0.0
    if lowest < 0:
        raise ValueError(f"mean_normalized divides by the group's mean and needs rewards from 0 up, got {lowest:g}")
    return groups.finish((groups.values - groups.mean) / (groups.mean + eps), groups.varied)


def length_weighted(rewards: Tensor, group_size: int, lengths: Tensor) -> Tensor:
    """OPO: `r` minus the mean of the group's rewards weighted by length, for exactly on-policy updates. [N].

    `lengths` are the tokens of each response, [N].
    Hao et al. 2025, arXiv 2505.23585.
    """
    groups = _Groups.of(rewards, group_size)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths must have the rewards' shape {list(rewards.shape)}, got {list(lengths.shape)}")
    weights = lengths.to(groups.values).reshape(groups.values.shape).masked_fill(~groups.scorable, 0)
    total = weights.sum(1, keepdim=True)
    baseline = (weights * groups.values).sum(1, keepdim=True) / total.clamp(min=1)
    return groups.finish(groups.values - baseline, groups.varied & (total > 0))


def no_baseline(rewards: Tensor, group_size: int) -> Tensor:
    """The rewards themselves, 0 for those that are not finite. [N]. Unbiased, with the highest variance."""
    groups = _Groups.of(rewards, group_size)
    return groups.finish(groups.values, groups.scorable)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, and the returns that a value function is fitted to.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}`, over the tokens that count, with
    `V = A = 0` after the last of them; returns are `A + V`.

    Args:
        rewards: reward at each token, [B, T].
        values: estimated value before each token, [B, T].
        mask: 1 where a token counts, [B, T]; other tokens are skipped, wherever they are.
        gamma: discount per token, in [0, 1].
        lam: from 0 for one-step differences to 1 for whole returns, in [0, 1].

    Returns:
        Advantages and returns, [B, T] each, in float32 at least, without gradient, 0 where the mask is 0.

    Raises:
        ValueError: shapes that differ, or `gamma` or `lam` outside [0, 1].

    Schulman et al. 2015, arXiv 1506.02438, equation 16.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.dim() != 2:
        raise ValueError(
            f"gae needs rewards, values and mask of one shape [B, T], got {list(rewards.shape)}, "
            f"{list(values.shape)} and {list(mask.shape)}"
        )
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma and lam must lie in [0, 1], got {gamma} and {lam}")
    counts = mask != 0
    # In bfloat16, a lambda of 0.998 would be 0.996.
    values = values.detach().to(torch.promote_types(values.dtype, torch.float32)).masked_fill(~counts, 0)
    lam = values.new_tensor(lam)
    rewards = rewards.detach().to(values.dtype).masked_fill(~counts, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        here = counts[:, step]
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(here, values[:, step], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
        advantages[:, step] = torch.where(here, advantage, 0)
    return advantages, advantages + values


def clip_advantages(advantages: Tensor, limit: float) -> Tensor:
    """Advantages clipped to `[-limit, limit]`; `limit` must be positive."""
    if not limit > 0:
        raise ValueError(f"advantages are clipped to plus and minus limit, which must be positive, got {limit}")
    return advantages.clamp(-limit, limit)


# Inputs that a trainer passes to an advantage with a parameter of this name; all other parameters are its options.
INPUTS = ("greedy_rewards", "lengths", "components", "weights")
ADVANTAGES: dict[str, Callable] = {
    function.__name__: function
    for function in (
        group_normalized,
        group_centered,
        leave_one_out,
        group_rank,
        greedy_baseline,
        batch_normalized,
        mean_normalized,
        length_weighted,
        no_baseline,
    )
}


def function_of(advantage: str | Callable) -> Callable:
    """The function with this name or from `file.py:function`; your own function is returned unchanged."""
    if callable(advantage):
        return advantage
    if ":" in advantage:
        return load_function(advantage, "advantage")
    check_choice("advantage", advantage, ADVANTAGES)
    return ADVANTAGES[advantage]


def options_of(advantage: str | Callable) -> Mapping[str, inspect.Parameter]:
    """Parameters of an advantage function other than `rewards` and `group_size`."""
    parameters = inspect.signature(function_of(advantage)).parameters
    return dict(list(parameters.items())[2:])
