"""A text that identifies the reward functions. It changes with the rewards or with the weights of their models."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from accelerate.utils import broadcast_object_list

from trl_ext.models.loading import model_sha256
from trl_ext.trainers.policy.reward_functions import reward_models


def reward_version(trainer) -> str:
    """Rewards by name with their weights, a hash of their contents, and the penalty; equal on all processes.

    The hash covers the files of `RewardModel`s, read once, and a judge's `identity`. Anything else that a function
    depends on, and the weights of a module, are identified by name alone.

    Args:
        trainer: a `PolicyTrainer` that already has its rewards.
    """
    version: list[str | None] = [None]
    if trainer.accelerator.is_main_process:
        functions = trainer.plain_reward_functions
        parts = [
            f"{weight:g} {name}{_contents(functions.get(name))}"
            for weight, name in zip(trainer.reward_weights.tolist(), trainer.reward_func_names, strict=True)
        ]
        version = [f"{', '.join(parts)}, missing end {trainer.args.missing_eos_penalty:g}"]
    return broadcast_object_list(version)[0]


def _contents(function: Any) -> str:
    hashes = [model_sha256(model.folder) for model in reward_models([function])]
    identity = getattr(getattr(function, "judge", None), "identity", None)
    if identity is not None:
        hashes.append(json.dumps(identity, sort_keys=True, default=str))
    return f" ({sha256(' '.join(hashes).encode()).hexdigest()[:16]})" if hashes else ""
