"""Stand-ins for arguments that are not tensors: a tokenizer, a language model, a reward rule."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch


class Tokenizer:
    """A tokenizer with one token per word; a new word gets the next id. 0 pads and 1 ends a text."""

    bos_token, bos_token_id = None, None

    def __init__(self, pad_token_id: int | None = 0, size: int = 64):
        self.pad_token_id, self.eos_token_id, self.size = pad_token_id, 1, size
        self.pad_token, self.eos_token = (None if pad_token_id is None else "<pad>"), "<end>"
        self._ids = {"<pad>": 0, "<end>": 1}

    def encode(self, text: str, add_special_tokens: bool = True, **ignored) -> list[int]:
        ids = []
        for word in text.split():
            # A word has the same id, whichever word came first.
            code = 2 + sum((place + 1) * ord(letter) for place, letter in enumerate(word)) % (self.size - 2)
            ids.append(self._ids.get(word, code))
        return ids

    def __call__(self, text, add_special_tokens: bool = True, return_tensors: str | None = None, **ignored):
        one = isinstance(text, str)
        ids = self.encode(text) if one else [self.encode(each) for each in text]
        if return_tensors is None:
            # Like transformers: a mapping with attributes.
            mask = [1] * len(ids) if one else [[1] * len(row) for row in ids]
            return _Encoding(input_ids=ids, attention_mask=mask)
        tensor = torch.tensor([ids] if one else ids)
        return _Encoding(input_ids=tensor, attention_mask=torch.ones_like(tensor))


class _Encoding(dict):
    """A dict whose keys are also attributes."""

    __getattr__ = dict.__getitem__


class Model(torch.nn.Module):
    """A causal language model that reads a token and the sum of the previous ones; the seed determines its weights."""

    def __init__(self, seed: int, size: int = 64, width: int = 6):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.nn.Parameter(torch.randn(size, width, generator=generator, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(width, size, generator=generator, dtype=torch.float64))
        self.device, self.config = torch.device("cpu"), SimpleNamespace(vocab_size=size)

    def forward(self, input_ids, **ignored):
        embedded = self.embedding[input_ids]
        seen = embedded.cumsum(dim=1) / torch.arange(1, input_ids.shape[1] + 1).unsqueeze(1)
        return SimpleNamespace(logits=torch.tanh(embedded + seen) @ self.head)


def word_reward(response: str, truth: str, scale: float = 1.0) -> dict[str, float]:
    """`scale` if the truth is the response's last word, plus an eighth for each time it occurs."""
    words = response.split()
    answer = scale * float(bool(words) and words[-1] == truth)
    reward = answer + words.count(truth) / 8
    return {"reward": reward, "format_reward": float(bool(words)), "answer_reward": answer}


def make(kind: str, **settings):
    """Create a stand-in by its kind."""
    makers = {"tokenizer": Tokenizer, "model": Model, "reward": lambda **scale: partial(word_reward, **scale)}
    return makers[kind](**settings)
