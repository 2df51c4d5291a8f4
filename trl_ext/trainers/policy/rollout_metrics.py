"""Metrics that a `PolicyTrainer` logs for a rollout in addition to TRL's own."""

from __future__ import annotations

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_ext.losses import PolicyScores
from trl_ext.rollouts.diagnostics import diagnose_generations


def log_rollout(trainer, mode: str, rewards: Tensor, shaped: Tensor, finished: list[bool], output: dict) -> None:
    """Log extremes of the rewards, [N] over all processes, before and after penalties, and diagnostics of responses.

    `finished` and `output` are of this process's part of the rollout.
    """
    metrics = trainer._metrics[mode]
    known = rewards[~rewards.isnan()]
    if len(known):
        metrics["reward_min"].append(known.min().item())
        metrics["reward_max"].append(known.max().item())
        if not rewards.nan_to_num().equal(shaped.nan_to_num()):
            metrics["shaped_reward"].append(shaped.nanmean().item())
    metrics["unscorable"].append(rewards.isnan().float().mean().item())
    mask = output["completion_mask"].bool().cpu()
    ids = gather_object([row[kept].tolist() for row, kept in zip(output["completion_ids"].cpu(), mask, strict=True)])
    diagnostics = diagnose_generations(
        trainer.processing_class.batch_decode(ids, skip_special_tokens=True),
        token_ids=ids,
        finished=gather_object(finished),
        max_new_tokens=trainer.max_completion_length,
    )
    if diagnostics.distinct_2 is not None:
        metrics["distinct_2"].append(diagnostics.distinct_2)
    metrics["collapsed"].append(float(diagnostics.collapsed))


def log_reward_errors(trainer, mode: str, errors: int) -> None:
    """Log the number of rows, over all processes, on which reward functions failed and were skipped."""
    if trainer.args.reward_errors == "skip":
        trainer._metrics[mode]["reward_errors"].append(float(sum(gather_object([errors]))))


def log_clamped(trainer, scores: PolicyScores, ref_log_probs: Tensor | None, mode: str) -> None:
    """Log the share of a micro-batch's tokens, over all processes, that `PolicyObjective.clamped` marks."""
    clamped = trainer.objective.clamped(scores, ref_log_probs)
    counts = torch.stack([clamped.sum(), (scores.mask != 0).sum()]).float()
    beyond, tokens = trainer.accelerator.reduce(counts, reduction="sum").tolist()
    trainer._metrics[mode]["log_ratio/clamped"].append(beyond / max(tokens, 1))


def log_advantages(trainer, mode: str, advantages: Tensor) -> None:
    """Log statistics of the advantages over all processes, [N], and put them into TRL's table of completions."""
    metrics = trainer._metrics[mode]
    metrics["advantages/mean"].append(advantages.mean().item())
    metrics["advantages/std"].append(advantages.std(correction=0).item())
    metrics["advantages/min"].append(advantages.min().item())
    metrics["advantages/max"].append(advantages.max().item())
    # TRL has just added its own advantages.
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages.tolist())
