"""What the online recipes share: sample, score with reward models, update; then compare the policy with its base."""

from __future__ import annotations

import os

# A run says nothing to anybody unless it is asked to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from dataclasses import dataclass, field
from functools import partial

from common import MENDABLE_IN_TRAINING, one_line_errors
from results import print_results, write_results
from run_folder import begin_run
from training import can_be_resumed, held_out_generations, load_rows

from trl_ext import PolicyConfig, PolicyTrainer
from trl_ext.evaluation.plots import ONLINE_PANELS
from trl_ext.registry import load_function
from trl_ext.rewards import RewardEnsemble, RewardModel
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import GenerationTableCallback
from trl_ext.trainers.defaults import warn_once_per_run
from trl_ext.trainers.policies import remember_base
from trl_ext.trainers.reward_functions import reward_columns


@dataclass
class OnlineArguments:
    """Data, rewards, evaluation and output of a run."""

    dataset_name: str = field(
        default="toy", metadata={"help": "toy, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."}
    )
    train_split: str = field(default="train_gen", metadata={"help": "Prompts to train on."})
    prompt_split: str = field(default="test_gen", metadata={"help": "Held-out prompts; not evaluated if missing."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop bad rows and say how many and why."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in output_dir."})
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
    generation_eval_every: int | None = field(
        default=None,
        metadata={"help": "Steps between evaluations on held-out prompts; 0 for none. Default: eval_steps, or 50."},
    )
    num_generation_prompts: int = field(default=32, metadata={"help": "Prompts in each of these evaluations."})
    num_eval_prompts: int | None = field(
        default=None, metadata={"help": "Prompts of the comparison at the end. Default: all of prompt_split."}
    )
    generation_temperature: float = field(default=0.0, metadata={"help": "Of the evaluations; 0 for greedy decoding."})
    generation_eval_batch_size: int = field(default=32, metadata={"help": "Prompts per batch of the evaluations."})

    def __post_init__(self):
        for name, least in (("generation_eval_every", 0), ("num_generation_prompts", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.generation_temperature < 0:
            raise ValueError(f"generation_temperature must not be negative, got {self.generation_temperature}")


@can_be_resumed()
def main(
    config_class: type[PolicyConfig] = PolicyConfig,
    trainer_class: type[PolicyTrainer] = PolicyTrainer,
) -> None:
    """Read the arguments, train, evaluate, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            OnlineArguments,
            config_class,
            config=config_class._method or "policy",
            description=config_class.__doc__,
            name=lambda training: training.algorithm.rpartition(":")[2],
        )
        arguments, training = run.arguments, run.training
        splits = _load_splits(arguments)
        rewards = _rewards(arguments, training)
        trainer = run.load_trainer(partial(trainer_class, reward_funcs=rewards), train_dataset=splits["train"])
        if arguments.calibrate_rewards:
            # Only now, when the members share what they can.
            _calibrate(rewards, splits["train"])
        if "prompts" in splits:
            remember_base(trainer)
    run.open(trainer)
    evaluation = None
    if "prompts" in splits:
        evaluation = held_out_generations(
            trainer,
            splits["prompts"],
            arguments,
            max_new_tokens=training.max_completion_length,
            batch_size=arguments.generation_eval_batch_size,
            reward_columns=partial(reward_columns, trainer),
        )
    every = _evaluate_every(arguments, training)
    if evaluation is not None and every:
        trainer.add_callback(
            GenerationTableCallback(evaluation, every=every, prompts=arguments.num_generation_prompts, prefix="eval_")
        )

    run.train(trainer)

    with one_line_errors(MENDABLE_IN_TRAINING):
        comparison = None if evaluation is None else evaluation.compare(arguments.num_eval_prompts, progress=True)
    if trainer.accelerator.is_main_process:
        described = run.describe(**_describe(trainer, arguments))
        results = write_results(trainer, comparison, None, described, panels=ONLINE_PANELS)
        print_results(results, [] if comparison is None else comparison.rows, training.output_dir)
    end_processes(trainer.accelerator)


def _load_splits(arguments: OnlineArguments) -> dict:
    """The benchmark's prompts to train on (`train`), and those that are held out (`prompts`) where there are any."""
    benchmark = load_rows(arguments.dataset_name, arguments.train_split, skip_bad_rows=arguments.skip_bad_rows)
    splits = {"train": benchmark[arguments.train_split]}
    if arguments.prompt_split in benchmark:
        splits["prompts"] = benchmark[arguments.prompt_split]
    else:
        warn_once_per_run(f"{arguments.dataset_name} has no split {arguments.prompt_split!r}: no held-out evaluation")
    return splits


def _rewards(arguments: OnlineArguments, training: PolicyConfig) -> list:
    """The reward models, as one ensemble where there are several, and the further reward functions."""
    if not arguments.reward_model and not arguments.reward_function:
        raise ValueError(
            "nothing to reward responses with: give --reward_model FOLDER, as recipes/reward_model.py trains one, "
            "or --reward_function file.py:function"
        )
    batch_size = training.per_device_eval_batch_size
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


def _calibrate(rewards: list, train_split) -> None:
    if "reference_response_text" not in train_split.column_names:
        raise ValueError("--calibrate_rewards needs reference_response_text in the training prompts")
    rows = train_split.select(range(min(256, len(train_split))))
    rewards[0].calibrate(rows["prompt"], rows["reference_response_text"])


def _evaluate_every(arguments: OnlineArguments, training: PolicyConfig) -> int:
    if arguments.generation_eval_every is not None:
        return arguments.generation_eval_every
    return int(training.eval_steps) if training.eval_steps and training.eval_steps >= 1 else 50


def _describe(trainer, arguments: OnlineArguments) -> dict:
    args = trainer.args
    return {
        "algorithm": args.algorithm,
        "objective": trainer.objective.describe(),
        "settings": trainer.objective.to_dict(),
        "reward_models": arguments.reward_model or [],
        "reward_functions": arguments.reward_function or [],
        "ensembles": [
            function.to_dict()
            for function in trainer.plain_reward_functions.values()
            if isinstance(function, RewardEnsemble)
        ],
        "train_prompts": len(trainer.train_dataset),
        "rollouts": trainer.rollouts,
        "sampled_responses": trainer.rollouts * args.generation_batch_size,
        "skipped_updates": dict(trainer.update_guard.skipped),
    }
