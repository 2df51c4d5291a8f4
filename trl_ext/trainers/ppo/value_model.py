"""Loads a separate model for PPO's value function: a reward model, or a language model without its head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from trl.trainer.utils import disable_dropout_in_model

from trl_ext.models import resolve_model_path
from trl_ext.models.shared_backbone import preserved_random_state
from trl_ext.rewards import RewardModel
from trl_ext.trainers.policies import is_zero3


def load_value_model(trainer) -> tuple[nn.Module, nn.Linear]:
    """The trunk and the head of `value_model_name_or_path`, in float32, ready for training.

    Args:
        trainer: a `PPOTrainer` that already has its policy.

    Raises:
        ValueError: ZeRO-3 shards parameters, the model cannot be loaded, or its tokens are not the policy's.
    """
    name = resolve_model_path(trainer.args.value_model_name_or_path)
    if is_zero3(trainer.accelerator):
        raise ValueError("value_model separate does not go with ZeRO-3: it is loaded whole; use value_model adapter")
    device = trainer.accelerator.device
    _check_tokens(trainer.processing_class, name)
    trunk, head = _of_reward_model(name, device) if _is_reward_model(name) else _of_language_model(name, device)
    rows, tokens = trunk.get_input_embeddings().num_embeddings, max(trainer.processing_class.get_vocab().values()) + 1
    if rows < tokens:
        raise ValueError(
            f"the value model {trainer.args.value_model_name_or_path} embeds {rows} tokens and the policy's tokenizer "
            f"has {tokens}, of which it could not read the last: its base is another; use value_model shared"
        )
    for module in (trunk, head):
        module.requires_grad_(True).train()
    if trainer.args.disable_dropout:
        disable_dropout_in_model(trunk)
    if trainer.args.gradient_checkpointing:
        trunk.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trunk, head


def _is_reward_model(name: str) -> bool:
    from transformers import AutoConfig

    if (Path(name) / "adapter_config.json").is_file():
        return True
    return any("SequenceClassification" in kind for kind in AutoConfig.from_pretrained(name).architectures or ())


def _of_reward_model(name: str, device: torch.device) -> tuple[nn.Module, nn.Linear]:
    model = RewardModel(name, packing="off").load(device).model
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    head = getattr(model, "score", None) or getattr(model, "classifier", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(f"{name}: its head is no linear layer with one output, as a value head must be")
    return model.base_model, head.float()


def _of_language_model(name: str, device: torch.device) -> tuple[nn.Module, nn.Linear]:
    from transformers import AutoModelForCausalLM

    trunk = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True).base_model.to(device)
    with preserved_random_state():
        head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return trunk, head


def _check_tokens(tokenizer, name: str) -> None:
    from transformers import AutoTokenizer

    try:
        own = AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError) as error:
        raise ValueError(f"the value model {name} cannot be used, its tokenizer cannot be loaded: {error}") from error
    if own != tokenizer.get_vocab():
        raise ValueError(
            f"the value model {name} reads other tokens than the policy ({len(own)} and {len(tokenizer.get_vocab())} "
            "in their vocabularies, or in another order): a value function reads the policy's own tokens; give one "
            "with the policy's tokenizer, or use value_model shared"
        )
