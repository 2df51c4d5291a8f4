"""The two models of a run as something to generate with and to score with: the trained policy and its frozen base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import use_adapter


@contextmanager
def trained_policy(trainer) -> Iterator:
    """The policy under training, unwrapped, with its parameters gathered where an engine has sharded them."""
    with unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    ) as model:
        yield model


@contextmanager
def base_policy(trainer) -> Iterator:
    """The model that training began from.

    With an adapter, the policy with its adapter switched off (or its frozen copy switched on); else the trainer's
    reference model; and where it keeps none, the base loaded anew for the while.
    """
    with trained_policy(trainer) as policy:
        if isinstance(policy, PeftModel):
            with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                yield policy
            return
    # A synchronised reference follows the policy and is no longer the base.
    if trainer.ref_model is not None and not trainer.args.sync_ref_model:
        with unwrap_model_for_generation(trainer.ref_model, trainer.accelerator) as model:
            yield model
        return
    path = trainer.model.config._name_or_path
    if not path:
        raise ValueError(
            "the base model is not known any more: the trainer keeps no reference, and the policy was not loaded "
            "from a path; pass the trainer a model by name, or a ref_model"
        )
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=trainer.model.dtype,
        trust_remote_code=trainer.args.trust_remote_code,
    )
    yield model.to(trainer.accelerator.device).eval()
