"""Keys and values of prompts and of the rows that respond to them, and the attention of the rows to both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "trl_ext_rows"
# The keyword that carries an attention function through a model to its layers.
KEYWORD = "rollout_attention"
_FIRST_ROOM = 32


class Prompts:
    """Prompts of similar length, P in all, whose keys and values are stored once, and the rows that respond to them.

    `prompt` is the index of each remaining row's prompt, ascending, [n]; `limit` the number of response tokens.
    """

    def __init__(self, tokens: Sequence[Sequence[int]], prompt: Tensor, limit: int):
        self.tokens, self.prompt, self.limit = tokens, prompt, limit
        self.lengths = torch.tensor([len(prompt) for prompt in tokens])
        self.age = 0
        # Keys and values by layer: of the prompts, [P, key heads, L, head size]; and of the responses,
        # [rows, key heads, room, head size].
        self._states: dict[int, list[Tensor]] = {}
        self._own: dict[int, list[Tensor]] = {}
        self._arrange()

    # ---- The set of rows ----

    def keep(self, alive: Tensor) -> None:
        """Remove the rows that are not alive, [n]."""
        kept = alive.nonzero()[:, 0]
        moved = (kept != torch.arange(len(kept))).nonzero()[:, 0]
        for buffers in self._own.values():
            for buffer in buffers:
                buffer[moved, :, : self.age + 1] = buffer[kept[moved], :, : self.age + 1]
        self.prompt = self.prompt[kept]
        used = self.prompt.unique()
        if 2 * len(used) <= len(self.lengths):
            # Prompts without rows leave as well.
            self.lengths, self.prompt = self.lengths[used], torch.searchsorted(used, self.prompt)
            longest = int(self.lengths.max())
            for layer, states in self._states.items():
                self._states[layer] = [state[used, :, :longest].contiguous() for state in states]
        self._arrange()

    def _arrange(self) -> None:
        """Lay the rows out in a grid of prompts by rows, in which the rows of a prompt attend to it together."""
        counts = self.prompt.bincount(minlength=len(self.lengths))
        first = counts.cumsum(0) - counts
        self._width = int(counts.max())
        grid = self.prompt * self._width + torch.arange(len(self.prompt)) - first[self.prompt]
        # Where each row is in the grid; None if the grid is full.
        self._grid = None if len(self.prompt) == len(self.lengths) * self._width else grid
        self._mask = _mask(torch.arange(int(self.lengths.max())) >= self.lengths[:, None])[self.prompt]

    def begin_step(self, age: int) -> None:
        """The next forward pass advances every row, whose response has `age` tokens with stored keys."""
        self.age = age
        # Of the prompts' and the responses' keys, [n, 1, 1, L + age + 1].
        self._bias = pad(self._mask, (0, age + 1))

    # ---- Attention ----

    def encode(
        self, indices: Sequence[int], layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attention of the prompts of these indices, one after another in one row; stores their keys and values."""
        if layer not in self._states:
            shape = (len(self.lengths), key.shape[1], int(self.lengths.max()))
            self._states[layer] = [state.new_zeros(*shape, state.shape[-1]) for state in (key, value)]
        outputs, start = [], 0
        grouped = query.shape[1] != key.shape[1]
        for index in indices:
            length = int(self.lengths[index])
            states = [state[:, :, start : start + length] for state in (query, key, value)]
            outputs.append(scaled_dot_product_attention(*states, is_causal=True, scale=scaling, enable_gqa=grouped))
            for stored, state in zip(self._states[layer], states[1:], strict=True):
                stored[index, :, :length] = state[0]
            start += length
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the next token of each row to its prompt and response; stores its key and value."""
        count, heads, _, size = query.shape
        keys, values = self._room(layer, key, value)
        keys[:count, :, self.age], values[:count, :, self.age] = key[:, :, 0], value[:, :, 0]
        keys, values = keys[:count, :, : self.age + 1], values[:count, :, : self.age + 1]
        prompt_keys, prompt_values = self._states[layer]
        length = prompt_keys.shape[2]
        # The query heads of a key head are taken as its queries, so that no key is repeated.
        query = query.view(count, key.shape[1], -1, size)
        # Keys times queries, and not the transpose, leaves the keys as they lie in memory.
        own = (keys @ query.transpose(-1, -2)).transpose(-1, -2)
        shared = (prompt_keys @ self._by_prompt(query).transpose(-1, -2)).transpose(-1, -2)
        scores = torch.cat([self._by_row(shared, query.shape[2]), own], dim=-1)
        weights = torch.softmax(torch.add(self._bias, scores, alpha=scaling), dim=-1).to(values.dtype)
        output = weights[..., length:] @ values
        output += self._by_row(self._by_prompt(weights[..., :length]) @ prompt_values, query.shape[2])
        return output.view(count, 1, heads, -1)

    def _room(self, layer: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """The layer's buffers of responses, doubled in length when they are full."""
        buffers = self._own.get(layer)
        if buffers is None or buffers[0].shape[2] <= self.age:
            room = min(self.limit, max(_FIRST_ROOM, 2 * self.age))
            grown = [state.new_zeros(len(state), state.shape[1], room, state.shape[-1]) for state in (key, value)]
            for old, new in zip(buffers or (), grown, strict=False):
                new[:, :, : old.shape[2]] = old[: len(new)]
            self._own[layer] = buffers = grown
        return buffers

    def _by_prompt(self, states: Tensor) -> Tensor:
        """[n, key heads, queries, d] to [P, key heads, rows of a prompt times queries, d]."""
        _, key_heads, per, size = states.shape
        if self._grid is not None:
            padded = states.new_zeros(len(self.lengths) * self._width, key_heads, per, size)
            states = padded.index_copy_(0, self._grid, states)
        states = states.reshape(len(self.lengths), self._width, key_heads, per, size).transpose(1, 2)
        return states.reshape(len(self.lengths), key_heads, self._width * per, size)

    def _by_row(self, states: Tensor, per: int) -> Tensor:
        """The inverse of `_by_prompt`."""
        states = states.reshape(len(states), states.shape[1], self._width, per, -1).transpose(1, 2)
        states = states.flatten(0, 1)
        return states if self._grid is None else states[self._grid]


def _mask(outside: Tensor) -> Tensor:
    """0 inside and minus infinity outside, [rows, 1, 1, keys]."""
    return torch.zeros(outside.shape).masked_fill_(outside, float("-inf"))[:, None, None]


class CannotSample(Exception):
    """A model or a call that is left to transformers' own generation; the message says why."""


# Keywords of attention that change nothing for a row that advances by one token.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "dropout", "is_causal", "sliding_window"})


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    attend = kwargs.pop(KEYWORD)
    unknown = [name for name, given in kwargs.items() if name not in _HARMLESS and given not in (None, False)]
    if unknown:
        raise CannotSample(f"its attention takes {', '.join(unknown)}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)
# transformers builds no mask: the rows know what each token may see.
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
