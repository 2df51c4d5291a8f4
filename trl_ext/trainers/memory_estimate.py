"""An estimate of what a training run needs of a device's memory and of the disk, from the sizes of its model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl_ext.trainers.engine import Engine
from trl_ext.trainers.model_size import ModelSize

if TYPE_CHECKING:
    from transformers import TrainingArguments

_BYTES = {"float32": 4.0, "float64": 8.0, "bfloat16": 2.0, "float16": 2.0}
# The fused LM head projects so many positions at a time, onto so much of the vocabulary.
_TILE = (4096, 32768)
# Of which it holds one and its gradient on a GPU; on a CPU, where no kernel fuses the steps, 8 as measured.
_TILES_HELD = {True: 8, False: 2}
LEFT_OUT = (
    "what the libraries and the device's driver hold, fragmentation, all-gathered layers, attention scores where "
    "attention is eager, weights in vLLM, reward models, and the comparisons on held-out prompts"
)


@dataclass(frozen=True)
class Weights:
    """How weights are held.

    Attributes:
        dtype: of the base's.
        quantized_bits: 4 or 8 where the linear layers are quantized; None where they are not.
    """

    dtype: str
    quantized_bits: int | None = None

    @property
    def bytes_each(self) -> float:
        return _BYTES[self.dtype]


@dataclass(frozen=True)
class Pass:
    """What one process sends through the model at once.

    Attributes:
        rows: sequences of a micro-batch.
        length: of the longest that the limits allow; packing sends fewer tokens.
        generated_rows, generated_length: responses sampled at once and their longest length, prompt included; 0 where
            nothing is sampled, or elsewhere.
    """

    rows: int
    length: int
    generated_rows: int = 0
    generated_length: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def estimate_memory(
    size: ModelSize, args: TrainingArguments, engine: Engine, weights: Weights, micro_batch: Pass, *, reference: bool
) -> dict[str, int]:
    """Bytes by their purpose on the device of one process, and their sum as `total`.

    Weights, gradients and optimizer states follow from the counts. Activations, the logits and the cache of keys and
    values are rough, and of the longest batch that the limits allow. `LEFT_OUT` says what is not in it.

    Args:
        size: of the model.
        args: the trainer's configuration.
        engine: in force.
        weights: how the weights are held.
        micro_batch: what one pass holds.
        reference: whether a second model is kept as the reference.
    """
    trained_bytes = _trained_bytes(size, engine, weights)
    base_bytes = _base_bytes(size, engine, weights)
    parts = {
        "weights": (base_bytes + size.adapter * _adapter_bytes(engine, weights)) / engine.weight_shards,
        "gradients": size.trained * trained_bytes / engine.gradient_shards,
        "optimizer": optimizer_bytes(size, args, engine, weights) / engine.optimizer_shards,
        "reference": base_bytes / engine.weight_shards if reference else 0,
        "activations": _activations(size, args, engine, micro_batch.tokens),
        "logits": 4 * tiles_held(engine) * math.prod(tile_of(size, micro_batch)),
        "generation": micro_batch.generated_rows
        * micro_batch.generated_length
        * size.layers
        * size.key_values
        * _computed_bytes(engine),
        # DDP reduces copies of the gradients.
        "communication": size.trained * trained_bytes if engine.name == "DDP" and engine.processes > 1 else 0,
    }
    whole = {name: math.ceil(value) for name, value in parts.items()}
    return {**whole, "total": sum(whole.values())}


def tile_of(size: ModelSize, micro_batch: Pass) -> tuple[int, int]:
    """Positions and outputs whose logits are computed at a time."""
    return min(micro_batch.tokens, _TILE[0]), min(size.outputs, _TILE[1])


def tiles_held(engine: Engine) -> int:
    """How many of these are held at once."""
    # Of several processes on a CPU, the first has the device cpu:0.
    return _TILES_HELD[engine.device.startswith("cpu")]


def estimate_checkpoint(size: ModelSize, args: TrainingArguments, engine: Engine, weights: Weights) -> dict[str, int]:
    """Bytes on disk of a saved model (`model`) and of a checkpoint with the optimizer's states (`checkpoint`)."""
    saved = size.trained if size.adapter else size.total
    model = saved * (_adapter_bytes(engine, weights) if size.adapter else _trained_bytes(size, engine, weights))
    checkpoint = model
    if not args.save_only_model:
        checkpoint += optimizer_bytes(size, args, engine, weights)
        # ZeRO-2 saves the trained weights a second time, beside its optimizer's; ZeRO-3 has no whole ones.
        whole = engine.uses_deepspeed and engine.name != "ZeRO-3"
        checkpoint += size.trained * _trained_bytes(size, engine, weights) if whole else 0
    return {"model": math.ceil(model), "checkpoint": math.ceil(checkpoint)}


def optimizer_bytes(size: ModelSize, args: TrainingArguments, engine: Engine, weights: Weights) -> float:
    """Of the optimizer's states over all processes, which DeepSpeed keeps in float32, with a copy of the weights."""
    states = _states(str(getattr(args.optim, "value", args.optim)))
    if engine.uses_deepspeed:
        return size.trained * (4 + (-states if states < 0 else 4 * states))
    each = -states if states < 0 else states * _trained_bytes(size, engine, weights)
    return size.trained * each


def _states(optimizer: str) -> float:
    """States for each parameter, in numbers of its own type; below zero, in bytes; Adam's for one not known."""
    if "8bit" in optimizer:
        return -1 if "lion" in optimizer else -2
    if "4bit" in optimizer:
        return -1
    if optimizer.startswith(("sgd", "adafactor")):
        return 0
    if optimizer.startswith(("adagrad", "rmsprop", "lion", "paged_lion")):
        return 1
    return 2


def _trained_bytes(size: ModelSize, engine: Engine, weights: Weights) -> float:
    """Of one trained parameter, and of its gradient."""
    if size.adapter:
        return _adapter_bytes(engine, weights)
    if engine.mixed_precision != "no":
        if engine.uses_deepspeed:
            return 2
        if engine.name == "FSDP2":
            return 4
    return weights.bytes_each


def _adapter_bytes(engine: Engine, weights: Weights) -> float:
    """PEFT keeps adapters in float32, TRL those of a quantized model in bfloat16, and DeepSpeed all in half."""
    half = engine.mixed_precision != "no" and (engine.uses_deepspeed or weights.quantized_bits)
    return 2 if half else 4


def _base_bytes(size: ModelSize, engine: Engine, weights: Weights) -> float:
    each = _trained_bytes(size, engine, weights) if not size.adapter else weights.bytes_each
    if engine.uses_deepspeed and engine.mixed_precision != "no":
        each = 2
    if weights.quantized_bits is None:
        return size.base * each
    # A scale for each block of 64 weights, in 4 bits and in 8.
    small = weights.quantized_bits / 8 + 4 / 64
    return size.quantizable * small + (size.base - size.quantizable) * each


def _computed_bytes(engine: Engine) -> int:
    return 4 if engine.mixed_precision == "no" else 2


def _activations(size: ModelSize, args: TrainingArguments, engine: Engine, tokens: int) -> float:
    """What the backward pass needs of each token: of every layer, or of its input and of one layer at a time."""
    of_a_layer = 8 * size.hidden + size.key_values + 4 * size.intermediate
    numbers = size.layers * of_a_layer
    if args.gradient_checkpointing:
        numbers = size.layers * size.hidden + of_a_layer
    return tokens * numbers * _computed_bytes(engine)
