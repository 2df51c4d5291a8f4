"""Any preference loss by name, `--loss simpo`, or your own, `--loss file.py:function`.

    python recipes/preference.py --loss simpo                           # the embedded model and benchmark
    python recipes/preference.py --loss my_losses.py:my_loss --config recipes/configs/smollm2/pairs.yaml

Copy this file to change what its flags do not: the parts of `main` are arguments, data, model and loss, evaluation,
training and results. `aot.py`, `dpo.py` and `ipo.py` call it with the classes of their method.
"""

from dataclasses import dataclass

from trl_ext.runs.arguments import HfArg, one_line_errors
from trl_ext.runs.finish import write_results
from trl_ext.runs.loading import (
    ResponseArguments,
    can_be_resumed,
    evaluate_generations,
    load_rows,
    optional_split,
    show_generations,
)
from trl_ext.runs.offline import evaluate_pairs
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import PreferenceConfig, PreferenceTrainer
from trl_ext.trainers.policies import remember_base


@dataclass
class PreferenceArguments(ResponseArguments):
    """Data, evaluation and output of a run."""

    train_split: str = HfArg(default="train_prefs", help="Pairs to train on.")
    eval_split: str = HfArg(default="test_prefs", help="Held-out pairs; none for no evaluation.")


@can_be_resumed()
def main(
    config_class: type[PreferenceConfig] = PreferenceConfig,
    trainer_class: type[PreferenceTrainer] = PreferenceTrainer,
) -> None:
    """Train on preference pairs, compare the policy with its base, and write the run folder."""
    # Mistakes in arguments and data end in one line instead of a traceback.
    with one_line_errors():
        # Arguments: of this recipe, and of the trainer, which extend TRL's; without any, those of configs/toy.
        run = begin_run(
            PreferenceArguments,
            config_class,
            config=config_class._method or "preference",
            name=lambda training: training.loss.rpartition(":")[2],
        )
        arguments, training = run.arguments, run.training

        # Data: datasets by split, with prompt, chosen and rejected as messages. Yours may come from anywhere.
        splits = load_rows(arguments)
        pairs = splits[arguments.train_split]
        held_out = optional_split(splits, "eval_split", arguments, "held-out pairs will not be evaluated")
        prompts = optional_split(splits, "prompt_split", arguments, "generations will not be evaluated")

        # Model and loss: `--model_name_or_path`, `--use_peft` and `--loss`. The trainer is a DPOTrainer of TRL.
        trainer = run.load_trainer(trainer_class, train_dataset=pairs, eval_dataset=held_out)

        # Evaluation: responses to held-out prompts, and the base's. The embedded benchmarks have a judge.
        if held_out is not None:
            remember_base(trainer)
        evaluation = evaluate_generations(trainer, prompts, arguments)

    run.open(trainer)
    show_generations(trainer, evaluation, arguments, arguments.generation_eval_every)

    # Training, from a checkpoint with `--resume_from_checkpoint`. Add a TrainerCallback before it.
    run.train(trainer)

    # Results: results.json, the table, the plot and the model card. Further keywords are entries of `run`.
    preferences = evaluate_pairs(trainer, held_out, run.folder)
    write_results(
        run,
        trainer,
        evaluation,
        preferences=preferences,
        loss=training.loss,
        objective=trainer.objective.describe(),
        train_pairs=len(trainer.train_dataset),
    )


if __name__ == "__main__":
    main()
