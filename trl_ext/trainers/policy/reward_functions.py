"""Turns the `reward_funcs` argument into named functions, and calls them outside a rollout."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from typing import Any

import torch
from accelerate.utils import gather, is_peft_model
from torch import Tensor
from torch.nn import Module

from trl_ext.names import load_function, nearest
from trl_ext.processes import warn_once_per_run
from trl_ext.resilience.reward_guard import RewardGuard, function_name, ignore
from trl_ext.rewards import RewardEnsemble, RewardModel, share_or_load
from trl_ext.rewards.shaping import innermost
from trl_ext.trainers.policies import is_zero3

# What every reward function is given besides the columns of the data.
_OF_ROLLOUTS = ("prompts", "completions", "completion_ids", "finished", "environments")
_OF_ROLLOUTS += ("trainer_state", "log_extra", "log_metric")


def as_reward_functions(given: Any, packing: str = "auto") -> list:
    """The reward functions as a list; None gives none.

    A name `file.py:function` or `module:function` becomes that function, another the `RewardModel` that is saved
    under it.

    Raises:
        TypeError: something that cannot be called.
        FileNotFoundError, ValueError: see `load_function` and `RewardModel`.
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


def check_arguments(functions: list, columns: list[str]) -> None:
    """Raise ValueError for an argument without a default that is no column of the data and that no rollout has."""
    columns = [name for name in columns if name not in ("prompt", "completion")]
    given = (*_OF_ROLLOUTS, *columns)
    for function in map(innermost, functions):
        for name in () if isinstance(function, Module) else _needed(function):
            if name not in given:
                raise ValueError(
                    f"the reward function {function_name(function)!r} takes {name!r}, and the data have no such column"
                    f"{nearest(name, list(given))} Columns: {', '.join(columns)}"
                )


def _needed(function) -> list[str]:
    try:
        # A decorator may give what it wraps further arguments.
        arguments = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in arguments if one.default is one.empty and one.kind in kinds]


def length_penalty(trainer) -> Tensor:
    """What is taken off the rewards of the latest rollout, [N], for a missing end and for length."""
    rewards, finished, lengths = trainer._rollout
    args, tensor = trainer.args, functools.partial(torch.tensor, dtype=rewards.dtype, device=rewards.device)
    penalty = args.missing_eos_penalty * tensor([not ended for ended in finished])
    if args.overlong_share:
        limit = args.max_completion_length
        penalty = penalty - soft_overlong(tensor(lengths), limit, args.overlong_share * limit)
    return gather(penalty)


def soft_overlong(lengths: Tensor, max_tokens: float, buffer: float) -> Tensor:
    """0 up to `max_tokens - buffer` tokens, then `(max_tokens - buffer - tokens) / buffer`, at least -1.

    Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 13.
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)


def reward_models(functions: list) -> list[RewardModel]:
    """The `RewardModel`s among the functions and among the members of ensembles."""
    plain = [innermost(function) for function in functions]
    members = [m for f in plain for m in (f.members if isinstance(f, RewardEnsemble) else [f])]
    return [member for member in members if isinstance(member, RewardModel)]


def place_reward_models(trainer, models: list[RewardModel]) -> None:
    """Put reward models on the policy's backbone where that can be done, or load them beside it."""
    if not models:
        return
    reason = None
    if not is_peft_model(trainer.model):
        reason = "the policy is fully fine-tuned, so its weights do not stay those of a base"
    elif trainer.is_fsdp_enabled or is_zero3(trainer.accelerator):
        reason = "the policy is sharded, and processes may score different numbers of responses"
    elif trainer.use_vllm:
        reason = "what vLLM receives of the policy has not been tried with further adapters on it"
    for line in share_or_load(
        models,
        trainer.model if reason is None else None,
        trainer.args.share_backbone,
        policy_reason=reason,
        device=trainer.accelerator.device,
    ):
        warn_once_per_run(f"reward model {line}")


def named_and_guarded(functions: list, guard: RewardGuard) -> tuple[dict[str, Any], list]:
    """The functions under unique names, and as a list with their faults handled; modules are left to TRL."""
    by_name: dict[str, Any] = {}
    guarded = []
    for function in functions:
        if isinstance(function, Module):
            guarded.append(function)
            continue
        wrapped = guard.wrap(function)
        name, number = wrapped.__name__, 1
        while wrapped.__name__ in by_name:
            number += 1
            wrapped.__name__ = f"{name}_{number}"
        by_name[wrapped.__name__] = function
        guarded.append(wrapped)
    return by_name, guarded


def reward_columns(
    trainer,
    rows: list[dict[str, Any]],
    responses: list[str],
    finished: list[bool],
    completion_ids: list[list[int]],
) -> dict[str, list[float | None]]:
    """Rewards of responses by function name.

    Args:
        trainer: a `PolicyTrainer`, whose `reward_errors` decides how a failing function is handled.
        rows: dataset rows with `prompt`; their other columns reach the functions as they do in training.
        responses: one text per row.
        finished: whether each response ended by itself.
        completion_ids: the responses as token ids.

    Returns:
        Name -> one finite reward per row, None where there is none. Modules, which TRL scores itself, and functions
        that score groups are left out.

    Raises:
        RewardError: a function failed, and errors are not skipped.
    """
    prompts = [row["prompt"] for row in rows]
    messages = isinstance(prompts[0], list)
    of_members: dict[str, list[float | None]] = {}

    def report(column: str, values: list[float | None]) -> None:
        of_members[column.removeprefix("reward/")] = values

    arguments = {
        "prompts": prompts,
        "completions": [[{"role": "assistant", "content": t}] for t in responses] if messages else responses,
        "completion_ids": completion_ids,
        "finished": finished,
        "trainer_state": trainer.state,
        "log_extra": report,
        "log_metric": ignore,
        **{key: [row[key] for row in rows] for key in rows[0] if key not in ("prompt", "completion")},
    }
    # A separate guard, since the trainer still needs the faults of its latest rollout.
    guard = RewardGuard(trainer.args.reward_errors, trainer.args.reward_timeout)
    columns: dict[str, list[float | None]] = {}
    for name, given in trainer.plain_reward_functions.items():
        # Without shaping: batch statistics mean nothing here, and running ones belong to training.
        function = innermost(given)
        if getattr(function, "scores_groups", False):
            # It compares several responses to a prompt, and here there is one per prompt.
            continue
        if function is not given and function_name(function) not in columns:
            name = function_name(function)
        rewards = guard.wrap(function)(**arguments)
        if inspect.isawaitable(rewards):
            # TRL's event loop, since a notebook already runs one in this thread.
            rewards = asyncio.run_coroutine_threadsafe(rewards, trainer.async_loop).result()
        columns[name] = rewards
        members = function.names if isinstance(function, RewardEnsemble) else []
        for member in members:
            columns[member] = of_members.get(member, [None] * len(rows))
    return columns
