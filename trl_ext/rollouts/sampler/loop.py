"""The decoding loop: transformers prepares a call of `generate`, and this loop samples in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from trl_ext.rollouts.sampler.draw import draw, uniform_numbers
from trl_ext.rollouts.sampler.rows import KEYWORD, Prompts

# Tokens of prompts that are encoded in one pass; their activations are held at once.
PREFILL_TOKENS = 4096


class Decoder:
    """The rows of a batch that have not ended.

    Args:
        model: a causal language model of transformers, as `prepared` returns it.
        prompts: token ids of each prompt; equal ones are encoded once.
        limit: the largest number of response tokens.

    Attributes:
        order: numbers of the rows in the batch, those of a prompt side by side.
    """

    def __init__(self, model, prompts: Sequence[Sequence[int]], limit: int):
        self.model, self.age = model, 0
        distinct = sorted(dict.fromkeys(map(tuple, prompts)), key=len, reverse=True)
        index = {prompt: position for position, prompt in enumerate(distinct)}
        owner = torch.tensor([index[tuple(prompt)] for prompt in prompts])
        self.order = owner.argsort(stable=True)
        self._lengths = torch.tensor([len(prompts[row]) for row in self.order])
        # By the number of bits of their length, so that padding never doubles a prompt.
        self._groups: list[Prompts] = []
        start = 0
        for _, group in groupby(distinct, key=lambda prompt: len(prompt).bit_length()):
            tokens = list(group)
            own = owner[self.order] - start
            self._groups.append(Prompts(tokens, own[(own >= 0) & (own < len(tokens))], limit))
            start += len(tokens)

    def encode(self) -> Tensor:
        """Encode the prompts. Returns the first logits of every row, [n, V]."""
        found = []
        for group in self._groups:
            count = max(1, PREFILL_TOKENS // int(group.lengths.max()))
            logits = []
            for start in range(0, len(group.tokens), count):
                prompts = group.tokens[start : start + count]
                attend = partial(group.encode, range(start, start + len(prompts)))
                tokens = torch.tensor([token for prompt in prompts for token in prompt])
                positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
                ends = group.lengths[start : start + count].cumsum(0) - 1
                logits.append(self._forward(attend, tokens[None], positions[None], ends)[0])
            found.append(torch.cat(logits)[group.prompt])
        return torch.cat(found)

    def step(self, tokens: Tensor) -> Tensor:
        """Advance every row by a token, [n]. Returns the next logits, [n, V]."""
        for group in self._groups:
            group.begin_step(self.age)
        positions = self._lengths + self.age
        self.age += 1
        return self._forward(self._attend, tokens[:, None], positions[:, None], 1)[:, -1]

    def keep(self, alive: Tensor) -> None:
        """Remove the rows that are not alive, [n]."""
        self._lengths = self._lengths[alive]
        parts = alive.split([len(group.prompt) for group in self._groups])
        kept = [(group, part) for group, part in zip(self._groups, parts, strict=True) if part.any()]
        for group, part in kept:
            group.keep(part)
        self._groups = [group for group, _ in kept]

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        sizes = [len(group.prompt) for group in self._groups]
        parts = zip(*(state.split(sizes) for state in (query, key, value)), strict=True)
        return torch.cat(
            [group.attend(layer, *part, scaling) for group, part in zip(self._groups, parts, strict=True)]
        )

    def _forward(self, attend: Callable, tokens: Tensor, positions: Tensor, keep: int | Tensor) -> Tensor:
        """Logits of at least single precision."""
        logits = self.model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, **{KEYWORD: attend}
        ).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def sample(
    decoder: Decoder,
    input_ids: Tensor,
    logits_processor,
    stopping_criteria,
    *,
    limit: int,
    do_sample: bool,
    padding: int,
) -> tuple[Tensor, Tensor]:
    """Sample a response to every prompt of a left-padded batch.

    A row's numbers depend on the seed of the call and on its place in the batch, not on the rows beside it.

    Args:
        decoder: made for the batch's prompts.
        input_ids: [B, L].
        logits_processor, stopping_criteria: as transformers prepares them for `generate`.
        limit: the largest number of response tokens.
        do_sample: False for the most likely tokens.
        padding: the id that fills ended rows.

    Returns:
        What `generate` returns, [B, L + longest response]; and the log-probability of each response token under the
        distribution from which it was drawn, 0 after a row's end, [B, longest response].
    """
    count, width = input_ids.shape
    sequences = torch.full((count, width + limit), padding)
    sequences[:, :width] = input_ids
    log_probs = torch.zeros(count, limit)
    numbers = uniform_numbers(int(torch.randint(2**31, ())), count, limit) if do_sample else None
    # Since transformers 5.23, a repetition penalty knows the padding of each row of the batch.
    ignored = [(one, getattr(one, "prompt_ignore_length", None)) for one in logits_processor]
    ignored = [(one, leading) for one, leading in ignored if isinstance(leading, Tensor)]
    # Numbers in the batch of the rows that have not ended.
    rows = decoder.order
    logits = decoder.encode()
    for age in range(limit):
        for processor, leading in ignored:
            processor.prompt_ignore_length = leading[rows]
        scores = logits_processor(sequences[rows, : width + age], logits)
        tokens, drawn = draw(scores, None if numbers is None else numbers[rows, age])
        sequences[rows, width + age] = tokens
        log_probs[rows, age] = drawn
        alive = ~stopping_criteria(sequences[rows, : width + age + 1], None)
        if not alive.any():
            break
        if not alive.all():
            rows, tokens = rows[alive], tokens[alive]
            decoder.keep(alive)
        logits = decoder.step(tokens)
    return sequences[:, : width + age + 1], log_probs[:, : age + 1]
