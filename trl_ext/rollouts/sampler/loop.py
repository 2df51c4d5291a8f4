"""The decoding loop: transformers prepares a call of `generate`, and this loop samples in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from trl_ext.rollouts.sampler.rows import KEYWORD, Prompts

# Tokens of prompts that are encoded in one pass; their activations are held at once.
PREFILL_TOKENS = 4096


class Decoder:
    """The rows of a batch that have not ended, for a model as `prepared` returns it. Equal prompts are encoded once.

    `order` has the numbers of the rows in the batch, those of a prompt side by side.
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
    """Sample a response of at most `limit` tokens to every prompt of a left-padded batch.

    A row's numbers depend on the seed of the call and on its place in the batch, not on the rows beside it.

    Args:
        input_ids: [B, L].
        logits_processor, stopping_criteria: as transformers prepares them for `generate`.
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


def draw(scores: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token for each row, [n], and its log-probability in float32, [n].

    The token is where the cumulative distribution passes the row's number. The search runs over sums of blocks and
    then within one block, which costs less than the random number for each entry that `torch.multinomial` draws.

    Args:
        scores: logits after all processors, [n, vocabulary size]; overwritten, since fresh memory is slow.
        uniform: numbers in [0, 1), in float64, [n]; None for the most likely token.
    """
    if uniform is None:
        tokens = scores.argmax(-1)
        return tokens, (scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)).float()
    size = scores.shape[-1]
    blocks = next(count for count in (256, 128, 64, 32, 16, 8, 4, 2, 1) if size % count == 0)
    mass = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    tiles = mass.view(len(mass), blocks, size // blocks)
    sums = tiles.sum(-1).double().cumsum(-1)
    total = sums[:, -1:]
    if not total.isfinite().all():
        raise RuntimeError("the next token has no probabilities: logits are NaN, or every token is excluded")
    point = uniform[:, None] * total
    block = torch.searchsorted(sums, point, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = tiles[torch.arange(len(mass)), block[:, 0]].double().cumsum(-1)
    # Rounding must not choose an entry without mass, such as one that top-p has removed.
    last = (within < within[:, -1:]).sum(-1, keepdim=True)
    place = torch.searchsorted(within, point - before, right=True).minimum(last)
    tokens = block * (size // blocks) + place
    return tokens[:, 0], (mass.gather(1, tokens).double().log() - total.log())[:, 0].float()


def uniform_numbers(seed: int, rows: int, steps: int) -> Tensor:
    """Each row's numbers, which depend on the seed and the row's index alone. [rows, steps], float64."""
    generator, numbers = torch.Generator(), torch.empty(rows, steps, dtype=torch.float64)
    for row in range(rows):
        numbers[row].uniform_(generator=generator.manual_seed(seed * 1_000_003 + row))
    return numbers
