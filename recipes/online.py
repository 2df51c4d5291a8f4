"""What the online recipes share: sample, score with reward models, update; then compare the policy with its base."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from common import MENDABLE_IN_TRAINING, one_line_errors
from results import print_results, write_results
from reward_sources import RewardSources, calibrate, load_rewards, reference_responses
from run_folder import begin_run
from training import can_be_resumed, held_out_generations, load_rows

from trl_ext import PolicyConfig, PolicyTrainer
from trl_ext.evaluation.plots import ONLINE_PANELS
from trl_ext.rewards import RewardEnsemble, ShapedReward, parse_shaping
from trl_ext.rewards.shaping import innermost
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import GenerationTableCallback
from trl_ext.trainers.defaults import warn_once_per_run, world_size
from trl_ext.trainers.policies import remember_base
from trl_ext.trainers.reward_functions import reward_columns


@dataclass
class OnlineArguments(RewardSources):
    """Data, rewards, evaluation and output of a run."""

    dataset_name: str = field(
        default="toy", metadata={"help": "toy, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."}
    )
    train_split: str = field(default="train_gen", metadata={"help": "Prompts to train on."})
    prompt_split: str = field(default="test_gen", metadata={"help": "Held-out prompts; not evaluated if missing."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop bad rows and say how many and why."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in output_dir."})
    reward_shaping: str | None = field(
        default=None,
        metadata={
            "help": "Steps that each reward goes through in training, in order, as JSON: "
            '\'["center_reference", {"kind": "clip", "limit": 5}]\'.'
        },
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
        plain = load_rewards(arguments, training.per_device_eval_batch_size)
        rewards = _shaped(plain, arguments, training)
        trainer = run.load_trainer(partial(trainer_class, reward_funcs=rewards), train_dataset=splits["train"])
        if arguments.calibrate_rewards:
            # Only now, when the members share what they can.
            calibrate(plain[0], splits["train"])
        _calibrate_shaping(rewards, splits["train"])
        if "prompts" in splits:
            remember_base(trainer)
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
    run.open(trainer)
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


def _shaped(rewards: list, arguments: OnlineArguments, training: PolicyConfig) -> list:
    """The rewards with `reward_shaping` behind each.

    Raises:
        ValueError: steps that are none, or that do not go with the algorithm.
    """
    if arguments.reward_shaping is None:
        return rewards
    # Steps of its own for each: some learn.
    shaped = [ShapedReward(reward, parse_shaping(arguments.reward_shaping)) for reward in rewards]
    of_batch = any(reward.of_batch for reward in shaped)
    if of_batch and training.build_objective().needs_greedy:
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


def _calibrate_shaping(rewards: list, train_split) -> None:
    for reward in rewards:
        if isinstance(reward, ShapedReward) and reward.needs_calibration:
            reward.calibrate(*reference_responses(train_split, "reward_shaping: center_reference without a value"))


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
            innermost(function).to_dict()
            for function in trainer.plain_reward_functions.values()
            if isinstance(innermost(function), RewardEnsemble)
        ],
        "reward_shaping": [
            function.to_dict()
            for function in trainer.plain_reward_functions.values()
            if isinstance(function, ShapedReward)
        ],
        "train_prompts": len(trainer.train_dataset),
        "rollouts": trainer.rollouts,
        "sampled_responses": trainer.rollouts * args.generation_batch_size,
        "skipped_updates": dict(trainer.update_guard.skipped),
    }
