"""Keys and values of the rows of a batch: a prompt's are stored once, each response's own beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "trl_ext_rows"
# The keyword that carries the rows through the layers of a model to its attention.
KEYWORD = "rollout_rows"
_FIRST_ROOM = 32


class Rows:
    """The rows of a batch, in which the rows of a prompt are neighbours.

    A forward pass either encodes prompts or advances every row by one token.

    Args:
        prompt: index of each row's prompt, ascending, [n].
        limit: the largest number of response tokens.

    Attributes:
        prompt: as above, for the rows that are left.
        age: response tokens of each row whose keys are stored.
    """

    def __init__(self, prompt: Tensor, limit: int):
        self.prompt, self.limit = prompt, limit
        self.age = 0
        # Keys and values by layer: of each prompt, [key heads, L, head size]; and of the responses,
        # [rows, key heads, room, head size].
        self._encoded: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._own: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, int] = {}
        # By the number of bits of their length, so that padding never doubles a prompt.
        self._prompts: dict[int, _Prompts] = {}
        self._arriving: Sequence[int] = ()

    # ---- The set of rows ----

    def begin_prompts(self, prompts: Sequence[int], lengths: list[int]) -> None:
        """The next forward pass encodes these prompts, one after another in one row."""
        self._arriving = prompts
        self._lengths.update(zip(prompts, lengths, strict=True))

    def end_prompts(self) -> None:
        """All prompts are encoded."""
        self._arriving = ()
        self._arrange()

    def keep(self, kept: Tensor) -> None:
        """Remove all rows but these, given by ascending indices."""
        moved = (kept != torch.arange(len(kept))).nonzero()[:, 0]
        for buffers in self._own.values():
            for buffer in buffers:
                buffer[moved, :, : self.age] = buffer[kept[moved], :, : self.age]
        self.prompt = self.prompt[kept]
        self._arrange()

    def _arrange(self) -> None:
        """Prepare the layout of the rows."""
        shown = self.prompt.tolist()
        for encoded in self._encoded.values():
            for index in encoded.keys() - set(shown):
                del encoded[index]
        bits = [self._lengths[index].bit_length() for index in shown]
        self._prompts = {size: self._prompts.get(size) or _Prompts() for size in dict.fromkeys(bits)}
        for size, prompts in self._prompts.items():
            start = bits.index(size)
            prompts.rows = slice(start, start + bits.count(size))
            prompts.arrange(self.prompt[prompts.rows], self._encoded, self._lengths)

    def begin_step(self) -> None:
        """The next forward pass advances every row by a token."""
        for prompts in self._prompts.values():
            prompts.bias = pad(prompts.mask, (0, self.age + 1))

    # ---- Attention ----

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the tokens of this pass; stores their keys and values."""
        if self._arriving:
            return self._encode(layer, query, key, value, scaling)
        count, heads, _, size = query.shape
        key_heads = key.shape[1]
        per = heads // key_heads
        keys, values = self._room(layer, key, value)
        keys[:count, :, self.age], values[:count, :, self.age] = key[:, :, 0], value[:, :, 0]
        keys, values = keys[:count, :, : self.age + 1], values[:count, :, : self.age + 1]
        # The query heads of a key head are taken as its queries, so that no key is repeated.
        query = query.view(count, key_heads, per, size)
        output = [
            prompts.attend(layer, query[prompts.rows], keys[prompts.rows], values[prompts.rows], scaling)
            for prompts in self._prompts.values()
        ]
        return torch.cat(output).view(count, 1, heads, -1)

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

    def _encode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        outputs, start = [], 0
        grouped = query.shape[1] != key.shape[1]
        for index in self._arriving:
            end = start + self._lengths[index]
            states = [state[:, :, start:end] for state in (query, key, value)]
            outputs.append(scaled_dot_product_attention(*states, is_causal=True, scale=scaling, enable_gqa=grouped))
            self._encoded.setdefault(layer, {})[index] = (states[1][0].clone(), states[2][0].clone())
            start = end
        return torch.cat(outputs, dim=2).transpose(1, 2)


