"""What the offline preference recipes share: train on pairs, then compare the policy with its frozen base."""

from __future__ import annotations

import os

# A run says nothing to anybody unless it is asked to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import time
from dataclasses import dataclass, field
from pathlib import Path

from common import (
    RECIPES,
    check_trackers,
    clear_run_folder,
    config_text,
    one_line_errors,
    open_run_folder,
    parse_arguments,
    settings_digest,
)
from results import print_results, write_results
from training import ModelArguments, can_be_resumed, load_finished, load_pairs, load_trainer
from transformers.trainer_utils import IntervalStrategy

from trl_ext import PreferenceConfig, PreferenceTrainer
from trl_ext.evaluation import GroundTruthJudge
from trl_ext.files import write_text
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import GenerationTableCallback, MetricsFileCallback
from trl_ext.trainers.defaults import warn_once_per_run
from trl_ext.trainers.generation_evaluation import GenerationEvaluation, GenerationSettings, evaluate_pairs
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


def main(
    config_class: type[PreferenceConfig] = PreferenceConfig,
    trainer_class: type[PreferenceTrainer] = PreferenceTrainer,
) -> None:
    """Read the arguments, train, evaluate, and write the run folder."""
    with can_be_resumed():
        _run(config_class, trainer_class)


def _run(config_class: type[PreferenceConfig], trainer_class: type[PreferenceTrainer]) -> None:
    started = time.time()
    with one_line_errors():
        arguments, model, training = parse_arguments(
            (RecipeArguments, ModelArguments, config_class),
            default_config=RECIPES / "configs" / "toy" / f"{config_class._method or 'preference'}.yaml",
            description=config_class.__doc__,
        )
        if training.output_dir == "trainer_output":
            name = Path(arguments.dataset_name).stem
            training.output_dir = f"runs/{training.loss.rpartition(':')[2]}-{name}"
        checkpoint = open_run_folder(
            training.output_dir,
            overwrite=arguments.overwrite_output_dir,
            resume_from_checkpoint=training.resume_from_checkpoint,
        )
        check_trackers(training.report_to)
        benchmark = _load_splits(arguments)
        resolved = config_text(arguments, model, training)
        if "eval" not in benchmark:
            training.eval_strategy = IntervalStrategy.NO
        trainer = load_trainer(
            trainer_class, model, training, train_dataset=benchmark["train"], eval_dataset=benchmark.get("eval")
        )
        if len(benchmark) > 1:
            remember_base(trainer)
    main_process = trainer.accelerator.is_main_process
    if main_process:
        if arguments.overwrite_output_dir:
            clear_run_folder(training.output_dir)
        write_text(Path(training.output_dir) / "config.yaml", resolved)
    evaluation = _generation_evaluation(trainer, arguments, training, benchmark)
    trainer.add_callback(MetricsFileCallback(Path(training.output_dir) / "metrics.jsonl"))
    if evaluation is not None and arguments.generation_eval_every:
        trainer.add_callback(
            GenerationTableCallback(
                evaluation, every=arguments.generation_eval_every, prompts=arguments.num_generation_prompts
            )
        )

    training_started = time.time()
    if not load_finished(trainer, checkpoint):
        trainer.train(resume_from_checkpoint=checkpoint)
    training_seconds = time.time() - training_started
    trainer.save_model(training.output_dir)

    comparison = None if evaluation is None else evaluation.compare(arguments.num_eval_prompts, progress=True)
    pairs = None
    if trainer.eval_dataset is not None:
        batch_size = training.per_device_eval_batch_size
        pairs = evaluate_pairs(trainer, trainer.eval_dataset, batch_size=batch_size, progress=True)
    if main_process:
        run = {
            "loss": training.loss,
            "objective": trainer.objective.describe(),
            "settings_digest": settings_digest(resolved),
            "model": model.model_name_or_path,
            "dataset": arguments.dataset_name,
            "train_pairs": len(trainer.train_dataset),
            "training_seconds": training_seconds,
            "total_seconds": time.time() - started,
        }
        results = write_results(trainer, comparison, pairs, run)
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
        else:
            warn_once_per_run(f"{arguments.dataset_name} has no split {name!r}: {what} will not be evaluated")
    return splits


def _generation_evaluation(trainer, arguments, training, benchmark) -> GenerationEvaluation | None:
    if "prompts" not in benchmark:
        return None
    settings = GenerationSettings(
        max_prompt_tokens=training.max_prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.generation_temperature,
        batch_size=arguments.generation_batch_size,
        seed=training.seed,
    )
    # Only the embedded benchmark comes with a known quality of every response.
    judge = GroundTruthJudge() if arguments.dataset_name == "toy" else None
    return GenerationEvaluation(
        trainer,
        benchmark["prompts"],
        settings,
        judge=judge,
        score_function=judge.score_function if judge else None,
    )
