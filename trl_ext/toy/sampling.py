"""Sample responses of a causal language model to user messages, in batches, and flag those that were cut."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trl_ext.toy import MAX_NEW_TOKENS


class Response(NamedTuple):
    """The text of a response and whether it reached its end token within the limit."""

    text: str
    finished: bool


@torch.inference_mode()
def respond(
    model,
    tokenizer,
    prompts: list[str],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 100,
) -> list[Response]:
    """Answer each prompt once at a temperature; 0 decodes greedily. The same seed gives the same answers."""
    torch.manual_seed(seed)
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        options = {"do_sample": False}
    responses: list[Response] = []
    for begin in range(0, len(prompts), batch_size):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts[begin : begin + batch_size]
        ]
        encoded = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(model.device)
        output = model.generate(**encoded, max_new_tokens=max_new_tokens, use_cache=True, **options)
        completions = output[:, encoded["input_ids"].shape[1] :]
        finished = (completions == tokenizer.eos_token_id).any(dim=1).tolist()
        decoded = tokenizer.batch_decode(completions, skip_special_tokens=True)
        responses += [Response(*pair) for pair in zip(decoded, finished, strict=True)]
    return responses
