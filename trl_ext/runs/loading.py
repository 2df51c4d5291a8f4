"""The data, the trainer and the held-out evaluation of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from httpx import HTTPError
from transformers.hf_argparser import HfArg
from trl import get_peft_config, get_quantization_config

from trl_ext import SFTConfig, load_benchmark
from trl_ext.data.benchmark import known_score
from trl_ext.evaluation import GroundTruthJudge
from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings
from trl_ext.held_out.table import GenerationTableCallback
from trl_ext.models import resolve_model_path
from trl_ext.names import nearest
from trl_ext.processes import is_main_process, warn_once_per_run
from trl_ext.resilience.faults import plain_faults
from trl_ext.runs.arguments import MENDABLE_IN_TRAINING, ModelArguments, one_line_errors
from trl_ext.trainers.context import check_context
from trl_ext.trainers.defaults import check_at_least
from trl_ext.trainers.policies import remember_base


@dataclass
class BenchmarkArguments:
    """The benchmark, and the output folder."""

    dataset_name: str = HfArg(
        default="toy", help="toy, instructions, a folder of {split}.jsonl, one .jsonl file, or a hub dataset."
    )
    skip_bad_rows: bool = HfArg(default=False, help="Drop bad rows and say how many and why.")
    overwrite_output_dir: bool = HfArg(default=False, help="Replace an earlier run in output_dir.")


@dataclass
class EvaluatedArguments(BenchmarkArguments):
    """The benchmark, its held-out prompts, and how responses to them are sampled."""

    prompt_split: str = HfArg(default="test_gen", help="Held-out prompts; none for no evaluation.")
    num_generation_prompts: int = HfArg(default=32, help="Prompts in each table while training.")
    num_eval_prompts: int | None = HfArg(
        default=None, help="Prompts of the comparison at the end. Default: all of prompt_split."
    )
    num_kl_prompts: int | None = HfArg(
        default=None,
        help="Prompts to which further responses are sampled, for the divergence from the base. Default: all of them.",
    )
    generation_temperature: float = HfArg(
        default=0.0, help="Sampling temperature of the held-out responses; 0 for greedy decoding."
    )

    def __post_init__(self):
        counts = ("num_generation_prompts", "num_eval_prompts", "num_kl_prompts")
        check_at_least(self, dict.fromkeys(counts, 1) | {"generation_eval_every": 0, "generation_temperature": 0})


@dataclass
class ResponseArguments(EvaluatedArguments):
    """How responses are sampled in a run whose training samples none."""

    generation_eval_every: int = HfArg(
        default=100, help="Steps between tables of generations while training; 0 for none."
    )
    max_new_tokens: int = HfArg(default=256, help="Longest generated response, in tokens.")
    generation_batch_size: int = HfArg(default=32, help="Prompts per batch of generation.")

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, {"max_new_tokens": 1})


@contextmanager
def can_be_resumed() -> Iterator[None]:
    """If a run is interrupted or the machine fails, exit with a line that says how to resume."""
    try:
        with one_line_errors(MENDABLE_IN_TRAINING), plain_faults():
            yield
    except KeyboardInterrupt:
        if is_main_process():
            print("\ninterrupted: the same command with --resume_from_checkpoint resumes from the last checkpoint")
        raise SystemExit(130) from None


def load_rows(arguments):
    """Load the benchmark `dataset_name` with `train_split`.

    The only split of a single file becomes `train_split`, whatever its rows.
    """
    name, split = arguments.dataset_name, arguments.train_split
    benchmark = load_benchmark(name, skip_bad_rows=arguments.skip_bad_rows)
    if split not in benchmark and Path(name).expanduser().is_file():
        # The rows show which task this is; the recipe checks whether it can use them.
        (only,) = benchmark
        benchmark[split] = benchmark.pop(only)
    if split not in benchmark:
        raise missing_split(benchmark, "train_split", arguments)
    return benchmark


def load_trainer(trainer_class, model: ModelArguments, training, **datasets: Any):
    """Create the trainer for a model given by name, on the datasets given as keywords."""
    model_path = resolve_model_path(model.model_name_or_path)
    output, source = Path(training.output_dir).resolve(), Path(model_path).resolve()
    if source.is_dir() and output in (source, source.parent):
        raise ValueError(
            f"the model to train, {model.model_name_or_path}, lies in --output_dir {training.output_dir}, where the "
            "run would replace it: choose another --output_dir"
        )
    dtype = model.dtype
    if training.use_cpu and not training.bf16 and dtype is not None:
        dtype = "float32"
    # Pass the name, not an instance: ZeRO-3 must see the model being built.
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": dtype,
        **(training.model_init_kwargs or {}),
    }
    try:
        trainer = trainer_class(
            model_path,
            args=training,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
            **datasets,
        )
    except (OSError, HTTPError) as error:
        raise ValueError(f"the model {model.model_name_or_path!r} could not be loaded: {error}") from error
    names = ("max_length",) if isinstance(training, SFTConfig) else ("max_response_tokens", "max_prompt_tokens")
    limits = {name: getattr(training, name, None) for name in names}
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        if isinstance(dataset, Dataset):
            check_context(trainer.model, dataset, limits)
    return trainer


def optional_split(benchmark, field_name: str, arguments: EvaluatedArguments, consequence: str):
    """The split of held-out rows that a field of the arguments names, or None.

    `none` is no split. If the split that the field names by default is missing, this warns about the consequence.
    """
    name = getattr(arguments, field_name)
    if name in benchmark:
        return benchmark[name]
    if name == getattr(type(arguments), field_name):
        warn_once_per_run(f"{arguments.dataset_name} has no split {name!r}: {consequence}")
    elif name != "none":
        raise missing_split(benchmark, field_name, arguments)
    return None


def missing_split(benchmark, field_name: str, arguments: BenchmarkArguments) -> ValueError:
    """The error of a field that names no split."""
    name = getattr(arguments, field_name)
    return ValueError(
        f"{arguments.dataset_name} has no split {name!r}, only {', '.join(benchmark)}{nearest(name, list(benchmark))} "
        f"Name one with --{field_name}"
    )


def evaluate_generations(
    trainer, prompts, arguments: EvaluatedArguments, **options: Any
) -> GenerationEvaluation | None:
    """The comparison of the policy with its base on held-out prompts, with the data's own judge if any.

    A trainer that samples is evaluated with responses as long as its own. The trainer's base is remembered; without
    prompts there is no evaluation. `options` go to `GenerationEvaluation`.
    """
    if prompts is None:
        return None
    remember_base(trainer)
    samples = not isinstance(arguments, ResponseArguments)
    limits = arguments if hasattr(arguments, "max_prompt_tokens") else trainer.args
    settings = GenerationSettings(
        max_prompt_tokens=limits.max_prompt_tokens,
        max_new_tokens=trainer.args.max_completion_length if samples else arguments.max_new_tokens,
        temperature=arguments.generation_temperature,
        batch_size=arguments.generation_eval_batch_size if samples else arguments.generation_batch_size,
        num_kl_prompts=arguments.num_kl_prompts,
        seed=trainer.args.seed,
        stop=tuple(getattr(trainer.args, "stop", None) or ()),
    )
    # Only the embedded benchmarks have a known quality for every response.
    score_function = known_score(arguments.dataset_name)
    judge = GroundTruthJudge(score_function) if score_function else None
    return GenerationEvaluation(trainer, prompts, settings, judge=judge, score_function=score_function, **options)


def show_generations(trainer, evaluation: GenerationEvaluation | None, arguments, every: int, **options: Any) -> None:
    """Write a table of generations every `every` steps; 0 for none. Options go to the callback."""
    if evaluation is not None and every:
        prompts = arguments.num_generation_prompts
        trainer.add_callback(GenerationTableCallback(evaluation, every=every, prompts=prompts, **options))
