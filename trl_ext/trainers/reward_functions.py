"""A trainer's reward functions: what is given made into named functions, and what they give outside a rollout."""

from __future__ import annotations

import asyncio
import inspect
import os
from typing import Any

from torch.nn import Module

from trl_ext.rewards import RewardEnsemble, RewardModel, ShapedReward
from trl_ext.rewards.shaping import innermost
from trl_ext.trainers.reward_guard import RewardGuard, function_name, ignore


def as_reward_functions(given: Any, packing: str = "auto") -> list:
    """The reward functions as a list, a folder or hub name as the `RewardModel` that is saved there; None for none."""
    functions = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [
        RewardModel(function, packing=packing) if isinstance(function, (str, os.PathLike)) else function
        for function in functions
    ]


def reward_models(functions: list) -> list[RewardModel]:
    """The `RewardModel`s among the functions and among the members of ensembles."""
    plain = [innermost(function) for function in functions]
    members = [m for f in plain for m in (f.members if isinstance(f, RewardEnsemble) else [f])]
    return [member for member in members if isinstance(member, RewardModel)]


def named_and_guarded(functions: list, guard: RewardGuard) -> tuple[dict[str, Any], list]:
    """The functions by a name of their own, and as a list with their faults handled; modules are left to TRL."""
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
        trainer: a `PolicyTrainer`, whose `reward_errors` says what to do with a function that fails.
        rows: dataset rows with `prompt`; their other columns reach the functions as they do in training.
        responses: one text per row.
        finished: which of them ended by themselves.
        completion_ids: the responses as token ids.

    Returns:
        Name -> one finite reward per row, None where there is none. Modules, which TRL scores itself, and functions
        that score groups are left out.

    Raises:
        RewardError: a function failed, and errors are not skipped.
    """
    prompts = [row["prompt"] for row in rows]
    messages = isinstance(prompts[0], list)
    report = _Report()
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
    # Not the trainer's: the faults of its latest rollout are still to be dealt with.
    guard = RewardGuard(trainer.args.reward_errors, trainer.args.reward_timeout)
    columns: dict[str, list[float | None]] = {}
    for name, given in trainer.plain_reward_functions.items():
        # As it is without shaping: statistics of a batch mean nothing here, and running ones are of training.
        function = innermost(given)
        if getattr(function, "scores_groups", False):
            # It compares the responses to a prompt, and these are one to each.
            continue
        if function is not given and function_name(function) not in columns:
            name = function_name(function)
        rewards = guard.wrap(function)(**arguments)
        if inspect.isawaitable(rewards):
            # On TRL's own loop: a notebook has one running in this thread.
            rewards = asyncio.run_coroutine_threadsafe(rewards, trainer.async_loop).result()
        columns[name] = rewards
        members = function.names if isinstance(function, RewardEnsemble) else []
        for member in members:
            columns[member] = report.columns.get(member, [None] * len(rows))
    return columns


class ShapingState:
    """For a trainer with `plain_reward_functions`: what shaped rewards have learnt, for checkpoints to carry over."""

    @property
    def shaping_state(self) -> list[dict[str, Any]]:
        """The states of the shaped reward functions, in order; equal on all processes."""
        return [function.state_dict() for function in self._shaped_rewards()]

    @shaping_state.setter
    def shaping_state(self, states: list[dict[str, Any]]) -> None:
        shaped = self._shaped_rewards()
        if len(shaped) != len(states):
            raise ValueError(
                f"the checkpoint has the state of {len(states)} shaped rewards, and there are {len(shaped)}: resume "
                "with the run's own rewards"
            )
        for function, state in zip(shaped, states, strict=True):
            function.load_state_dict(state)

    def _shaped_rewards(self) -> list[ShapedReward]:
        return [f for f in self.plain_reward_functions.values() if isinstance(f, ShapedReward)]


class _Report:
    """Collects the columns that an ensemble reports of its members."""

    def __init__(self):
        self.columns: dict[str, list[float | None]] = {}

    def __call__(self, column: str, values: list[float | None]) -> None:
        self.columns[column.removeprefix("reward/")] = values
