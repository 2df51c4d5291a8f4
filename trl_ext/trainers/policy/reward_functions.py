"""Reward functions of a policy trainer: the argument `reward_funcs`, and what they give a rollout."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather, is_peft_model
from torch import Tensor
from torch.nn import Module

from trl_ext.names import load_function
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.reward_guard import RewardGuard
from trl_ext.rewards import RewardEnsemble, RewardModel, share_or_load
from trl_ext.rewards.shaping import innermost
from trl_ext.trainers.policies import is_zero3


@dataclass
class Rewards:
    """What reward functions gave responses: N over all processes, n of them on this one.

    Attributes:
        by_function: [N, K]; NaN where a function gave no number, and throughout for a response on which one failed.
        finished: whether a response ended by itself or at a stop string, and not at the limit. [n]
        lengths: tokens of each response. [n]
        not_finite: whether a function gave a number that is not finite. [n]
        failed: this process's number of responses on which a function failed.
    """

    by_function: Tensor
    finished: Tensor
    lengths: Tensor
    not_finite: Tensor
    failed: int


def length_penalty(args, rewards: Rewards) -> Tensor:
    """What is taken off the rewards, [N], for a missing end and for length, by a `PolicyConfig`."""
    penalty = args.missing_eos_penalty * (~rewards.finished).to(rewards.by_function)
    if args.overlong_share:
        limit = args.max_completion_length
        penalty = penalty - soft_overlong(rewards.lengths.to(penalty), limit, args.overlong_share * limit)
    return gather(penalty)


def soft_overlong(lengths: Tensor, max_tokens: float, buffer: float) -> Tensor:
    """0 up to `max_tokens - buffer` tokens, then `(max_tokens - buffer - tokens) / buffer`, at least -1.

    Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 13.
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)


# ---- The argument `reward_funcs` ----


def as_reward_functions(given: Any, packing: str = "auto") -> list:
    """The reward functions as a list; None gives none.

    A name `file.py:function` or `module:function` becomes that function, another the `RewardModel` that is saved
    under it. Raises TypeError for something that cannot be called.
    """
    functions = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for index, function in enumerate(functions):
        if isinstance(function, str) and ":" in function:
            functions[index] = load_function(function, "reward function")
        elif isinstance(function, (str, os.PathLike)):
            functions[index] = RewardModel(function, packing=packing)
        elif not callable(function):
            raise TypeError(f"reward_funcs holds {function!r}: give functions, reward models, or names of either")
    return functions


def named_and_guarded(functions: list, guard: RewardGuard) -> tuple[dict[str, Any], list]:
    """The functions under unique names, and as a list with their faults handled; modules are left to TRL."""
    by_name: dict[str, Any] = {}
    guarded = []
    for function in functions:
        if isinstance(function, Module):
            guarded.append(function)
            continue
        wrapped = guard.wrap(function)
        names = (f"{wrapped.__name__}_{number}" for number in itertools.count(2))
        wrapped.__name__ = next(name for name in itertools.chain([wrapped.__name__], names) if name not in by_name)
        by_name[wrapped.__name__] = function
        guarded.append(wrapped)
    return by_name, guarded


# ---- Reward models ----


def reward_models(functions: list) -> list[RewardModel]:
    """The `RewardModel`s among the functions and among the members of ensembles."""
    plain = [innermost(function) for function in functions]
    members = [m for f in plain for m in (f.members if isinstance(f, RewardEnsemble) else [f])]
    return [member for member in members if isinstance(member, RewardModel)]


def place_reward_models(trainer, models: list[RewardModel]) -> None:
    """Put reward models on the policy's backbone where that can be done, or load them beside it."""
    reason = None
    if not is_peft_model(trainer.model):
        reason = "the policy is fully fine-tuned, so its weights do not stay those of a base"
    elif trainer.is_fsdp_enabled or is_zero3(trainer.accelerator):
        reason = "the policy is sharded, and processes may score different numbers of responses"
    elif trainer.use_vllm:
        reason = "what vLLM receives of the policy has not been tried with further adapters on it"
    policy, device = trainer.model if reason is None else None, trainer.accelerator.device
    share = trainer.args.share_backbone
    for line in share_or_load(models, policy, share, policy_reason=reason, device=device) if models else ():
        warn_once_per_run(f"reward model {line}")


# ---- Outside of a rollout ----


def reward_columns(
    trainer, rows: list[dict], responses: list[str], finished: list[bool], completion_ids: list[list[int]]
) -> dict[str, list[float | None]]:
    """Rewards of responses before shaping, by function and by member of an ensemble; None where there is none.

    Modules, which TRL scores itself, and functions that score groups are left out. `rows` have a `prompt`; their other
    columns reach the functions as in training.
    """
    prompts, columns, reported = [row["prompt"] for row in rows], {}, {}
    messages = isinstance(prompts[0], list)
    arguments = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    arguments |= {"prompts": prompts, "completion_ids": completion_ids, "finished": finished}
    arguments["completions"] = [[{"role": "assistant", "content": t}] for t in responses] if messages else responses
    arguments |= {
        "trainer_state": trainer.state,
        "log_extra": reported.__setitem__,
        "log_metric": lambda name, value: None,
    }
    for unique, given in trainer.plain_reward_functions.items():
        function, name = innermost(given), getattr(given, "inner_name", unique)
        if getattr(function, "scores_groups", False):
            continue
        rewards = trainer.reward_guard.wrap(function)(**arguments)
        if inspect.isawaitable(rewards):
            # TRL's event loop, since a notebook already runs one in this thread.
            rewards = asyncio.run_coroutine_threadsafe(rewards, trainer.async_loop).result()
        columns[unique if name in columns else name] = rewards
        for member in function.names if isinstance(function, RewardEnsemble) else ():
            columns[member] = reported.get(f"reward/{member}", [None] * len(rows))
    return columns
