"""What recipes that train share: the model arguments, the data, the trainer, and taking up an interrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import MENDABLE_IN_TRAINING, one_line_errors
from datasets import Dataset
from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_ext import SFTConfig, load_benchmark
from trl_ext.evaluation import GroundTruthJudge
from trl_ext.files import local_path
from trl_ext.models import resolve_model_path
from trl_ext.trainers.context import check_rows
from trl_ext.trainers.defaults import is_main_process, warn_once_per_run
from trl_ext.trainers.faults import plain_faults
from trl_ext.trainers.generation_evaluation import GenerationEvaluation, GenerationSettings


@dataclass
class ModelArguments(ModelConfig):
    """TRL's model arguments, with the embedded model as the default."""

    model_name_or_path: str | None = field(
        default="toy", metadata={"help": "toy, a folder, or a hub model such as Qwen/Qwen2.5-1.5B-Instruct."}
    )


@contextmanager
def can_be_resumed() -> Iterator[None]:
    """End an interrupted run, and one that meets a fault of the machine, with a line that says how to go on."""
    try:
        with one_line_errors(MENDABLE_IN_TRAINING), plain_faults():
            yield
    except KeyboardInterrupt:
        if is_main_process():
            print(
                "\ninterrupted: steps after the last checkpoint are lost. The same command goes on from it with "
                "--resume_from_checkpoint; where there is none yet, --overwrite_output_dir begins anew"
            )
        raise SystemExit(130) from None


def load_rows(name: str, split: str, *, skip_bad_rows: bool):
    """A benchmark whose split `split` is there to train on; of one file, the only split whatever its rows are.

    Raises:
        ValueError: it has no such split.
    """
    benchmark = load_benchmark(name, skip_bad_rows=skip_bad_rows)
    if split not in benchmark and local_path(name).is_file():
        # What it is of, its rows tell; whether they will do, the recipe.
        (only,) = benchmark
        benchmark[split] = benchmark.pop(only)
    if split not in benchmark:
        fields = "pairs (prompt, chosen, rejected)" if split.endswith("_prefs") else "prompts (prompt)"
        raise ValueError(
            f"{name} has no split {split!r} to train on, only {', '.join(benchmark)}: call the file of {fields} "
            f"{split}.jsonl, give it alone as --dataset_name FILE.jsonl, or name a split with --train_split"
        )
    return benchmark


def load_pairs(name: str, split: str, *, skip_bad_rows: bool):
    """A benchmark whose split `split` is there to train on and holds pairs.

    Raises:
        ValueError: it has no such split, or the split holds no pairs.
    """
    benchmark = load_rows(name, split, skip_bad_rows=skip_bad_rows)
    check_pairs(benchmark[split], split, "train_split")
    return benchmark


def check_pairs(rows, split: str, flag: str) -> None:
    """Refuse a split without pairs.

    Raises:
        ValueError: names the split, and the flag that names another.
    """
    columns = rows.column_names
    if "label" in columns and "completion" in columns:
        raise ValueError(f"the split {split!r} holds labelled responses and no pairs: they are for recipes/kto.py")
    if "chosen" not in columns:
        raise ValueError(
            f"the split {split!r} holds prompts and no pairs: name another --{flag}, whose rows have prompt, chosen "
            "and rejected"
        )


def load_trainer(trainer_class, model: ModelArguments, training, **datasets: Any):
    """The trainer of a model by name, on the datasets given as keywords.

    Raises:
        ValueError: the run would replace the model to train, or the model cannot be loaded.
    """
    model_path = resolve_model_path(model.model_name_or_path)
    output, source = Path(training.output_dir).resolve(), Path(model_path).resolve()
    if source.is_dir() and output in (source, source.parent):
        raise ValueError(
            f"the model to train, {model.model_name_or_path}, lies in --output_dir {training.output_dir}, where the "
            "run would replace it: choose another --output_dir"
        )
    dtype = model.dtype
    if training.use_cpu and not training.bf16 and dtype not in (None, "float32"):
        warn_once_per_run(f"dtype {dtype} was asked for: the weights are loaded in float32, which this CPU trains in")
        dtype = "float32"
    # By name and not as an instance: ZeRO-3 must see the model being built.
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": dtype,
        **(training.model_init_kwargs or {}),
    }
    try:
        _check_template(model_path, model, training, datasets.get("train_dataset"))
        trainer = trainer_class(
            model_path,
            args=training,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
            **datasets,
        )
    except OSError as error:
        if error.filename and Path(error.filename).absolute() == Path(training.output_dir).absolute():
            raise ValueError(f"--output_dir {training.output_dir} cannot be made: {error}") from error
        raise ValueError(
            f"the model {model.model_name_or_path!r} could not be loaded; without a network, give a copy's folder "
            f"with --model_name_or_path. ({error})"
        ) from error
    names = ("max_length",) if isinstance(training, SFTConfig) else ("max_response_tokens", "max_prompt_tokens")
    limits = {name: getattr(training, name, None) for name in names}
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        check_rows(trainer.model, dataset, limits)
    return trainer


def _check_template(model_path: str, model: ModelArguments, training, rows: Any) -> None:
    """Refuse messages where there is nothing to write them by, which some trainers would find in their first step.

    Raises:
        OSError: the tokenizer cannot be loaded.
        ValueError: names the remedies.
    """
    columns = rows.column_names if isinstance(rows, Dataset) else []
    first = rows[0]["prompt"] if "prompt" in columns and len(rows) else None
    if not isinstance(first, list) or getattr(training, "chat_template_path", None):
        return
    if AutoTokenizer.from_pretrained(model_path, revision=model.model_revision).chat_template is None:
        raise ValueError(
            f"the data holds messages, and the model {model.model_name_or_path} has no chat template to write them "
            "by: put a chat_template.jinja into the model's folder, or give plain text (prompt, chosen and rejected "
            "as strings), which python -m trl_ext.data.formats --plain makes of some data sets"
        )


def held_out_generations(
    trainer, prompts, arguments, *, max_new_tokens: int, batch_size: int, **options: Any
) -> GenerationEvaluation:
    """What generates for held-out prompts and compares with the base; judged where the data has its own judge.

    Args:
        trainer: of the policy.
        prompts: rows of the benchmark.
        arguments: the recipe's, with `dataset_name` and `generation_temperature`.
        max_new_tokens: of a response.
        batch_size: prompts at a time.
        options: further ones of `GenerationEvaluation`.
    """
    settings = GenerationSettings(
        max_prompt_tokens=trainer.args.max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        temperature=arguments.generation_temperature,
        batch_size=batch_size,
        seed=trainer.args.seed,
    )
    # Only the embedded benchmark comes with a known quality of every response.
    judge = GroundTruthJudge() if arguments.dataset_name == "toy" else None
    score_function = judge.score_function if judge else None
    return GenerationEvaluation(trainer, prompts, settings, judge=judge, score_function=score_function, **options)
