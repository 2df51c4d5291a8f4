"""What a training run will do, before a weight is loaded: its engine, its updates, and what it needs of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trl_ext.trainers.engine import Engine, engine_in_force
from trl_ext.trainers.expert_iteration_config import ExpertIterationConfig
from trl_ext.trainers.kto import KTOConfig
from trl_ext.trainers.memory_estimate import (
    Pass,
    Weights,
    estimate_checkpoint,
    estimate_memory,
    tile_of,
    tiles_held,
)
from trl_ext.trainers.model_size import model_size
from trl_ext.trainers.policy_config import PolicyConfig
from trl_ext.trainers.preference_config import PreferenceConfig
from trl_ext.trainers.reference_cache import precomputes_reference
from trl_ext.trainers.reward_config import RewardConfig

if TYPE_CHECKING:
    from transformers import TrainingArguments


def plan_run(
    args: TrainingArguments,
    model: str,
    *,
    datasets: Mapping[str, Any],
    revision: str | None = None,
    dtype: str | None = "float32",
    quantized_bits: int | None = None,
    peft_config=None,
) -> dict[str, Any]:
    """The plan of a run, of values that JSON holds: `engine`, `updates`, `parameters`, `memory`, `pass` and `disk`.

    `pass` is what one process sends through the model at once, which activations and logits grow with.

    Args:
        args: the trainer's configuration, made in the process that trains.
        model: folder or hub name, of which the configuration alone is read.
        datasets: what the trainer is given as `train_dataset` and `eval_dataset`; without the first, it makes its own.
        revision: of the hub's repository.
        dtype: that the weights are loaded in; None or auto for the saved one.
        quantized_bits: 4 or 8, where they are quantized.
        peft_config: of the adapter; None to train all parameters.

    Raises:
        OSError: no such model.
        ValueError: the model's code would have to be fetched with it.
    """
    engine = engine_in_force(args)
    size = model_size(model, revision=revision, peft_config=peft_config, classifier=isinstance(args, RewardConfig))
    held = size.dtype if dtype in (None, "auto") else dtype
    weights = Weights(held or "float32", quantized_bits)
    rows = len(datasets["train_dataset"]) if "train_dataset" in datasets else None
    updates = plan_updates(args, engine, rows)
    reference = size.adapter == 0 and keeps_reference(args, model, datasets)
    micro_batch = _micro_batch(args, engine)
    memory = estimate_memory(size, args, engine, weights, micro_batch, reference=reference)
    positions, outputs = tile_of(size, micro_batch)
    disk = estimate_checkpoint(size, args, engine, weights)
    checkpoints = _checkpoints(args, updates)
    return {
        "engine": {
            "name": engine.name,
            "asked": engine.asked,
            "processes": engine.processes,
            "devices": engine.devices,
            "device": engine.device,
            "mixed_precision": engine.mixed_precision,
        },
        "updates": updates,
        "parameters": {"total": size.total, "trained": size.trained, "dtype": weights.dtype, "reference": reference},
        "memory": memory,
        "pass": {
            "rows": micro_batch.rows,
            "length": micro_batch.length,
            "tokens": micro_batch.tokens,
            "recomputes_layers": bool(args.gradient_checkpointing),
            "logits": {"positions": positions, "outputs": outputs, "copies": tiles_held(engine)},
            "generated_rows": micro_batch.generated_rows,
            "generated_length": micro_batch.generated_length,
        },
        "disk": {
            **disk,
            "checkpoints": checkpoints,
            "total": None if checkpoints is None else checkpoints * disk["checkpoint"] + disk["model"],
        },
    }


def keeps_reference(args: TrainingArguments, model: str, datasets: Mapping[str, Any]) -> bool:
    """Whether a trainer that trains all parameters keeps a second model as the reference while it trains."""
    if isinstance(args, PolicyConfig):
        return args.build_objective().needs_reference
    if isinstance(args, KTOConfig):
        return not args.precompute_ref_log_probs
    if not isinstance(args, PreferenceConfig):
        return False
    objective = args.build_objective()
    return objective.needs_reference and not precomputes_reference(objective, args, model, None, dict(datasets))


# ---- Updates ----


def plan_updates(args: TrainingArguments, engine: Engine, rows: int | None) -> dict[str, Any]:
    """How the data become updates, in the words of the trainer; None where the training data settle it later.

    `updates` is how many there are in all. Of a policy: a rollout of `responses_per_rollout` responses to
    `prompts_per_rollout` prompts serves `updates_per_rollout` updates.
    """
    if isinstance(args, ExpertIterationConfig):
        return _rounds(args, engine)
    if isinstance(args, PolicyConfig):
        return _rollouts(args, engine, rows)
    of = "pairs" if isinstance(args, (PreferenceConfig, RewardConfig)) else "examples"
    per_update = args.train_batch_size * engine.processes * args.gradient_accumulation_steps
    # What TRL packs into rows of one length is counted once it is tokenized.
    packs = getattr(args, "packing", False) is True
    micro_batches = None if rows is None or packs else _micro_batches(rows, args, engine)
    updates = None if micro_batches is None else updates_in(micro_batches, args)
    if args.max_steps > 0:
        updates = args.max_steps
    return {
        of: rows,
        f"{of}_per_pass": args.train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        f"{of}_per_update": per_update,
        "updates": updates,
        "epochs": None if micro_batches is None else _epochs(updates, micro_batches, args),
    }


def updates_in(micro_batches: int, args: TrainingArguments) -> int:
    """Updates of a run whose process sees so many micro-batches in an epoch."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(args.num_train_epochs * _updates_per_epoch(micro_batches, args))


