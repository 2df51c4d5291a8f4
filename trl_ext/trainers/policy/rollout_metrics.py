"""Metrics that a `PolicyTrainer` logs for a rollout in addition to TRL's own."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from trl_ext.processes import warn_once_per_run
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
    if mode == "train" and trainer.rollouts == 0:
        _warn_of_empty(trainer, [len(row) for row in ids])
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


def log_clipped(trainer, share: Tensor, mask: Tensor, mode: str) -> None:
    """Log the share of a micro-batch's tokens, over all processes, with a clamped log-ratio."""
    metrics, count = trainer._metrics[mode], (mask != 0).sum()
    counts = torch.stack([share * count, count.to(share)])
    clamped, tokens = trainer.accelerator.reduce(counts, reduction="sum").tolist()
    metrics["log_ratio/clamped"].append(clamped / max(tokens, 1))
    if trainer.algorithm.surrogate == "gmpo":
        # TRL knows only the clip of the ratio, which this surrogate does not have, and has just logged zeros.
        for name in [name for name in metrics if name.startswith("clip_ratio/")]:
            del metrics[name]


def log_advantages(trainer, mode: str, advantages: Tensor, *, again: bool = False) -> None:
    """Log statistics of the advantages over all processes, [N], and put them into TRL's table of completions.

    `again` replaces the statistics that have been logged for this rollout.
    """
    figures = {"mean": advantages.mean(), "std": advantages.std(correction=0)}
    figures |= {"min": advantages.min(), "max": advantages.max()}
    for name, value in figures.items():
        logged = trainer._metrics[mode][f"advantages/{name}"]
        if again:
            logged.pop()
        logged.append(value.item())
    # TRL has just added its own advantages.
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages.tolist())


def _warn_of_empty(trainer, lengths: list[int]) -> None:
    """Warn, with a likely cause, if nearly all responses end at once, given their lengths over all processes."""
    ended = sum(length <= 1 for length in lengths)
    if trainer.max_completion_length == 1 or ended < 0.9 * len(lengths):
        return
    tokenizer, rows = trainer.processing_class, trainer.train_dataset
    why = "check that the model can continue such prompts"
    if isinstance(rows, Dataset) and isinstance(rows[0]["prompt"], str) and tokenizer.chat_template:
        why = (
            "the prompts are plain text, and the model expects its chat template: call their column prompt_text, "
            "which makes each a user's message, or give messages"
        )
    warn_once_per_run(
        f"{ended} of the {len(lengths)} responses of the first rollout are a single token, such as "
        f"{tokenizer.eos_token!r}, and nothing can be learned from them: {why}"
    )


def latest_rollout(trainer) -> list[tuple[Any, Any, dict[str, float]]]:
    """The prompt, the completion and the rewards by name of each response that an online trainer last logged.

    It reads what TRL's GRPO and RLOO trainers keep of all processes; other trainers have none.
    """
    logs = getattr(trainer, "_logs", None) or {}
    rewards = logs.get("rewards", {})
    rows = zip(logs.get("prompt", ()), logs.get("completion", ()), strict=False)
    return [
        (prompt, completion, {name: values[index] for name, values in rewards.items() if index < len(values)})
        for index, (prompt, completion) in enumerate(rows)
    ]
