"""Keys and values of the rows under way: a prompt's are stored once, each response's own beside them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "trl_ext_rows"
# The keyword that carries the rows through the layers of a model to its attention.
KEYWORD = "rollout_rows"
_FIRST_ROOM = 32


class Rows:
    """The rows under way, in which the rows of a prompt are neighbours.

    A forward pass either encodes prompts (`prompts` set) or advances every row by one token.

    Attributes:
        prompt: index of each row's prompt, [n].
        age: response tokens of each row whose keys are stored, [n].
    """

    def __init__(self, capacity: int, limit: int):
        self.capacity, self.limit = capacity, limit
        self.prompt = torch.zeros(0, dtype=torch.long)
        self.age = torch.zeros(0, dtype=torch.long)
        # Keys and values by layer: of each prompt, [key heads, L, head size]; of the prompts that rows refer to,
        # padded, [P, key heads, longest, head size]; and of the responses, [capacity, key heads, room, head size].
        self._encoded: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._shared: dict[int, list[Tensor]] = {}
        self._own: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._shown: tuple[int, ...] = ()
        self._arriving: list[int] = []

    # ---- The set of rows ----

    def begin_prompts(self, prompts: list[int], lengths: list[int]) -> None:
        """The next forward pass encodes these prompts, one after another in one row."""
        self._arriving = prompts
        self._lengths.update(zip(prompts, lengths, strict=True))

    def end_prompts(self) -> None:
        self._arriving = []

    def keep(self, kept: Tensor) -> None:
        """Remove all rows but these, given by ascending indices."""
        moved = (kept != torch.arange(len(kept))).nonzero()[:, 0]
        if len(moved):
            end = int(self.age.max())
            for buffers in self._own.values():
                for buffer in buffers:
                    buffer[moved, :, :end] = buffer[kept[moved], :, :end]
        self.prompt, self.age = self.prompt[kept], self.age[kept]

    def add(self, prompts: Tensor) -> None:
        """Append rows that begin, given their encoded prompts, whose indices are not below those of earlier rows."""
        self.prompt = torch.cat([self.prompt, prompts])
        self.age = torch.cat([self.age, torch.zeros(len(prompts), dtype=torch.long)])

    def arrange(self) -> None:
        """Prepare the layout of the rows after `keep` and `add`."""
        used, place, counts = self.prompt.unique(return_inverse=True, return_counts=True)
        shown = tuple(used.tolist())
        for encoded in self._encoded.values():
            for index in [index for index in encoded if index < shown[0]]:
                del encoded[index]
        # Padded again when prompts arrive, or when half of them have left.
        if not set(shown) <= set(self._shown) or 2 * len(shown) <= len(self._shown):
            self._shown = shown
            for layer, encoded in self._encoded.items():
                pairs = [encoded[index] for index in shown]
                self._shared[layer] = [
                    pad_sequence([pair[kind].transpose(0, 1) for pair in pairs], batch_first=True).transpose(1, 2)
                    for kind in (0, 1)
                ]
            lengths = torch.tensor([self._lengths[index] for index in shown])
            outside = torch.arange(int(lengths.max())) >= lengths[:, None]
            some = next(iter(self._shared.values()))[0]
            self._prefix_mask = _mask(outside, some.dtype)
        where = {index: position for position, index in enumerate(self._shown)}
        place = torch.tensor([where[index] for index in shown])[place]
        self._groups, self._width = len(self._shown), int(counts.max())
        first = torch.zeros(self._groups, dtype=torch.long)
        first[place.unique()] = counts.cumsum(0) - counts
        grid = place * self._width + torch.arange(len(self.prompt)) - first[place]
        # Where each row is in a grid of prompts by rows; None if the grid is full.
        self._grid = None if self._groups * self._width == len(self.prompt) else grid

    def begin_step(self) -> None:
        """The next forward pass advances every row by a token."""
        self._end = int(self.age.max()) + 1
        self._even = bool((self.age == self._end - 1).all())
        if not self._even:
            outside = torch.arange(self._end) > self.age[:, None]
            self._own_mask = _mask(outside, next(iter(self._shared.values()))[0].dtype)
            self._index = torch.arange(len(self.age))

    # ---- Attention ----

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the tokens of this pass; stores their keys and values."""
        if self._arriving:
            return self._encode(layer, query, key, value, scaling)
        count, heads, _, size = query.shape
        key_heads = key.shape[1]
        per = heads // key_heads
        keys, values = self._room(layer, key, value)
        if self._even:
            keys[:count, :, self._end - 1], values[:count, :, self._end - 1] = key[:, :, 0], value[:, :, 0]
        else:
            keys[self._index, :, self.age], values[self._index, :, self.age] = key[:, :, 0], value[:, :, 0]
        # The query heads of a key head are taken as its queries, so that no key is repeated.
        query = query.view(count, key_heads, per, size)
        mask = None if self._even else self._own_mask.expand(-1, 1, per, -1)
        own, own_norm = attention_and_norm(
            query, keys[:count, :, : self._end], values[:count, :, : self._end], mask, scaling
        )
        groups, width = self._groups, self._width
        if self._grid is not None:
            query = query.new_zeros(groups * width, key_heads, per, size).index_copy_(0, self._grid, query)
        query = query.reshape(groups, width, key_heads, per, size).transpose(1, 2)
        query = query.reshape(groups, key_heads, width * per, size)
        mask = self._prefix_mask.expand(-1, 1, width * per, -1)
        shared, norm = attention_and_norm(query, *self._shared[layer], mask, scaling)
        shared = (
            shared.view(groups, key_heads, width, per, -1).transpose(1, 2).reshape(groups * width, key_heads, per, -1)
        )
        norm = norm.view(groups, key_heads, width, per).transpose(1, 2).reshape(groups * width, key_heads, per)
        if self._grid is not None:
            shared, norm = shared[self._grid], norm[self._grid]
        weight = torch.sigmoid(norm - own_norm).to(own.dtype).unsqueeze(-1)
        return torch.lerp(own, shared, weight).view(count, 1, heads, -1)

    def _room(self, layer: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """The layer's buffers of responses, doubled in length when they are full."""
        buffers = self._own.get(layer)
        if buffers is None or buffers[0].shape[2] < self._end:
            room = min(self.limit, max(_FIRST_ROOM, 2 * (self._end - 1), self._end))
            grown = [state.new_zeros(self.capacity, state.shape[1], room, state.shape[-1]) for state in (key, value)]
            for old, new in zip(buffers or (), grown, strict=False):
                new[:, :, : old.shape[2]] = old
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


def _mask(outside: Tensor, dtype: torch.dtype) -> Tensor:
    """0 inside and minus infinity outside, [rows, 1, 1, keys]."""
    return torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, float("-inf"))[:, None, None]


def attention_and_norm(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of its exponentials, by which two attentions are merged.

    Args:
        query: [n, key heads, queries, head size].
        key, value: [n, key heads, keys, head size].
        mask: 0 or minus infinity, broadcast to [n, 1, queries, keys]; None for no mask.
        scaling: factor of the scores.

    Returns:
        [n, key heads, queries, head size] and [n, key heads, queries].
    """
    if _has_operator(query.dtype):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scaling
        )
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(precision) * scaling
    scores = scores if mask is None else scores + mask
    norm = scores.logsumexp(-1)
    return (scores - norm[..., None]).exp().to(value.dtype) @ value, norm


@cache
def _has_operator(dtype: torch.dtype) -> bool:
    """Whether torch's private operator that also returns the norm works here."""
    try:
        states = torch.ones(1, 1, 2, 16, dtype=dtype)
        mask = torch.tensor([[[[0.0, float("-inf")]]]], dtype=dtype).expand(1, 1, 2, 2)
        output, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            states, states, states, attn_mask=mask, scale=0.25
        )
        return torch.allclose(output, states) and torch.allclose(norm, torch.full_like(norm, 4.0))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


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
