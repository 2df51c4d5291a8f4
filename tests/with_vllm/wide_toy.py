"""The embedded model with heads of a size that vLLM's CPU attention supports."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_ext.toy import MODEL_DIR

HEAD = 32
KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def save_wide_toy(path: str | Path) -> None:
    """Save the embedded Qwen2 as a Llama with heads of 32 numbers instead of 24, the same function but for rounding.

    The additional numbers of a head are zeros. The base of the rotary embedding is changed so that the frequencies of
    the other numbers stay the same, and the queries so that the scale of the scores does.
    """
    toy = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    config, weights = toy.config, toy.state_dict()
    grown = HEAD / (config.hidden_size // config.num_attention_heads)
    base = config.rope_parameters["rope_theta"] ** grown
    wide = LlamaForCausalLM(
        LlamaConfig(
            **{name: getattr(config, name) for name in KEPT},
            head_dim=HEAD,
            # Llama has it on the outputs too, where the embedded model has none.
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": base},
        )
    )
    for name in list(weights):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        if "o_proj" in name:
            weights[name] = _pad_heads(weights[name].T, config.num_attention_heads).T
            weights[name.replace("weight", "bias")] = torch.zeros(config.hidden_size)
        elif "self_attn" in name:
            weights[name] = _pad_heads(weights[name], heads) * (grown**0.5 if "q_proj" in name else 1)
    wide.load_state_dict(weights)
    wide.generation_config = toy.generation_config
    wide.save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(path)


def _pad_heads(tensor: Tensor, heads: int) -> Tensor:
    """Zeros behind each half of a head's rows, since the rotary embedding pairs the halves."""
    halves = tensor.unflatten(0, (heads, 2, -1))
    return torch.nn.functional.pad(halves, [0, 0] * (tensor.dim() - 1) + [0, HEAD // 2 - halves.shape[2]]).flatten(
        0, 2
    )
