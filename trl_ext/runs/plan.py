"""`--print_plan`: what a run would do and need, before any weights are loaded; and a check of its parallel engine."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from trl import get_peft_config

from trl_ext.models import resolve_model_path
from trl_ext.processes import is_main_process, warn_once_per_run
from trl_ext.runs.folder import RESULT_FILES
from trl_ext.trainers.expert_iteration import ExpertIterationConfig
from trl_ext.trainers.kto import KTOConfig
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.preference.config import PreferenceConfig
from trl_ext.trainers.preference.reference import precomputes_reference
from trl_ext.trainers.reward.config import RewardConfig

_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
# The fused LM head computes logits in tiles of (positions, outputs): two copies on a GPU, 8 on a CPU as measured.
_TILE = (4096, 32768)
LEFT_OUT = (
    "the libraries and the driver, fragmentation, DDP's copy of the gradients, layers that are gathered from shards, "
    "attention scores where attention is eager, the cache of keys and values in generation, vLLM, reward models, "
    "quantization, and optimizers other than Adam with two states in the type of the weights"
)


@dataclass
class LaunchArguments:
    """How a run is launched."""

    print_plan: str | None = field(
        default=None,
        metadata={
            "help": "Print processes, engine, updates, memory and files, and end before a weight is loaded; json for "
            "one line of JSON.",
            "nargs": "?",
            "const": "text",
        },
    )
    allow_engine_fallback: bool = field(
        default=False,
        metadata={"help": "Train on where FSDP was asked for and accelerate puts DDP or nothing in its place."},
    )

    doctor: str = field(
        default="on",
        metadata={"help": "Examine data, model and configuration before training, without a step; off to leave it."},
    )

    def __post_init__(self):
        # YAML reads a plain on or off as a truth value.
        self.doctor = {"True": "on", "False": "off"}.get(self.doctor, self.doctor)
        if self.doctor not in ("on", "off"):
            raise ValueError(f"doctor must be on or off, got {self.doctor!r}")
        if self.print_plan not in (None, "text", "json"):
            raise ValueError(f"print_plan must be text or json, got {self.print_plan!r}")


# ---- The engine ----


@dataclass(frozen=True)
class Engine:
    """How the processes of a run share the work.

    Attributes:
        name: none, DDP, DataParallel, FSDP1, FSDP2, or ZeRO-0 to ZeRO-3, as it will actually run.
        asked: the engine that the launcher or the configuration requested.
        processes: their number.
        device: this process's device, such as cuda:0.
        mixed_precision: no, bf16 or fp16.
    """

    name: str
    asked: str
    processes: int
    device: str
    mixed_precision: str


def engine_in_force(args) -> Engine:
    """The engine that the trainer will get from a configuration."""
    kind = args.distributed_state.distributed_type.value
    plain = "DDP" if kind != "NO" else "DataParallel" if args.n_gpu > 1 else "none"
    name = asked = plain
    if args.deepspeed_plugin is not None:
        name = asked = f"ZeRO-{args.deepspeed_plugin.zero_stage}"
    elif args.fsdp_plugin_args is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        version = (args.fsdp_plugin_args or {}).get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))
        asked = f"FSDP{version}"
        # Accelerate enables FSDP only for processes on accelerators, and then changes their kind.
        shards = kind == "FSDP" or (kind.startswith("MULTI_") and kind not in ("MULTI_CPU", "MULTI_NEURON"))
        name = asked if shards else plain
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return Engine(name, asked, args.world_size, str(args.device), precision)


def check_engine(engine: Engine, *, allow_fallback: bool) -> str | None:
    """A warning if the engine is not the requested one, else None.

    Raises:
        ValueError: FSDP was requested and accelerate silently uses something else; or one process sees several GPUs,
            where DataParallel would multiply the batch and split groups.
    """
    if engine.name == "DataParallel":
        raise ValueError(
            "one process sees several GPUs: start it with `accelerate launch --config_file "
            "accelerate_configs/multi_gpu.yaml --num_processes N`, or choose one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if engine.name == engine.asked:
        return None
    place = "a CPU" if engine.device.startswith("cpu") else "one process without a launcher"
    instead = {"none": "nothing is sharded", "DDP": "DDP trains instead, with all weights in every process"}
    found = f"{engine.asked} was asked for, and on {place} {instead[engine.name]}"
    if not allow_fallback:
        raise ValueError(
            f"{found}: launch with accelerate_configs/multi_gpu.yaml or cpu.yaml, use zero2.yaml or zero3.yaml, which "
            "shard on a CPU as well, or give --allow_engine_fallback"
        )
    return found


def check_launch(launch: LaunchArguments, training) -> None:
    """Raise an error if the engine is not the requested one, or print a warning if a fallback is allowed."""
    # A plan describes the engine, whatever it is.
    allowed = launch.allow_engine_fallback or launch.print_plan is not None
    fallback = check_engine(engine_in_force(training), allow_fallback=allowed)
    if fallback is not None:
        warn_once_per_run(fallback)


# ---- The plan ----


def plan_run(
    args,
    model: str,
    *,
    datasets: Mapping[str, Any],
    revision: str | None = None,
    dtype: str | None = "float32",
    peft_config=None,
) -> dict[str, Any]:
    """The plan of a run, ready for JSON: `engine`, `updates`, `parameters`, and bytes of `memory`.

    A model has P parameters of b bytes, of which T are trained. A process then holds P b bytes of weights, T b of
    gradients and 2 T b of Adam states, each divided by the number of processes that share it. For each token and
    layer, a pass stores 8 numbers of the hidden size and 4 of the MLP's. With gradient checkpointing, it stores those
    of one layer and the inputs of all layers. `LEFT_OUT` lists what the estimate omits.

    Args:
        args: the trainer's configuration, created in the process that trains.
        model: folder or hub name; only its configuration is read.
        datasets: the trainer's `train_dataset` and `eval_dataset`; without the first, the trainer creates its
            own data.
        revision: revision of the hub repository.
        dtype: type in which the weights are loaded; None or auto for the saved one.
        peft_config: configuration of the adapter; None to train all parameters.

    Raises:
        OSError: the model does not exist.
        ValueError: the model needs remote code.
    """
    engine = engine_in_force(args)
    config, base, trained = _parameters(model, revision, peft_config, isinstance(args, RewardConfig))
    adapter = trained if peft_config is not None else 0
    held = str(config.dtype or "float32").removeprefix("torch.") if dtype in (None, "auto") else dtype
    reference = not adapter and keeps_reference(args, model, datasets)

    zero, mixed = engine.name.startswith("ZeRO"), engine.mixed_precision != "no"
    each = 2 if zero and mixed else 4 if engine.name == "FSDP2" and mixed and not adapter else _BYTES[held]
    of_trained = (2 if zero and mixed else 4) if adapter else each
    # DeepSpeed keeps two states and a copy of the weights in float32.
    optimizer = trained * (12 if zero else 2 * of_trained)
    stage = int(engine.name[-1]) if zero else 3 if engine.name.startswith("FSDP") else 0
    of_weights, of_gradients, of_optimizer = (engine.processes if stage >= least else 1 for least in (3, 2, 1))

    tokens = tokens_of_pass(args)
    text = config.get_text_config()
    of_layer = 8 * text.hidden_size + 4 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    kept = text.num_hidden_layers * (text.hidden_size if args.gradient_checkpointing else of_layer)
    kept += of_layer if args.gradient_checkpointing else 0
    outputs = 1 if isinstance(args, RewardConfig) else text.vocab_size
    copies = 8 if engine.device.startswith("cpu") else 2
    memory = {
        "weights": (base * each + adapter * of_trained) / of_weights,
        "gradients": trained * of_trained / of_gradients,
        "optimizer": optimizer / of_optimizer,
        "reference": base * each / of_weights if reference else 0,
        "activations": tokens * kept * (2 if mixed else 4),
        "logits": min(tokens, _TILE[0]) * min(outputs, _TILE[1]) * 4 * copies,
    }
    memory = {name: math.ceil(value) for name, value in memory.items()}
    return {
        "engine": vars(engine),
        "updates": plan_updates(args, engine.processes, len(datasets.get("train_dataset") or ()) or None),
        "parameters": {"total": base + adapter, "trained": trained, "dtype": held, "reference": reference},
        "memory": {**memory, "total": sum(memory.values())},
    }


def _parameters(name: str, revision: str | None, peft_config, classifier: bool) -> tuple[Any, int, int]:
    """The configuration, the number of parameters without the adapter, and the number of trained ones."""
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file() and not (Path(name) / "config.json").is_file():
        name = resolve_model_path(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    config = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    kind = transformers.AutoModelForCausalLM
    if classifier:
        config.num_labels, kind = 1, transformers.AutoModelForSequenceClassification
    with torch.device("meta"):
        model = kind.from_config(config)
        model.tie_weights()
        base = sum(parameter.numel() for parameter in model.parameters())
        if peft_config is not None:
            from peft import get_peft_model

            if classifier:
                peft_config.task_type = "SEQ_CLS"
            model = get_peft_model(model, peft_config)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return config, base, trained


def tokens_of_pass(args) -> int:
    """Maximum number of tokens that one process sends through the model at once; packing sends fewer."""
    response = getattr(args, "max_response_tokens", None) or getattr(args, "max_completion_length", None)
    prompt = getattr(args, "max_prompt_tokens", None)
    length = prompt + response if prompt and response else getattr(args, "max_length", None) or 1024
    # Pairs have two responses. KTO also pairs each response with another prompt to estimate the KL.
    sides = 2 if isinstance(args, (PreferenceConfig, RewardConfig, KTOConfig)) else 1
    return sides * args.per_device_train_batch_size * length


def keeps_reference(args, model: str, datasets: Mapping[str, Any]) -> bool:
    """Whether a trainer of all parameters keeps a second model as the reference during training."""
    if isinstance(args, PolicyConfig):
        return args.build_objective().needs_reference
    if isinstance(args, KTOConfig):
        return not args.precompute_ref_log_probs
    if not isinstance(args, PreferenceConfig):
        return False
    objective = args.build_objective()
    return objective.needs_reference and not precomputes_reference(objective, args, dict(datasets))


def plan_updates(args, processes: int, rows: int | None) -> dict[str, Any]:
    """How the rows of the data become updates; None for values known only during training."""
    passes, accumulation = args.train_batch_size * processes, args.gradient_accumulation_steps
    if isinstance(args, ExpertIterationConfig):
        responses = args.n_steps * args.questions_per_step * args.rollouts_per_question
        return {"rounds": args.n_steps, "responses": responses, "examples_per_update": passes * accumulation}
    if isinstance(args, PolicyConfig):
        per_rollout = args.generation_batch_size // args.num_generations
        of_rollout = args.steps_per_generation * args.num_iterations
        updates = _updates(args, None if rows is None else rows // per_rollout * of_rollout)
        return {
            "prompts": rows,
            "prompts_per_rollout": per_rollout,
            "responses_per_rollout": args.generation_batch_size,
            "responses_per_update": passes * accumulation,
            "updates_per_rollout": args.updates_per_rollout,
            "rollouts": None if updates is None else math.ceil(updates * accumulation / of_rollout),
            "updates": updates,
        }
    unit = "pairs" if isinstance(args, (PreferenceConfig, RewardConfig)) else "examples"
    micro_batches = None
    # With packing into rows of one length, TRL counts rows only after tokenization.
    if rows is not None and getattr(args, "packing", False) is not True:
        # Without `dataloader_drop_last`, all processes get the same number of rows, and some rows appear twice.
        batches = math.ceil(rows / args.train_batch_size)
        micro_batches = rows // passes if args.dataloader_drop_last else math.ceil(batches / processes)
    return {unit: rows, f"{unit}_per_update": passes * accumulation, "updates": _updates(args, micro_batches)}


def _updates(args, micro_batches: int | None) -> int | None:
    """Updates of a run whose processes each see this many micro-batches in an epoch."""
    if args.max_steps > 0 or micro_batches is None:
        return args.max_steps if args.max_steps > 0 else None
    return math.ceil(args.num_train_epochs * max(math.ceil(micro_batches / args.gradient_accumulation_steps), 1))


# ---- Printing ----


def end_with_plan(launch: LaunchArguments, model, training, datasets: Mapping[str, Any]) -> None:
    """If `--print_plan` is given, print the plan and exit with code 0.

    Raises:
        ValueError: as for `plan_run`, or the model cannot be read.
    """
    if launch.print_plan is None:
        return
    try:
        plan = plan_run(
            training,
            resolve_model_path(model.model_name_or_path),
            datasets=datasets,
            revision=model.model_revision,
            dtype="float32" if training.use_cpu and not training.bf16 else model.dtype,
            peft_config=get_peft_config(model),
        )
    except OSError as error:
        raise ValueError(
            f"the model {model.model_name_or_path!r} could not be read for its plan; without a network, give a copy's "
            f"folder with --model_name_or_path. ({error})"
        ) from error
    plan |= {"model": model.model_name_or_path, "folder": training.output_dir, "left_out": LEFT_OUT}
    if is_main_process():
        # Print last, below the output of the recipe and the engine.
        print(json.dumps(plan) if launch.print_plan == "json" else plan_text(plan))
        sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    raise SystemExit(0)


def plan_text(plan: Mapping[str, Any]) -> str:
    """The plan as text."""
    engine, parameters, memory = (plan[name] for name in ("engine", "parameters", "memory"))
    fallback = "" if engine["name"] == engine["asked"] else f" ({engine['asked']} was asked for)"
    reference = ", and a reference model as large" if parameters["reference"] else ""
    lines = [
        f"plan for {plan['model']}",
        f"processes: {engine['processes']}, the first on {engine['device']}; engine: {engine['name']}{fallback}; "
        f"mixed precision: {engine['mixed_precision']}",
        "updates:",
        *(
            f"  {name.replace('_', ' ')}: {'known only in training' if count is None else f'{count:,}'}"
            for name, count in plan["updates"].items()
        ),
        f"parameters: {parameters['total']:,} in {parameters['dtype']}, of which {parameters['trained']:,} are "
        f"trained{reference}",
        f"memory of each process's device, about {_size(memory['total'])}:",
        *(f"  {name}: {_size(value)}" for name, value in memory.items() if value and name != "total"),
        f"  left out: {plan['left_out']}",
        f"written into {plan['folder']}: checkpoint-*/, samples/, the model, and what applies of "
        f"{', '.join(RESULT_FILES)}",
    ]
    return "\n".join(lines)


def _size(value: float) -> str:
    unit = min(int(math.log10(max(value, 1)) // 3), 4)
    return f"{value / 1000**unit:.1f} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"
