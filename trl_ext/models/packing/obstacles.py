"""Reasons not to pack a model's forward passes, as far as its class and configuration show."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.modules.dropout import _DropoutNd
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Kinds of rotary embedding whose angles depend on the longest position of the batch.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def forward_functions(model) -> Iterator[Callable]:
    """The functions that a call of the model passes through, outermost first, as far as wrappers expose them.

    Mixed precision wraps the forward pass of a model; TRL's reference models are prepared in this way immediately.
    """
    function = getattr(model.forward, "__func__", model.forward)
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def has_fused_head(model) -> bool:
    """Whether the model has TRL's fused LM head, even under a mixed-precision wrapper."""
    signatures = (inspect.signature(function, follow_wrapped=False) for function in forward_functions(model))
    return any("fused_lm_head" in signature.parameters for signature in signatures)


def is_classifier(model) -> bool:
    """Whether the model is for sequence classification, as reward models are."""
    return type(model).__name__.endswith("ForSequenceClassification")


def packing_obstacle(model) -> str | None:
    """Why a model's forward passes cannot be packed, in a few words; None if no obstacle is known.

    Other obstacles, such as a soft cap of the attention scores, show when the first batch is tried.

    Args:
        model: a transformers model for causal language modelling or sequence classification, without wrappers.
    """
    if getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod"):
        return "it is compiled"
    text = model.config.get_text_config()
    if text is not model.config:
        return "it takes more than text"
    if is_classifier(model) and not isinstance(model, GenericForSequenceClassification):
        return "it reads its scores in a way of its own"
    others = set(getattr(text, "layer_types", None) or ()) - _LAYERS
    if others:
        return f"it has layers of the kind {', '.join(sorted(others))}"
    if text._attn_implementation not in ALL_ATTENTION_FUNCTIONS:
        attention = text._attn_implementation
        return f"its attention is {attention}: load it with attn_implementation sdpa or a flash attention"
    if not getattr(text, "rope_parameters", None):
        return "its positions are not rotary"
    # With several kinds of layers there is one set of parameters for each kind.
    sets = [value for value in text.rope_parameters.values() if isinstance(value, dict)] or [text.rope_parameters]
    if any(entry.get("rope_type") in LENGTH_DEPENDENT_ROPE for entry in sets):
        return "its rotary angles depend on the length of the batch"
    return None


def sliding_window(config) -> int | None:
    """The window of the model's sliding attention layers; None if it has none."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    return (getattr(text, "sliding_window", None) or None) if kinds is None or "sliding_attention" in kinds else None


def has_active_dropout(model) -> bool:
    """Whether a forward pass would now draw dropout, or router noise."""
    idle: set[int] = set()
    for module in model.modules():
        if not module.training or id(module) in idle:
            continue
        if isinstance(module, BaseTunerLayer):
            # Of several adapters only the active ones draw, and none while they are disabled.
            active = () if module.disable_adapters else module.active_adapters
            dropouts = getattr(module, "lora_dropout", {})
            idle.update(id(dropouts[name]) for name in dropouts if name not in active)
        if _draws(module):
            return True
    return False


def _draws(module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    # Most modules of a model are torch's, and this runs at every call.
    if type(module).__module__.startswith("torch."):
        return False
    # Models store functional rates as numbers: `attention_dropout`, `residual_dropout`, `router_jitter_noise`.
    rates = (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def has_embedding_noise(model) -> bool:
    """Whether a forward pass would add NEFTune's noise, whose size depends on the length of the batch."""
    embedding = model.get_input_embeddings()
    return embedding.training and bool(getattr(embedding, "neftune_noise_alpha", None))
