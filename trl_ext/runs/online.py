"""Online training on rewards: reward models from folders, functions from files, ensembles and shaping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.hf_argparser import HfArg

from trl_ext.evaluation.reporting.plots import ONLINE_PANELS
from trl_ext.names import load_function
from trl_ext.processes import world_size
from trl_ext.rewards import RewardEnsemble, RewardModel, ShapedReward, parse_shaping
from trl_ext.rewards.shaping import innermost
from trl_ext.runs.arguments import one_line_errors
from trl_ext.runs.loading import (
    EvaluatedArguments,
    can_be_resumed,
    evaluate_generations,
    load_rows,
    optional_split,
    show_generations,
)
from trl_ext.runs.results import end_with_results
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import PolicyConfig, PolicyTrainer
from trl_ext.trainers.policy.reward_functions import reward_columns

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


def reference_responses(rows, flag: str) -> tuple[list[Any], list[str]]:
    """The prompts and reference responses of up to 256 rows; raises ValueError, naming the flag, if there are none."""
    if "reference_response_text" not in rows.column_names:
        raise ValueError(f"{flag} needs reference_response_text in the training prompts")
    rows = rows.select(range(min(256, len(rows))))
    return rows["prompt"], rows["reference_response_text"]


@dataclass
class OnlineArguments(EvaluatedArguments, RewardSources):
    """Data, rewards, evaluation and output of a run."""

    train_split: str = HfArg(default="train_gen", help="Prompts to train on.")
    reward_shaping: str | None = HfArg(
        default=None,
        help="Steps that each reward goes through in training, in order, as JSON: "
        '\'["center_reference", {"kind": "clip", "limit": 5}]\'.',
    )
    generation_eval_every: int | None = HfArg(
        default=None, help="Steps between evaluations on held-out prompts; 0 for none. Default: eval_steps, or 50."
    )
    generation_eval_batch_size: int = HfArg(default=32, help="Prompts per batch of the evaluations.")


@can_be_resumed()
def main(config_class: type[PolicyConfig] = PolicyConfig, trainer_class: type[PolicyTrainer] = PolicyTrainer) -> None:
    """Train on rewarded responses, compare the policy with its base, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            OnlineArguments,
            config_class,
            config=config_class._method or "policy",
            description=config_class.__doc__,
            name=lambda training: training.algorithm.rpartition(":")[2],
        )
        arguments, training = run.arguments, run.training
        splits = load_rows(arguments, training.seed)
        train = splits[arguments.train_split]
        prompts = optional_split(splits, "prompt_split", arguments, "no held-out evaluation")
        plain = load_rewards(arguments, training.per_device_eval_batch_size)
        rewards = _shaped(plain, arguments, training)
        trainer = run.load_trainer(partial(trainer_class, reward_funcs=rewards), train_dataset=train)
        if arguments.calibrate_rewards:
            # This comes after the trainer is created, when members share a backbone if they can.
            plain[0].calibrate(*reference_responses(train, "--calibrate_rewards"))
        for reward in rewards:
            if isinstance(reward, ShapedReward) and reward.needs_calibration:
                reward.calibrate(*reference_responses(train, "reward_shaping: center_reference"))
        evaluation = evaluate_generations(
            trainer,
            prompts,
            arguments,
            max_new_tokens=training.max_completion_length,
            batch_size=arguments.generation_eval_batch_size,
            reward_columns=partial(reward_columns, trainer),
        )
    run.open(trainer)
    every = arguments.generation_eval_every
    if every is None:
        every = int(training.eval_steps) if training.eval_steps and training.eval_steps >= 1 else 50
    show_generations(trainer, evaluation, arguments, every, prefix="eval_")

    run.train(trainer)

    end_with_results(run, trainer, evaluation, panels=ONLINE_PANELS, **describe_online(trainer, arguments))


def _shaped(rewards: list, arguments: OnlineArguments, training: PolicyConfig) -> list:
    """The rewards, each followed by the steps of `reward_shaping`."""
    if arguments.reward_shaping is None:
        return rewards
    # Each reward gets its own steps, because some of them have state.
    shaped = [ShapedReward(reward, parse_shaping(arguments.reward_shaping)) for reward in rewards]
    of_batch = any(reward.scores_groups for reward in shaped)
    if of_batch and training.build_algorithm().reads("greedy_rewards"):
        raise ValueError(
            f"reward_shaping: center and whiten do not go with {training.algorithm}, whose greedy responses are "
            "scored apart from the sampled ones: leave them out, or use center_reference"
        )
    if of_batch and world_size() > 1 and training.reward_errors == "skip" and training.reward_timeout:
        raise ValueError(
            "reward_shaping: center and whiten sum over all processes, and one whose reward is interrupted at "
            "reward_timeout takes no part: give --reward_errors raise, or --reward_timeout 0"
        )
    return shaped


def describe_online(trainer, arguments: OnlineArguments) -> dict[str, Any]:
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