class _Prompts:
    """Prompts of similar length, padded to one length, and the rows that respond to them.

    Attributes:
        rows: the rows' indices.
        mask: of the prompts' keys for each row, [n, 1, 1, L].
        bias: of the prompts' and the responses' keys in this step, [n, 1, 1, L + end].
    """

    def __init__(self):
        self.rows = slice(0, 0)
        self._shown: tuple[int, ...] = ()
        # Keys and values by layer, [P, key heads, L, head size].
        self._states: dict[int, list[Tensor]] = {}

    def arrange(self, prompt: Tensor, encoded: dict[int, dict[int, tuple[Tensor, Tensor]]], lengths: dict) -> None:
        """Prepare for rows that respond to these prompts, given by ascending indices."""
        used, place, counts = prompt.unique(return_inverse=True, return_counts=True)
        shown = tuple(used.tolist())
        # Padded again when prompts arrive, or when half of them have left.
        if not set(shown) <= set(self._shown) or 2 * len(shown) <= len(self._shown):
            self._shown = shown
            for layer, by_prompt in encoded.items():
                pairs = [by_prompt[index] for index in shown]
                self._states[layer] = [
                    pad_sequence([pair[kind].transpose(0, 1) for pair in pairs], batch_first=True)
                    .transpose(1, 2)
                    .contiguous()
                    for kind in (0, 1)
                ]
            sizes = torch.tensor([lengths[index] for index in shown])
            self._outside = torch.arange(int(sizes.max())) >= sizes[:, None]
        where = {index: position for position, index in enumerate(self._shown)}
        place = torch.tensor([where[index] for index in shown])[place]
        self._groups, self._width = len(self._shown), int(counts.max())
        first = torch.zeros(self._groups, dtype=torch.long)
        first[place.unique()] = counts.cumsum(0) - counts
        grid = place * self._width + torch.arange(len(prompt)) - first[place]
        # Where each row is in a grid of prompts by rows; None if the grid is full.
        self._grid = None if self._groups * self._width == len(prompt) else grid
        self.mask = _mask(self._outside[place])

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of each row to its prompt and to its response, whose keys and values are given."""
        prompt_keys, prompt_values = self._states[layer]
        per, length = query.shape[2], prompt_keys.shape[2]
        # Keys times queries, and not the transpose, leaves the keys as they lie in memory.
        own = (keys @ query.transpose(-1, -2)).transpose(-1, -2)
        shared = (prompt_keys @ self._by_prompt(query).transpose(-1, -2)).transpose(-1, -2)
        scores = torch.cat([self._by_row(shared, per), own], dim=-1)
        weights = torch.softmax(torch.add(self.bias, scores, alpha=scaling), dim=-1).to(values.dtype)
        output = weights[..., length:] @ values
        output += self._by_row(self._by_prompt(weights[..., :length]) @ prompt_values, per)
        return output

    def _by_prompt(self, states: Tensor) -> Tensor:
        """[n, key heads, queries, d] to [P, key heads, rows of a prompt times queries, d]."""
        _, key_heads, per, size = states.shape
        if self._grid is not None:
            padded = states.new_zeros(self._groups * self._width, key_heads, per, size)
            states = padded.index_copy_(0, self._grid, states)
        states = states.reshape(self._groups, self._width, key_heads, per, size).transpose(1, 2)
        return states.reshape(self._groups, key_heads, self._width * per, size)

    def _by_row(self, states: Tensor, per: int) -> Tensor:
        """The inverse of `_by_prompt`."""
        states = states.reshape(self._groups, states.shape[1], self._width, per, -1).transpose(1, 2)
        states = states.reshape(self._groups * self._width, *states.shape[2:])
        return states if self._grid is None else states[self._grid]


def _mask(outside: Tensor) -> Tensor:
    """0 inside and minus infinity outside, [rows, 1, 1, keys]."""
    return torch.zeros(outside.shape).masked_fill_(outside, float("-inf"))[:, None, None]


class CannotSample(Exception):
    """A model or a call that is left to transformers' own generation; the message says why."""


# Keywords of attention that change nothing for a row that advances by one token.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "dropout", "is_causal", "sliding_window"})


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    rows = kwargs.pop(KEYWORD)
    unknown = [
        name for name, given in kwargs.items() if name not in _HARMLESS and given is not None and given is not False
    ]
    if unknown:
        raise CannotSample(f"its attention takes {', '.join(unknown)}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return rows.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)
# transformers builds no mask: the rows know what each token may see.
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
