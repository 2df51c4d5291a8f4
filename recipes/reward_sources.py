"""What recipes share that score responses: reward models by folder, functions by file, ensembles and shaping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl_ext.registry import load_function
from trl_ext.rewards import RewardEnsemble, RewardModel

WAY_OUT = "give --reward_model FOLDER, as recipes/reward_model.py trains one, or --reward_function file.py:function"


@dataclass
class RewardSources:
    """The rewards of responses."""

    reward_model: list[str] | None = field(
        default=None,
        metadata={"help": "Folder or hub name of a reward model, full or adapter; several make an ensemble."},
    )
    reward_function: list[str] | None = field(
        default=None,
        metadata={"help": "Further rewards, as file.py:function or module:function with TRL's reward signature."},
    )
    reward_aggregate: str = field(
        default="mean",
        metadata={"help": "How several reward models are combined: mean, min, mean_minus_std, uwo or quantile."},
    )
    reward_coefficient: float | None = field(
        default=None, metadata={"help": "Weight of the deviation in mean_minus_std, of the variance in uwo."}
    )
    reward_quantile: float = field(default=0.25, metadata={"help": "Which quantile of the members."})
    calibrate_rewards: bool = field(
        default=False,
        metadata={"help": "Centre and scale each reward model on the reference responses of the training prompts."},
    )


def load_rewards(arguments: RewardSources, batch_size: int) -> list:
    """The reward models, as one ensemble where there are several, and the further reward functions.

    Raises:
        ValueError: there are none, or an ensemble's settings without an ensemble.
        FileNotFoundError: no such folder or file.
    """
    if not arguments.reward_model and not arguments.reward_function:
        raise ValueError(f"nothing to reward responses with: {WAY_OUT}")
    models = [RewardModel(name, batch_size=batch_size) for name in arguments.reward_model or ()]
    functions = [load_function(name, "reward function") for name in arguments.reward_function or ()]
    if len(models) > 1:
        models = [
            RewardEnsemble(
                models,
                aggregate=arguments.reward_aggregate,
                coefficient=arguments.reward_coefficient,
                quantile=arguments.reward_quantile,
            )
        ]
    if arguments.calibrate_rewards and len(arguments.reward_model or ()) < 2:
        raise ValueError("--calibrate_rewards is for an ensemble: give several --reward_model")
    return [*models, *functions]


def only_reward(arguments: RewardSources, batch_size: int):
    """The one reward that responses are ranked by.

    Raises:
        ValueError: there is none, or more than one; and as `load_rewards`.
    """
    rewards = load_rewards(arguments, batch_size)
    if len(rewards) > 1:
        raise ValueError("responses are ranked by one reward: give --reward_model or one --reward_function, not both")
    return rewards[0]


def calibrate(ensemble: RewardEnsemble, rows) -> None:
    """Centre and scale an ensemble's members on the reference responses of at most 256 rows.

    Raises:
        ValueError: the rows have none.
    """
    prompts, references = reference_responses(rows, "--calibrate_rewards")
    ensemble.calibrate(prompts, references)


def reference_responses(rows, flag: str) -> tuple[list[Any], list[str]]:
    """The prompts and reference responses of at most 256 rows; ValueError, naming the flag, where there are none."""
    if "reference_response_text" not in rows.column_names:
        raise ValueError(f"{flag} needs reference_response_text in the training prompts")
    rows = rows.select(range(min(256, len(rows))))
    return rows["prompt"], rows["reference_response_text"]
