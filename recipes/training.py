"""What recipes that train share: the model arguments, the data, the trainer, and taking up an interrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerState
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_ext import load_benchmark
from trl_ext.models import resolve_model_path
from trl_ext.trainers.defaults import is_main_process, warn_once_per_run


@dataclass
class ModelArguments(ModelConfig):
    """TRL's model arguments, with the embedded model as the default."""

    model_name_or_path: str | None = field(
        default="toy", metadata={"help": "toy, a folder, or a hub model such as Qwen/Qwen2.5-1.5B-Instruct."}
    )


@contextmanager
def can_be_resumed() -> Iterator[None]:
    """End an interrupted run with a line that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if is_main_process():
            print(
                "\ninterrupted; once there is a checkpoint in the output folder, the same command goes on from it "
                "with --resume_from_checkpoint (and without --overwrite_output_dir)"
            )
        raise SystemExit(130) from None


def load_pairs(name: str, split: str, *, skip_bad_rows: bool):
    """A benchmark whose split `split` is there to train on and holds pairs.

    Raises:
        ValueError: it has no such split, or the split holds prompts only.
    """
    benchmark = load_benchmark(name, skip_bad_rows=skip_bad_rows)
    if split not in benchmark:
        raise ValueError(
            f"{name} has no split {split!r} to train on: it has {', '.join(benchmark)}; name one with --train_split"
        )
    if "chosen" not in benchmark[split].column_names:
        raise ValueError(f"the split {split!r} holds prompts and no pairs: name another --train_split")
    return benchmark


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
        return trainer_class(
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


def load_finished(trainer, checkpoint: str | None) -> bool:
    """Load a checkpoint that is the end of the run; training on from it would take one step too many."""
    if checkpoint is None or trainer.args.max_steps <= 0 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return False
    state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
    if state.global_step < trainer.args.max_steps:
        return False
    trainer._load_from_checkpoint(checkpoint)
    state.is_world_process_zero = trainer.is_world_process_zero()
    state.is_local_process_zero = trainer.is_local_process_zero()
    trainer.state = state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
        trainer._load_best_model()
    return True
