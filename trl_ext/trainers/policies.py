"""Access to the two models of a run for generation and scoring: the trained policy and its frozen base."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import broadcast, is_peft_model
from transformers import PreTrainedModel
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import use_adapter

from trl_ext.models.batches import temporarily

# Initializations of LoRA that change the weights of the base, so that these without the adapter are no model's.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@contextmanager
def reference_in_memory(trl_trainer: type, model) -> Iterator[None]:
    """Within the block, TRL's constructor makes the reference of a given model by copying it.

    TRL reads the reference from the folder that the model was once loaded from. The weights there are others if the
    model has been trained or edited, has new tokens, or if the folder was overwritten.

    Args:
        trl_trainer: TRL's class, whose constructor is called within the block.
        model: as the trainer was given it.
    """
    is_in_memory = isinstance(model, PreTrainedModel)
    if is_in_memory and "_original_forward" in vars(model):
        # Autocast of an earlier trainer, under which this one's would be left out.
        _without_replacements(model)
    # ZeRO-3 divides the model, which can therefore not be copied.
    if not is_in_memory or any(hasattr(weight, "ds_id") for weight in model.parameters()):
        yield
        return

    def reference(*args: Any, **kwargs: Any) -> PreTrainedModel:
        copied = copy.deepcopy(model)
        copied.zero_grad(set_to_none=True)
        _without_replacements(copied)
        return copied.requires_grad_(False).eval()

    with temporarily(sys.modules[trl_trainer.__module__], create_model_from_path=reference):
        yield


def _without_replacements(model: PreTrainedModel) -> None:
    """Remove what trainers have put in place of a model's own functions; in a copy, it may call the original."""
    # Of a model on several devices, accelerate's hooks move the tensors.
    if not hasattr(model, "_hf_hook"):
        for name in [*vars(model)]:
            replaced = ("forward", "generate", "_original_forward", "_is_accelerate_prepared")
            if name in replaced or name.startswith("_trl_ext"):
                del vars(model)[name]


def check_base_of_adapter(model) -> None:
    """Raise ValueError for an adapter which, when switched off, does not leave the model that training begins from."""
    if not is_peft_model(model):
        return
    needed = "so the model without the adapter is not the one that training begins from, which is needed here"
    for config in model.peft_config.values():
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.startswith(_CHANGE_THE_BASE):
            raise ValueError(f"init_lora_weights={start!r} changes the weights of the base, {needed}: leave it out")
    for name, weight in model.named_parameters():
        # Beside the base there may be a value head, and the vectors of a learned prompt.
        in_base = name.startswith("base_model.") and not {*model.peft_config} & {*name.split(".")}
        if weight.requires_grad and in_base:
            raise ValueError(
                f"beside the adapter, parameters of the base are trained, such as {name}, {needed}: set bias to none, "
                "or name their modules in modules_to_save"
            )


@contextmanager
def trained_policy(trainer) -> Iterator:
    """The policy under training, unwrapped, with its parameters gathered if an engine has sharded them."""
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        trainer.accelerator.autocast(),
    ):
        # The model inside torch.compile's wrapper has the expected names and type.
        yield getattr(model, "_orig_mod", model)


def remember_base(trainer) -> None:
    """Keep the weights that `base_policy` will need; call it before training.

    With an adapter or a fixed reference model, nothing is kept. Otherwise the first process copies the initial weights
    to CPU memory, and also the trained ones while `base_policy` is in use.

    Raises:
        ValueError: FSDP shards the weights, so that they cannot be exchanged; or see `check_base_of_adapter`.
    """
    if _fixed_reference(trainer) is not None:
        return
    if is_peft_model(trainer.model):
        check_base_of_adapter(trainer.model)
        return
    if trainer.is_fsdp_enabled:
        raise ValueError("FSDP needs a reference model or an adapter for a comparison with the base")
    with trained_policy(trainer) as model:
        trainer.base_weights = _weights(model, trainer.accelerator)


@contextmanager
def base_policy(trainer) -> Iterator:
    """The model that training began from.

    With an adapter, this is the policy with its adapter switched off (or its frozen copy switched on). Otherwise it is
    the trainer's reference model or, if there is none, the policy with the weights that `remember_base` kept.

    Raises:
        ValueError: the base is needed and was not remembered.
    """
    reference = _fixed_reference(trainer)
    if reference is not None:
        with unwrap_model_for_generation(reference, trainer.accelerator) as model, trainer.accelerator.autocast():
            yield model
        return
    with trained_policy(trainer) as policy:
        if is_peft_model(policy):
            with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                yield policy
            return
        if getattr(trainer, "base_weights", None) is None:
            raise ValueError("the base is not known: call remember_base(trainer) before training")
        trained = _weights(policy, trainer.accelerator)
        try:
            _load(policy, trainer.base_weights, trainer.accelerator)
            yield policy
        finally:
            _load(policy, trained, trainer.accelerator)


def _fixed_reference(trainer):
    """The trainer's reference model; None if it follows the policy or does not exist, as in fine-tuning."""
    return None if getattr(trainer.args, "sync_ref_model", False) else getattr(trainer, "ref_model", None)


def _weights(model, accelerator) -> dict[str, torch.Tensor]:
    """A copy of the model's weights in the CPU memory of the first process; the others have none."""
    parameters = model.named_parameters() if accelerator.is_main_process else ()
    return {name: weight.detach().cpu().clone() for name, weight in parameters}


@torch.no_grad()
def _load(model, weights: dict[str, torch.Tensor], accelerator) -> None:
    """Set the weights of all processes to those of the first."""
    for name, weight in model.named_parameters():
        if weights:
            weight.copy_(weights[name])
        if accelerator.num_processes > 1:
            broadcast(weight.data)
    # An open autocast context may hold copies of the previous weights.
    torch.clear_autocast_cache()


def is_zero3(accelerator) -> bool:
    """Whether DeepSpeed divides every parameter among the processes."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3
