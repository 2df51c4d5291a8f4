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


class Decoder:
    """The rows of a batch, in a model that is `prepared` while its methods run.

    Args:
        model: a causal language model of transformers.
        prompts: token ids of each prompt; equal ones are encoded once.
        limit: the largest number of response tokens.
    """

    def __init__(self, model, prompts: Sequence[Sequence[int]], limit: int):
        self.model, self.limit = model, limit
        # By length, so that prompts that are encoded or padded together differ little.
        self.prompts = sorted(dict.fromkeys(map(tuple, prompts)), key=len, reverse=True)
        self._lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        index = {prompt: position for position, prompt in enumerate(self.prompts)}
        owner = torch.tensor([index[tuple(prompt)] for prompt in prompts])
        # Row numbers of the batch, those of a prompt side by side.
        self.order = owner.argsort(stable=True)
        self.rows = Rows(owner[self.order], limit)
        # The logits of a step, which the next step overwrites: the system takes long to give fresh memory.
        self._logits: Tensor | None = None

    def encode(self) -> Tensor:
        """Encode the prompts. Returns the first logits of every row, [n, V]."""
        first, start = [], 0
        while start < len(self.prompts):
            count = max(1, int((self._lengths[start:].cumsum(0) <= PREFILL_TOKENS).sum()))
            chunk, lengths = range(start, start + count), self._lengths[start : start + count]
            self.rows.begin_prompts(chunk, lengths.tolist())
            tokens = torch.tensor([token for index in chunk for token in self.prompts[index]])
            positions = torch.cat([torch.arange(length) for length in lengths])
            first.append(self._forward(tokens[None], positions[None], lengths.cumsum(0) - 1)[0])
            start += count
        self.rows.end_prompts()
        logits = torch.cat(first)
        return logits.to(_at_least_float32(logits.dtype))[self.rows.prompt]

    def step(self, tokens: Tensor) -> Tensor:
        """Advance every row by a token, [n]. Returns the next logits, [n, V], which the next step overwrites."""
        self.rows.begin_step()
        positions = self._lengths[self.rows.prompt] + self.rows.age
        logits = self._forward(tokens[:, None], positions[:, None], 1)[:, -1]
        if self._logits is None:
            self._logits = torch.empty(logits.shape, dtype=_at_least_float32(logits.dtype))
        self.rows.age += 1
        return self._logits[: len(logits)].copy_(logits)

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
    numbers = None
    if do_sample:
        numbers = uniform_numbers(int(torch.randint(2**31, ())), count, limit)
    # The loop itself counts tokens.
    stops = [criterion for criterion in stopping_criteria if isinstance(criterion, StopInResponse)]
    criteria = StoppingCriteriaList(
        criterion for criterion in stopping_criteria if not isinstance(criterion, (MaxLengthCriteria, StopInResponse))
    )
    # Since transformers 5.23, a repetition penalty knows the padding of each row of the batch.
    ignored = [(one, getattr(one, "prompt_ignore_length", None)) for one in logits_processor]
    ignored = [(one, leading) for one, leading in ignored if isinstance(leading, Tensor)]
    # The decoder's rows by their numbers in the batch, and those of them that have not ended.
    rows, alive = decoder.order, torch.arange(count)
    tokens = torch.zeros(count, dtype=torch.long)
    logits = decoder.encode()
    for age in range(limit):
        which = rows[alive]
        for processor, leading in ignored:
            processor.prompt_ignore_length = leading[which]
        scores = logits_processor(sequences[which, : width + age], logits)
        chosen, scores = draw(scores, None if numbers is None else numbers[which, age], work=logits)
        sequences[which, width + age] = chosen
        log_probs[which, age] = scores
        tokens[alive] = chosen
        done = torch.full((len(which),), age + 1 == limit)
        if criteria:
            done = done | criteria(sequences[which, : width + age + 1], None)
        for criterion in stops:
            responses = sequences[which, width : width + age + 1].tolist()
            done = done | torch.tensor(list(map(criterion.has_ended, responses)))
        alive = alive[~done]
        if not len(alive):
            break
        if len(alive) < len(rows) and (len(rows) - len(alive)) * LEAVING_SHARE >= len(rows):
            decoder.rows.keep(alive)
            rows, tokens, alive = rows[alive], tokens[alive], torch.arange(len(alive))
        logits = decoder.step(tokens)
        logits = logits[alive] if len(alive) < len(rows) else logits
    return sequences[:, : width + age + 1], log_probs[:, : age + 1]