def _updates_per_epoch(micro_batches: int, args: TrainingArguments) -> int:
    return max(math.ceil(micro_batches / args.gradient_accumulation_steps), 1)


def _epochs(updates: int, micro_batches: int, args: TrainingArguments) -> float:
    return round(updates / _updates_per_epoch(micro_batches, args), 2)


def _micro_batches(rows: int, args: TrainingArguments, engine: Engine) -> int:
    """Of one process in an epoch; without `dataloader_drop_last`, all processes have as many, some rows twice."""
    if args.dataloader_drop_last:
        return rows // args.train_batch_size // engine.processes
    return math.ceil(math.ceil(rows / args.train_batch_size) / engine.processes)


def _rollouts(args: PolicyConfig, engine: Engine, prompts: int | None) -> dict[str, Any]:
    per_rollout = args.generation_batch_size // args.num_generations
    passes = args.steps_per_generation * args.num_iterations
    epoch = None if prompts is None else prompts // per_rollout * passes
    updates = args.max_steps if args.max_steps > 0 else updates_in(epoch, args) if epoch is not None else None
    rollouts = None if updates is None else math.ceil(updates * args.gradient_accumulation_steps / passes)
    return {
        "prompts": prompts,
        "prompts_per_rollout": per_rollout,
        "responses_per_prompt": args.num_generations,
        "responses_per_rollout": args.generation_batch_size,
        "passes_over_rollout": args.num_iterations,
        "responses_per_update": args.train_batch_size * engine.processes * args.gradient_accumulation_steps,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "updates_per_rollout": args.updates_per_rollout,
        "rollouts": rollouts,
        "responses": None if rollouts is None else rollouts * args.generation_batch_size,
        "updates": updates,
    }


def _rounds(args: ExpertIterationConfig, engine: Engine) -> dict[str, Any]:
    """Updates depend on how many responses are correct: `updates_at_most` is of all."""
    responses = args.questions_per_step * args.rollouts_per_question
    kept = min(responses, args.questions_per_step * (args.max_per_question or responses))
    return {
        "rounds": args.n_steps,
        "questions_per_round": args.questions_per_step,
        "responses_per_question": args.rollouts_per_question,
        "responses": args.n_steps * responses,
        "examples_per_update": args.train_batch_size * engine.processes * args.gradient_accumulation_steps,
        "updates": None,
        "updates_at_most": args.n_steps * updates_in(_micro_batches(kept, args, engine), args),
    }


def _checkpoints(args: TrainingArguments, updates: dict[str, Any]) -> int | None:
    """How many lie on the disk at the end."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if isinstance(args, ExpertIterationConfig):
        # And the one that stands before the first round.
        written = args.n_steps + 1
    elif strategy == "no":
        return 0
    elif strategy == "steps" and updates["updates"] is not None:
        every = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * updates["updates"])
        written = math.ceil(updates["updates"] / every)
    elif strategy == "epoch" and updates.get("epochs") is not None:
        written = math.ceil(updates["epochs"])
    else:
        written = args.save_total_limit
    if written is None or args.save_total_limit is None:
        return written
    # The best one stays beside the last.
    keeps_best = args.load_best_model_at_end and args.save_total_limit == 1
    return min(written, args.save_total_limit + int(keeps_best))


# ---- Passes ----


def _micro_batch(args: TrainingArguments, engine: Engine) -> Pass:
    """The longest pass that the limits of lengths allow; 1024 tokens a row where there are none."""
    rows, length = args.per_device_train_batch_size, getattr(args, "max_length", None) or 1024
    if isinstance(args, (PreferenceConfig, RewardConfig)):
        limits = (args.max_prompt_tokens, args.max_response_tokens)
        return Pass(2 * rows, length if None in limits else sum(limits))
    if isinstance(args, KTOConfig) and None not in (args.max_prompt_tokens, args.max_response_tokens):
        # Each completion once more beside another prompt, for the estimate of the KL.
        return Pass(2 * rows, args.max_prompt_tokens + args.max_response_tokens)
    if not isinstance(args, PolicyConfig):
        return Pass(rows, length)
    longest = (args.max_prompt_tokens or 512) + args.max_completion_length
    sampled = 0 if args.use_vllm else args.generation_batch_size // engine.processes
    return Pass(rows, longest, generated_rows=sampled, generated_length=longest)
