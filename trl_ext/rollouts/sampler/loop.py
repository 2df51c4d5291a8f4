"""The decoding loop: transformers prepares a call of `generate`, and this loop samples in place of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

from trl_ext.rollouts.sampler.draw import draw, uniform_numbers
from trl_ext.rollouts.sampler.rows import KEYWORD, Rows
from trl_ext.rollouts.stopping import StopInResponse

# Tokens of prompts that are encoded in one pass; their activations are held at once.
PREFILL_TOKENS = 4096
# Rows that have ended stay until they are this share of all, since removing rows moves the keys of others.
LEAVING_SHARE = 8
# Waiting rows enter when this share of the places is free, since prompts that are encoded together cost less.
ENTERING_SHARE = 4


class Decoder:
    """Rows of a batch under way, in a model that is `prepared` while its methods run.

    Args:
        model: a causal language model of transformers.
        prompts: token ids of each prompt; equal ones are encoded once.
        capacity: rows at a time; others wait until rows have ended.
        limit: the largest number of response tokens.
    """

    def __init__(self, model, prompts: Sequence[Sequence[int]], capacity: int, limit: int):
        self.model, self.limit = model, limit
        # By length, so that prompts that are encoded or padded together differ little.
        self.prompts = sorted(dict.fromkeys(map(tuple, prompts)), key=len, reverse=True)
        index = {prompt: position for position, prompt in enumerate(self.prompts)}
        owner = [index[tuple(prompt)] for prompt in prompts]
        # Row numbers of the batch, those of a prompt side by side.
        self.order = sorted(range(len(prompts)), key=owner.__getitem__)
        self.owner = torch.tensor(owner)
        self.rows = Rows(min(capacity, len(prompts)), limit)
        self._first: dict[int, Tensor] = {}
        # The logits of a step, which the next step overwrites: the system takes long to give fresh memory.
        self._logits: Tensor | None = None

    def enter(self, numbers: Sequence[int]) -> Tensor:
        """Encode the prompts of rows that begin, where that is not done. Returns their first logits, [n, V]."""
        new = sorted({int(self.owner[number]) for number in numbers} - set(self._first))
        while new:
            lengths = [len(self.prompts[index]) for index in new]
            count = max(1, int((torch.tensor(lengths).cumsum(0) <= PREFILL_TOKENS).sum()))
            chunk, lengths, new = new[:count], lengths[:count], new[count:]
            self.rows.begin_prompts(chunk, lengths)
            tokens = torch.tensor([token for index in chunk for token in self.prompts[index]])
            positions = torch.cat([torch.arange(length) for length in lengths])
            logits = self._forward(tokens[None], positions[None], torch.tensor(lengths).cumsum(0) - 1)
            self.rows.end_prompts()
            self._first.update(zip(chunk, logits[0].to(_at_least_float32(logits.dtype)), strict=True))
        logits = torch.stack([self._first[int(self.owner[number])] for number in numbers])
        # Rows enter in the order of their prompts.
        for index in [index for index in self._first if index < self.owner[numbers[-1]]]:
            del self._first[index]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Advance every row by a token, [n]. Returns the next logits, [n, V], which the next step overwrites."""
        self.rows.begin_step()
        starts = torch.tensor([len(prompt) for prompt in self.prompts])[self.rows.prompt]
        logits = self._forward(tokens[:, None], (starts + self.rows.age)[:, None], 1)[:, -1]
        if self._logits is None:
            self._logits = torch.empty(self.rows.capacity, logits.shape[-1], dtype=_at_least_float32(logits.dtype))
        logits = self._logits[: len(logits)].copy_(logits)
        # Rows that have ended go on until they leave, and may have nowhere to go on to.
        self.rows.age = (self.rows.age + 1).clamp(max=self.limit - 1)
        return logits

    def _forward(self, tokens: Tensor, positions: Tensor, keep) -> Tensor:
        output = self.model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, **{KEYWORD: self.rows}
        )
        return output.logits


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def sample(
    decoder: Decoder, input_ids: Tensor, logits_processor, stopping_criteria, *, do_sample: bool, padding: int
) -> tuple[Tensor, Tensor]:
    """Sample a response to every prompt of a left-padded batch.

    A row's numbers depend on the seed of the call and on its place in the batch, not on the rows beside it.

    Args:
        decoder: made for the batch's prompts.
        input_ids: [B, L].
        logits_processor, stopping_criteria: as transformers prepares them for `generate`.
        do_sample: False for the most likely tokens.
        padding: the id that fills ended rows.

    Returns:
        What `generate` returns, [B, L + longest response]; and the log-probability of each response token under the
        distribution from which it was drawn, 0 after a row's end, [B, longest response].
    """
    count, width = input_ids.shape
    limit = decoder.limit
    sequences = torch.full((count, width + limit), padding)
    sequences[:, :width] = input_ids
    log_probs = torch.zeros(count, limit)
    lengths = torch.zeros(count, dtype=torch.long)
    numbers = None
    if do_sample:
        numbers = uniform_numbers(int(torch.randint(2**31, ())), count, limit)
    # The loop itself counts tokens, row by row.
    stops = [criterion for criterion in stopping_criteria if isinstance(criterion, StopInResponse)]
    criteria = StoppingCriteriaList(
        criterion for criterion in stopping_criteria if not isinstance(criterion, (MaxLengthCriteria, StopInResponse))
    )
    # Since transformers 5.23, a repetition penalty knows the padding of each row of the batch.
    ignored = [(one, getattr(one, "prompt_ignore_length", None)) for one in logits_processor]
    ignored = [(one, leading) for one, leading in ignored if isinstance(leading, Tensor)]
    rows = decoder.rows
    waiting = list(decoder.order)
    living = torch.zeros(0, dtype=torch.long)
    ended = torch.zeros(0, dtype=torch.bool)
    tokens = torch.zeros(0, dtype=torch.long)

    def choose(which: Tensor, age: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of rows, record it, and tell which rows it ends."""
        # Right-aligned, as rows of several ages need; the left is filled as padding of prompts is.
        place = torch.arange(width + int(age.max())) - (age.max() - age)[:, None]
        ids = sequences[which[:, None], place.clamp(min=0)].masked_fill_(place < 0, padding)
        for processor, leading in ignored:
            processor.prompt_ignore_length = leading[which]
        scores = logits_processor(ids, logits)
        chosen, scores = draw(scores, None if numbers is None else numbers[which, age], work=logits)
        sequences[which, width + age] = chosen
        log_probs[which, age] = scores
        lengths[which] = age + 1
        done = age + 1 == limit
        if criteria:
            done = done | criteria(torch.cat([ids, chosen[:, None]], dim=1), None)
        for criterion in stops:
            ended = map(criterion.has_ended, _responses(sequences[:, width:], which, age + 1))
            done = done | torch.tensor(list(ended))
        return chosen, done

    while waiting or not ended.all():
        leaving = int(ended.sum())
        free = rows.capacity - len(living) + leaving
        # Prompts are encoded several at a time.
        entering = bool(waiting) and free * ENTERING_SHARE >= rows.capacity
        changed = leaving > 0 and (entering or leaving * LEAVING_SHARE >= len(living))
        if changed:
            kept = (~ended).nonzero()[:, 0]
            rows.keep(kept)
            living, tokens, ended = living[kept], tokens[kept], ended[kept]
        while waiting and free * ENTERING_SHARE >= rows.capacity:
            fresh, waiting = torch.tensor(waiting[:free]), waiting[free:]
            chosen, done = choose(fresh, torch.zeros_like(fresh), decoder.enter(fresh.tolist()))
            stay = ~done
            rows.add(decoder.owner[fresh[stay]])
            living, tokens, ended = (
                torch.cat(pair) for pair in ((living, fresh[stay]), (tokens, chosen[stay]), (ended, done[stay]))
            )
            free, changed = rows.capacity - len(living), True
        if not len(living):
            continue
        if changed:
            rows.arrange()
        logits = decoder.step(tokens)
        if ended.any():
            alive = (~ended).nonzero()[:, 0]
            chosen, done = choose(living[alive], rows.age[alive], logits[alive])
            tokens, ended = tokens.index_copy(0, alive, chosen), ended.index_copy(0, alive, done)
        else:
            tokens, ended = choose(living, rows.age, logits)
    longest = int(lengths.max())
    return sequences[:, : width + longest], log_probs[:, :longest]


def _responses(sequences: Tensor, which: Tensor, lengths: Tensor) -> list[list[int]]:
    """The tokens of rows so far."""
    pairs = zip(which.tolist(), lengths.tolist(), strict=True)
    return [sequences[row, :length].tolist() for row, length in pairs]
