"""The rewards of the online recipes: reward models from folders, functions from files, ensembles and shaping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext.names import load_function
from trl_ext.rewards import RewardEnsemble, RewardModel, ShapedReward, parse_shaping
from trl_ext.rewards.shaping import innermost

WAY_OUT = "give --reward_model FOLDER, as recipes/reward_model.py trains one, or --reward_function file.py:function"


@dataclass
class RewardSources:
    """The rewards of responses."""

    reward_model: list[str] | None = HfArg(
        default=None, help="Folder or hub name of a reward model, full or adapter; several make an ensemble."
    )
    reward_function: list[str] | None = HfArg(
        default=None, help="Further rewards, as file.py:function or module:function with TRL's reward signature."
    )
    reward_aggregate: str = HfArg(
        default="mean", help="How several reward models are combined: mean, min, mean_minus_std, uwo or quantile."
    )
    reward_coefficient: float | None = HfArg(
        default=None, help="Weight of the deviation in mean_minus_std, of the variance in uwo."
    )
    reward_quantile: float = HfArg(default=0.25, help="Which quantile of the members.")
    calibrate_rewards: bool = HfArg(
        default=False, help="Centre and scale each reward model on the reference responses of the training prompts."
    )


def load_rewards(arguments: RewardSources, batch_size: int) -> list:
    """The reward models, combined into an ensemble if there are several, and the other reward functions."""
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
    """The single reward that ranks responses."""
    rewards = load_rewards(arguments, batch_size)
    if len(rewards) > 1:
        raise ValueError("responses are ranked by one reward: give --reward_model or one --reward_function, not both")
    return rewards[0]


def shape_rewards(rewards: list, steps: str | None) -> list:
    """The rewards, each followed by the steps of `--reward_shaping`."""
    return rewards if steps is None else [ShapedReward(reward, parse_shaping(steps)) for reward in rewards]


def calibrate_rewards(plain: list, rewards: list, train, *, ensemble: bool) -> None:
    """Calibrate the ensemble, if requested, and the shaped rewards on up to 256 reference responses in `train`."""
    needs = [reward for reward in rewards if isinstance(reward, ShapedReward) and reward.needs_calibration]
    if not ensemble and not needs:
        return
    if "reference_response_text" not in train.column_names:
        flag = "--calibrate_rewards" if ensemble else "reward_shaping: center_reference"
        raise ValueError(f"{flag} needs reference_response_text in the training prompts")
    rows = train.select(range(min(256, len(train))))
    for reward in [*(plain[:1] if ensemble else ()), *needs]:
        reward.calibrate(rows["prompt"], rows["reference_response_text"])


def describe_online(trainer, arguments: RewardSources) -> dict[str, Any]:
    """The entries of results.json for an online run."""
    functions = trainer.plain_reward_functions.values()
    return {
        "algorithm": trainer.args.algorithm,
        "objective": trainer.algorithm.describe(),
        "settings": trainer.algorithm.to_dict(),
        "reward_models": arguments.reward_model or [],
        "reward_functions": arguments.reward_function or [],
        "ensembles": [one.to_dict() for one in map(innermost, functions) if isinstance(one, RewardEnsemble)],
        "reward_shaping": [one.to_dict() for one in functions if isinstance(one, ShapedReward)],
        "train_prompts": len(trainer.train_dataset),
        "rollouts": trainer.rollouts,
        "sampled_responses": trainer.sampled_responses,
        "skipped_updates": dict(trainer.update_guard.skipped),
    }
