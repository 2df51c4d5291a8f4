"""Random arguments for test cases: tensors in float64, masks, scores and stand-ins for models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Value at positions that do not count: far from every other value, to reveal leaks.
GARBAGE = 37.0


class Draw:
    """A source of random arguments, determined by the seed and `attempt`.

    Attributes:
        index: the number of the case, used to cycle through the settings of a function.
        special: the special property of the case, such as `nan` at positions that do not count; empty for none.
    """

    def __init__(self, seed: int, index: int, special: str = "", attempt: int = 0):
        self.index, self.special = index, special
        self._generator = torch.Generator().manual_seed(1000 * seed + index + 500 * attempt)

    def turn(self, *choices: Any) -> Any:
        """Cycle through the choices."""
        return choices[self.index % len(choices)]

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, inclusive."""
        return int(torch.randint(low, high + 1, (1,), generator=self._generator))

    def uniform(self, low: float, high: float) -> float:
        """A uniform number with three digits, for readability."""
        return round(low + (high - low) * float(torch.rand(1, generator=self._generator)), 3)

    def tensor(self, *shape: int, low: float = -2.0, high: float = 2.0, grad: bool = False) -> Tensor:
        """A tensor of uniform numbers with four digits."""
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float64)
        values = ((low + (high - low) * drawn) * 1e4).round() / 1e4
        return values.requires_grad_() if grad else values

    def log_probs(self, *shape: int, grad: bool = False) -> Tensor:
        return self.tensor(*shape, low=-3.0, high=-0.05, grad=grad)

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def mask(self, rows: int, tokens: int, *, start: int = 0) -> Tensor:
        """A mask that is True from a position at or after `start` to the end of each row; rows differ in length."""
        ends = torch.stack(
            [torch.tensor(start + 1 + (row * 2 + self.index) % (tokens - start)) for row in range(rows)]
        )
        places = torch.arange(tokens)
        return (places >= start) & (places < ends.unsqueeze(1))

    def scores(self, pairs: int, *, reference: bool = True, lengths: bool = False, **fields: Any) -> dict[str, Any]:
        """`PreferenceScores` of a number of pairs, with gradient to the policy's scores."""
        made = {"chosen": self._sums(pairs, True), "rejected": self._sums(pairs, True)}
        if reference:
            made |= {"ref_chosen": self._sums(pairs, False), "ref_rejected": self._sums(pairs, False)}
        if lengths:
            made |= {f"{name}_length": self.integers(pairs, low=2, high=12) for name in ("chosen", "rejected")}
        return {"$object": "PreferenceScores", "fields": {**made, **fields}}

    def _sums(self, pairs: int, grad: bool) -> Tensor:
        return self.tensor(pairs, low=-30.0, high=-2.0, grad=grad)


def fake(kind: str, *, grad: bool = False, **settings: Any) -> dict[str, Any]:
    """A stand-in, named by the case and created by the test."""
    return {"$fake": kind, "settings": settings, **({"grad": True} if grad else {})}


def with_padding(values: Tensor, mask: Tensor, filler: float = GARBAGE) -> Tensor:
    """Put the filler where the mask is 0."""
    filled = values.detach().masked_fill(mask == 0, filler)
    return filled.requires_grad_() if values.requires_grad else filled
