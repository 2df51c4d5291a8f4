"""Runs a recipe whose rollouts are sampled with other weights than the trainer's; evaluations keep the trainer's.

`accelerate launch benchmarks/_other_sampler.py KIND recipes/grpo_math.py FLAGS`, where KIND is a floating dtype of
torch (`bfloat16`, `float8_e5m2`) or `int4` for weights that are rounded to so few bits, or `lag8` for the weights of
eight rollouts before. Products are in the trainer's precision. The sampler records the log-probabilities of what it
samples from, as always.
"""

from __future__ import annotations

import runpy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from trl_ext.rollouts.sampler import hook


def rounded(weight: Tensor, kind: str) -> Tensor:
    """A matrix with few bits: integers have one scale per row, float8 has one per matrix, bfloat16 has none."""
    if kind.startswith("int"):
        levels = 2 ** (int(kind.removeprefix("int")) - 1) - 1
        scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / levels
        return (weight / scale).round() * scale
    dtype = getattr(torch, kind)
    scale = weight.abs().amax().clamp(min=1e-12) / torch.finfo(dtype).max if kind.startswith("float8") else 1.0
    return (weight / scale).to(dtype).to(weight.dtype) * scale


def other_weights(kind: str) -> Callable[[nn.Module], list[Tensor]]:
    """A function from the model to what the sampler has in place of each parameter; it is called once per rollout."""
    if not kind.startswith("lag"):
        return lambda model: [rounded(p.data, kind) if p.ndim == 2 else p.data for p in model.parameters()]
    earlier: deque[list[Tensor]] = deque(maxlen=int(kind.removeprefix("lag")) + 1)

    def lagged(model: nn.Module) -> list[Tensor]:
        earlier.append([parameter.data.clone() for parameter in model.parameters()])
        return earlier[0]

    return lagged


@contextmanager
def computing(
    plain: Callable, weights: Callable[[nn.Module], list[Tensor]], sampler: hook.Sampler, rows: int
) -> Iterator[None]:
    """`Sampler._computing`, with other weights if the sampler is the trainer's and has passed its check."""
    if hook.sampler_of(sampler.model) is not sampler or sampler.largest_difference is None:
        with plain(sampler, rows):
            yield
        return
    parameters = list(sampler.model.parameters())
    own = [parameter.data for parameter in parameters]
    for parameter, other in zip(parameters, weights(sampler.model), strict=True):
        parameter.data = other
    try:
        with plain(sampler, rows):
            yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


def main() -> None:
    _, kind, recipe, *flags = sys.argv
    weights, plain = other_weights(kind), hook.Sampler._computing
    hook.Sampler._computing = lambda sampler, rows: partial(computing, plain, weights)(sampler, rows)
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
