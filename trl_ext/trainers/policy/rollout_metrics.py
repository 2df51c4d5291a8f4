"""Metrics that a `PolicyTrainer` logs in addition to TRL's own of a rollout."""

from __future__ import annotations

import torch
from accelerate.utils import gather, gather_object
from torch import Tensor

from trl_ext.rollouts.diagnostics import distinct_ngram_ratio, find_collapse
from trl_ext.trainers.policy.reward_functions import Rewards


def log_ended(metrics: dict[str, list], rewards: Rewards) -> None:
    """Replace TRL's latest metrics of ended responses, which do not count those that end at a stop string."""
    lengths, ended = gather(rewards.lengths).float(), gather(rewards.finished)
    of_ended = lengths[ended] if ended.any() else torch.zeros(1)
    figures = {"clipped_ratio": (~ended).float().mean()}
    figures |= {f"{name}_terminated_length": getattr(of_ended, name)() for name in ("mean", "min", "max")}
    for name, value in figures.items():
        metrics[f"completions/{name}"][-1] = value.item()


def log_rollout(trainer, rewards: Tensor, shaped: Tensor, rollout: dict) -> None:
    """Log extremes of the rewards, [N] over all processes, before and after penalties, and diagnostics of responses.

    `rollout` is this process's part.
    """
    metrics = trainer.metrics
    known = rewards[~rewards.isnan()]
    if len(known):
        metrics["reward_min"].append(known.min().item())
        metrics["reward_max"].append(known.max().item())
        if not rewards.nan_to_num().equal(shaped.nan_to_num()):
            metrics["shaped_reward"].append(shaped.nanmean().item())
    metrics["unscorable"].append(rewards.isnan().float().mean().item())
    if trainer.group_size == 1:
        # TRL's share of groups with equal rewards is meaningless for groups of one.
        metrics.pop("frac_reward_zero_std", None)
    mask = rollout["completion_mask"].bool().cpu()
    ids = gather_object([row[kept].tolist() for row, kept in zip(rollout["completion_ids"].cpu(), mask, strict=True)])
    distinct = distinct_ngram_ratio(ids, 2)
    if distinct is not None:
        metrics["distinct_2"].append(distinct)
    metrics["collapsed"].append(float(bool(find_collapse(ids)[2])))


def log_advantages(trainer, advantages: Tensor) -> None:
    """Log statistics of the advantages over all processes, [N], and put them into TRL's table of completions."""
    figures = {"mean": advantages.mean(), "std": advantages.std(correction=0)}
    figures |= {"min": advantages.min(), "max": advantages.max()}
    for name, value in figures.items():
        trainer.metrics[f"advantages/{name}"].append(value.item())
    # TRL has just added its own advantages.
    table = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(table))):
        table.pop()
    table.extend(advantages.tolist())
