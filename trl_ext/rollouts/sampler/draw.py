"""Draw tokens from logits, one uniform number for each row."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(scores: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token for each row, and its log-probability.

    The token is where the cumulative distribution passes the row's number. The search runs over sums of blocks and
    then within one block, which costs less than the random number for each entry that `torch.multinomial` draws.

    Args:
        scores: logits after all processors, [n, vocabulary size]; overwritten, since fresh memory is slow.
        uniform: numbers in [0, 1), in float64, [n]; None for the most likely token.

    Returns:
        Tokens [n], and their log-probabilities in float32 [n].
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
    generator = torch.Generator()
    return torch.stack(
        [
            torch.rand(steps, generator=generator.manual_seed(seed * 1_000_003 + row), dtype=torch.float64)
            for row in range(rows)
        ]
    )
