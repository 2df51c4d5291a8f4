"""Small models, prompts and settings for tests of sampling."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from tests.support.packing import VOCABULARY, padded, tiny_model

# The token that ends a response.
END = 1


def batch(*, copies: int = 3, seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of 1 to 17 tokens, padded on the left; copies of one are not neighbours."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in (7, 17, 1, 12)]
    lists = prompts * copies
    width = max(map(len, lists))
    made = padded(lists, [0] * len(lists), left=[width - len(one) for one in lists])
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def settings(limit: int = 24, **given) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=limit, eos_token_id=[END, 50, 60], pad_token_id=0, **given)


def decoder(architecture: str = "llama", dtype: torch.dtype = torch.float64, **options):
    return tiny_model(architecture, head=False, **options).to(dtype).eval()
