"""Tiny models by architecture, ragged batches, and padded against packed passes, for the tests of packing."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from trl.trainer.utils import add_fused_lm_head

from trl_ext.models.packing import Packing, share_prefixes

VOCABULARY = 97
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
_SMALL |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False}
# The initial weights are so large that attention to other tokens than the last few shows in the log-probabilities.
_SMALL |= {"attention_dropout": 0.0, "initializer_range": 0.15}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
# Class prefix and what its configuration has beside `_SMALL`.
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 7, "layer_types": _LAYERS}),
    "olmo2": ("Olmo2", {}),
    "gpt_neox": ("GPTNeoX", {"hidden_dropout": 0.0}),
    "qwen2_moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 16}),
    "phi3": ("Phi3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# Further ones, for what they alone have; all but the first are refused.
OTHERS = {
    "starcoder2": ("Starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "gemma2": ("Gemma2", {"head_dim": 8}),
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "bloom": ("Bloom", {"hidden_dropout": 0.0}),
    "mamba": ("Mamba", {}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def tiny_model(architecture: str, *, head: bool = True, outputs=OUTPUTS, seed: int = 0, **options):
    """A causal language model of random weights in training mode, by default with TRL's fused LM head."""
    prefix, own = {**ARCHITECTURES, **OTHERS}[architecture]
    configuration = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(configuration(**{**_SMALL, **own, **options}))
    if head:
        add_fused_lm_head(model, outputs=outputs)
    return model.train()


def tiny_classifier(architecture: str = "qwen2", *, seed: int = 0, **options):
    """A model with one score per row, random weights, in training mode."""
    prefix, own = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    configuration = getattr(transformers, f"{prefix}Config")(**{**_SMALL, **own, "num_labels": 1, **options})
    return getattr(transformers, f"{prefix}ForSequenceClassification")(configuration).train()


def padded(rows, prompts, *, left=None, width: int | None = None, padding: int = 0) -> dict[str, Tensor]:
    """A batch of token lists: `prompts` are the numbers of tokens without a label, `left` of padding on the left."""
    left = [0] * len(rows) if left is None else left
    width = max(len(row) + before for row, before in zip(rows, left, strict=True)) if width is None else width
    input_ids = torch.full((len(rows), width), padding)
    attention_mask, labels = torch.zeros_like(input_ids), torch.full_like(input_ids, -100)
    for index, (row, prompt, before) in enumerate(zip(rows, prompts, left, strict=True)):
        place = slice(before, before + len(row))
        input_ids[index, place], attention_mask[index, place] = torch.tensor(row), 1
        labels[index, before + prompt : before + len(row)] = torch.tensor(row[prompt:])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def ragged(*, seed: int = 1) -> dict[str, Tensor]:
    """Six rows of 10 to 38 tokens whose prompts begin alike, padded on the left, the right and both sides."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    base, prompts = draw(20), [20, 20, 15, 15, 9, 20]
    rows = [base[:prompt] + draw(count) for prompt, count in zip(prompts, [18, 7, 12, 1, 20, 18], strict=True)]
    return padded(rows, prompts, left=[0, 5, 0, 13, 4, 2], width=40)


def forward(model, batch: dict[str, Tensor], **options):
    return model(**batch, fused_lm_head=True, **options)


def gradient(model) -> Tensor:
    """The gradients of all trained parameters, [P]; a parameter that took no part has a zero gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    # Under FSDP2, a process has a part of each.
    parts = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    return torch.cat([part.flatten() for part in parts]).double()


def values_and_gradient(model, batch: dict[str, Tensor], **options):
    """The fused output and the gradient of a sum of its log-probabilities and entropies, each with its own weight."""
    model.zero_grad()
    output = forward(model, batch, **options)
    weights = torch.linspace(-1, 1, output.log_probs.numel(), device=output.log_probs.device).view_as(output.log_probs)
    (output.log_probs * weights + output.entropy * weights.flip(0)).sum().backward()
    return output, gradient(model)


def compare(model, batch: dict[str, Tensor] | None = None, **options) -> tuple[Packing, float, float]:
    """Largest difference of a log-probability, and of the gradient relative to its norm, packed against padded."""
    batch = ragged() if batch is None else batch
    expected, expected_gradient = values_and_gradient(model, batch, **options)
    packing = share_prefixes(model)
    got, got_gradient = values_and_gradient(model, batch, **options)
    apart = (got.log_probs - expected.log_probs).abs().max().item()
    return packing, apart, ((got_gradient - expected_gradient).norm() / expected_gradient.norm()).item()


HOOK = "trl_ext.models.packing.wrap"


def largest(got: Tensor, expected: Tensor) -> float:
    return (got.double() - expected.double()).abs().max().item()


def close(got, expected) -> bool:
    return torch.allclose(got, expected, atol=1e-4)


def said(caplog) -> list[str]:
    """What was logged of packing."""
    return [record.getMessage() for record in caplog.records if record.name == HOOK]


def attention_named(function) -> str:
    """Register an attention function with transformers, which packing may then take for sdpa."""
    name = f"tests_{function.__name__}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


def flash_by_contract(calls: list):
    """FlashAttention's operator by its contract, in plain operations, and what it was called with.

    Queries and keys of a segment end together. A window of (-1, 0) is causal attention, (W, 0) that to W tokens before
    a token and the token itself. Query heads share key heads in order.
    """

    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, dropout, is_causal, debugs, **options):
        scale, window = options["scale"], (options["window_size_left"], options["window_size_right"])
        grouped = query.shape[1] != key.shape[1]
        calls.append({"window": window, "grouped": grouped})
        assert not dropout and not debugs and is_causal == (window[0] < 0)
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key)
        assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
        assert all(states.is_contiguous() for states in (query, key, value))
        outputs = []
        for row in range(len(cu_seq_q) - 1):
            own, other = slice(*cu_seq_q[row : row + 2]), slice(*cu_seq_k[row : row + 2])
            added, length = own.stop - own.start, other.stop - other.start
            distance = torch.arange(length - added, length)[:, None] - torch.arange(length)
            mask = distance >= 0
            assert window[1] == 0
            if window[0] >= 0:
                mask &= distance <= window[0]
            states = (states.transpose(0, 1)[None] for states in (query[own], key[other], value[other]))
            output = scaled_dot_product_attention(*states, attn_mask=mask, scale=scale, enable_gqa=grouped)
            outputs.append(output[0].transpose(0, 1))
        sums = query.new_zeros(query.shape[1::-1], dtype=torch.float32)
        seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return torch.cat(outputs), sums, seed, offset, query.new_zeros(0)

    return attend
