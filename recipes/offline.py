"""What the offline preference recipes share: train on pairs, then compare the policy with its frozen base."""

from __future__ import annotations

from dataclasses import dataclass, field

from common import one_line_errors
from results import print_results, write_results
from run_folder import begin_run
from training import can_be_resumed, check_pairs, held_out_generations, load_pairs

from trl_ext import PreferenceConfig, PreferenceTrainer
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import GenerationTableCallback
from trl_ext.trainers.defaults import warn_once_per_run
from trl_ext.trainers.generation_evaluation import evaluate_pairs
from trl_ext.trainers.policies import remember_base


@dataclass
class RecipeArguments:
    """Data, evaluation and output of a run."""

    dataset_name: str = field(
        default="toy", metadata={"help": "toy, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."}
    )
    train_split: str = field(default="train_prefs", metadata={"help": "Pairs to train on."})
    eval_split: str = field(default="test_prefs", metadata={"help": "Held-out pairs; not evaluated if missing."})
    prompt_split: str = field(default="test_gen", metadata={"help": "Held-out prompts; not evaluated if missing."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Drop bad rows and say how many and why."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace an earlier run in output_dir."})
    generation_eval_every: int = field(
        default=100, metadata={"help": "Steps between tables of generations while training; 0 for none."}
    )
    num_generation_prompts: int = field(default=32, metadata={"help": "Prompts in each of these tables."})
    num_eval_prompts: int | None = field(
        default=None, metadata={"help": "Prompts of the comparison at the end. Default: all of prompt_split."}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Longest generated response, in tokens."})
    generation_temperature: float = field(default=0.0, metadata={"help": "0 for greedy decoding."})
    generation_batch_size: int = field(default=32, metadata={"help": "Prompts per batch of generation."})

    def __post_init__(self):
        for name, least in (("generation_eval_every", 0), ("num_generation_prompts", 1), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.generation_temperature < 0:
            raise ValueError(f"generation_temperature must not be negative, got {self.generation_temperature}")


@can_be_resumed()
def main(
    config_class: type[PreferenceConfig] = PreferenceConfig,
    trainer_class: type[PreferenceTrainer] = PreferenceTrainer,
) -> None:
    """Read the arguments, train, evaluate, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            RecipeArguments,
            config_class,
            config=config_class._method or "preference",
            description=config_class.__doc__,
            name=lambda training: training.loss.rpartition(":")[2],
        )
        arguments, training = run.arguments, run.training
        benchmark = _load_splits(arguments)
        trainer = run.load_trainer(trainer_class, train_dataset=benchmark["train"], eval_dataset=benchmark.get("eval"))
        if len(benchmark) > 1:
            remember_base(trainer)
        evaluation = None
        if "prompts" in benchmark:
            limits = {"max_new_tokens": arguments.max_new_tokens, "batch_size": arguments.generation_batch_size}
            evaluation = held_out_generations(trainer, benchmark["prompts"], arguments, **limits)
    run.open(trainer)
    every = arguments.generation_eval_every
    if evaluation is not None and every:
        trainer.add_callback(
            GenerationTableCallback(evaluation, every=every, prompts=arguments.num_generation_prompts)
        )

    run.train(trainer)

    comparison = None if evaluation is None else evaluation.compare(arguments.num_eval_prompts, progress=True)
    pairs = None
    if trainer.eval_dataset is not None:
        batch_size = training.per_device_eval_batch_size
        pairs = evaluate_pairs(trainer, trainer.eval_dataset, batch_size=batch_size, progress=True)
    if trainer.accelerator.is_main_process:
        described = run.describe(
            loss=training.loss, objective=trainer.objective.describe(), train_pairs=len(trainer.train_dataset)
        )
        results = write_results(trainer, comparison, pairs, described)
        print_results(results, [] if comparison is None else comparison.rows, training.output_dir)
    end_processes(trainer.accelerator)


def _load_splits(arguments: RecipeArguments):
    """The benchmark's splits by role: `train`, and where they exist `eval` and `prompts`."""
    benchmark = load_pairs(arguments.dataset_name, arguments.train_split, skip_bad_rows=arguments.skip_bad_rows)
    splits = {"train": benchmark[arguments.train_split]}
    for role, name, what in (
        ("eval", arguments.eval_split, "held-out pairs"),
        ("prompts", arguments.prompt_split, "generations"),
    ):
        if name in benchmark:
            splits[role] = benchmark[name]
            if role == "eval":
                check_pairs(benchmark[name], name, "eval_split")
        else:
            warn_once_per_run(f"{arguments.dataset_name} has no split {name!r}: {what} will not be evaluated")
    return splits
