"""Random arguments for test cases: tensors in float64 or float32, masks and stand-ins for models."""

from __future__ import annotations

import math
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
        self._dtype = torch.float32 if special == "float32" else torch.float64
        self._generator = torch.Generator().manual_seed(1000 * seed + index + 500 * attempt)

    def turn(self, *choices: Any) -> Any:
        """Cycle through the choices."""
        return choices[self.index % len(choices)]

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, inclusive."""
        return int(self.integers(1, low=low, high=high))

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def tensor(self, *shape: int, low: float = -2.0, high: float = 2.0, grad: bool = False) -> Tensor:
        """A tensor of uniform numbers with four digits."""
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float64)
        values = (((low + (high - low) * drawn) * 1e4).round() / 1e4).to(self._dtype)
        return values.requires_grad_() if grad else values

    def log_probs(self, *shape: int, grad: bool = False) -> Tensor:
        return self.tensor(*shape, low=-3.0, high=-0.05, grad=grad)

    def signed(self, rows: int) -> Tensor:
        """Advantages of alternating signs, none of them near 0."""
        return self.tensor(rows, low=0.3, high=2.0) * (1.0 - 2.0 * (torch.arange(rows) % 2))

    def drift(self, tokens: int) -> Tensor:
        """Log-ratios of four rows, two of which rise and two fall, so that their means are also beyond a clip."""
        return self.tensor(4, tokens, low=0.0, high=0.9) * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])

    def mask(self, rows: int, tokens: int, *, start: int = 0) -> Tensor:
        """A mask that is True from a position at or after `start` to the end of each row; rows differ in length."""
        ends = start + 1 + (torch.arange(rows) * 2 + self.index) % (tokens - start)
        places = torch.arange(tokens)
        return (places >= start) & (places < ends.unsqueeze(1))

    def padded(self, values: Tensor, mask: Tensor, *, grad: bool = False) -> Tensor:
        """Values with NaN in its special case, and otherwise `GARBAGE`, where the mask is 0."""
        filled = values.masked_fill(mask == 0, math.nan if self.special == "nan" else GARBAGE)
        return filled.requires_grad_() if grad else filled


def fake(kind: str, *, grad: bool = False, **settings: Any) -> dict[str, Any]:
    """A stand-in, named by the case and created by the test."""
    return {"$fake": kind, "settings": settings, **({"grad": True} if grad else {})}
