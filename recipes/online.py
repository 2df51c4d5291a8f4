"""Any online algorithm: by name, `--algorithm dapo`, or your own, `file.py:name`; needs a --reward_model.

    python recipes/online.py --algorithm dapo --reward_model runs/reward-model-toy
    python recipes/online.py --algorithm my_algorithm.py:soft_clip --reward_function my_rewards.py:length

`grpo.py`, `dr_grpo.py`, `gspo.py`, `rloo.py`, `remax.py`, `ppo.py` and `online_preference.py` call it with the classes
of their method.
"""

from dataclasses import dataclass
from functools import partial

from trl_ext.runs.arguments import HfArg, one_line_errors
from trl_ext.runs.finish import write_results
from trl_ext.runs.loading import (
    EvaluatedArguments,
    can_be_resumed,
    evaluate_generations,
    load_rows,
    optional_split,
    show_generations,
)
from trl_ext.runs.online import RewardSources, calibrate_rewards, describe_online, load_rewards, shape_rewards
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import PolicyConfig, PolicyTrainer
from trl_ext.trainers.policy.reward_functions import reward_columns


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
            config=config_class._method or "online",
            name=lambda training: training.algorithm.rpartition(":")[2],
        )
        arguments, training = run.arguments, run.training

        # Prompts, and a function `f(prompts, completions, **columns)` for each reward, as in TRL.
        splits = load_rows(arguments)
        train = splits[arguments.train_split]
        prompts = optional_split(splits, "prompt_split", arguments, "no held-out evaluation")
        plain = load_rewards(arguments, training.per_device_eval_batch_size)
        rewards = shape_rewards(plain, arguments.reward_shaping)

        trainer = run.load_trainer(partial(trainer_class, reward_funcs=rewards), train_dataset=train)
        # This comes after the trainer is created, when members of an ensemble share a backbone if they can.
        calibrate_rewards(plain, rewards, train, ensemble=arguments.calibrate_rewards)
        columns = partial(reward_columns, trainer)
        evaluation = evaluate_generations(trainer, prompts, arguments, reward_columns=columns)

    run.open(trainer)
    every = arguments.generation_eval_every
    if every is None:
        every = int(training.eval_steps) if training.eval_steps and training.eval_steps >= 1 else 50
    show_generations(trainer, evaluation, arguments, every, prefix="eval_")

    run.train(trainer)

    write_results(run, trainer, evaluation, **describe_online(trainer, arguments))


if __name__ == "__main__":
    main()
