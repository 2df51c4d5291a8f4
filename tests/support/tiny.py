"""Tiny models, tokenizers and pairs for tests; scripts that tests start as separate processes use them too."""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{% if not loop.last or add_generation_prompt %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer():
    """A byte-level tokenizer without merges: every text is its UTF-8 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHATML
    return fast


def save_tiny_model(path: Path, *, seed: int = 0, dropout: float = 0.0) -> None:
    """A two-layer Qwen2 with random weights large enough that its log-probabilities differ between texts."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 4096, "initializer_range": 0.2}
    shape |= {"attention_dropout": dropout, "tie_word_embeddings": False, "bos_token_id": None}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(vocab_size=len(tokenizer), **shape, **ids)
    # The same weights whatever the default type is, such as under `float64_throughout`.
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        Qwen2ForCausalLM(config).save_pretrained(path)
    finally:
        torch.set_default_dtype(default)
    tokenizer.save_pretrained(path)


def perturbed(model, *, seed: int = 1, scale: float = 0.05):
    """Move every weight a little, so that policy and reference differ (at equality, variants of a loss agree)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * scale)
    return model


def pairs(count: int, *, seed: int = 0) -> list[dict]:
    """Conversational pairs of varied lengths, with a confidence column."""
    import random

    random_state = random.Random(seed)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "six", "red", "birds", "in", "one", "old", "tree"]

    def text(low: int, high: int) -> str:
        return " ".join(random_state.choice(words) for _ in range(random_state.randint(low, high)))

    return [
        {
            "row_id": f"row{index}",
            "prompt": [{"role": "user", "content": text(2, 8)}],
            "chosen": [{"role": "assistant", "content": text(1, 6) + "."}],
            "rejected": [{"role": "assistant", "content": text(1, 6) + "!"}],
            "avg_confidence": round(random_state.uniform(0.5, 1.0), 3),
        }
        for index in range(count)
    ]


def token_log_probs(model, prompt_ids: list[int], response_ids: list[int]):
    """Log-probabilities over the vocabulary before each response token, [T, V]: one row, no padding, float64 softmax.

    The plain computation that batched ones are compared with. Put the model in float64 for the whole of it.
    """
    import torch

    logits = model(torch.tensor([[*prompt_ids, *response_ids]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].double().log_softmax(dim=-1)


def response_log_prob(model, prompt_ids: list[int], response_ids: list[int]):
    """Sum of the response's token log-probabilities; differentiable."""
    import torch

    chosen = torch.tensor(response_ids)[:, None]
    return token_log_probs(model, prompt_ids, response_ids).gather(1, chosen).sum()


def token_ids(tokenizer, row: dict) -> tuple[list[int], list[int], list[int]]:
    """Prompt, chosen and rejected ids of a conversational pair, straight from the chat template."""

    def render(messages: list[dict], add_generation_prompt: bool = False) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return tokenizer(text)["input_ids"]

    prompt = render(row["prompt"], add_generation_prompt=True)
    return prompt, *(render(row["prompt"] + row[side])[len(prompt) :] for side in ("chosen", "rejected"))


def independent_scores(tokenizer, policy, reference, rows: list[dict]):
    """`PreferenceScores` of rows computed one at a time, without padding and without gradients."""
    import torch

    from trl_ext.losses import PreferenceScores

    ids = [token_ids(tokenizer, row) for row in rows]
    with torch.no_grad():
        sums = [
            torch.stack([response_log_prob(model, row[0], row[side]) for row in ids])
            for model in (policy, reference)
            for side in (1, 2)
        ]
    return PreferenceScores(*sums, *(torch.tensor([len(row[side]) for row in ids]) for side in (1, 2)))


def save_tiny_gpt2(path: Path) -> None:
    """Random weights, the tokenizer of bytes, and as in GPT-2 one special token and no chat template."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.pad_token = None
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "n_positions": 1024, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**shape, bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def alpaca(prompt: str, response: str) -> str:
    """An example as the template of Alpaca writes it."""
    first = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    return f"{first}\n\n### Instruction:\n{prompt}\n\n### Response:\n{response}"


def with_special_tokens(tokenizer, template: str):
    """The tokenizer as one that puts `<|im_start|>` before, or its end-of-text token after, every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|im_start|>"
    names = ("<|im_start|>", "<|im_end|>")
    special_tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special_tokens)
    return tokenizer
