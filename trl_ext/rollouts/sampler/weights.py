"""A model prepared for sampling on a CPU: weights in oneDNN's blocked layout, siblings of one input in one product.

A decoding step multiplies every weight by a few dozen rows, for which the blocked layout is faster than that of
`torch.nn.functional.linear`. The operators are private to torch, so they are tried first; without them, the public one
computes the same products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trl_ext.models.batches import evaluating
from trl_ext.rollouts.sampler.rows import ATTENTION

# Layers that are called one after another with the same input, by their names in a parent module.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@contextmanager
def prepared(model: nn.Module, dtype: torch.dtype | None, rows: int) -> Iterator[None]:
    """Within the block, a model computes with blocked weights, attends through `Rows` and is in evaluation mode.

    Its parameters are as before afterwards. The blocked weights take as much memory as those of the linear layers.

    Args:
        model: a transformers model, with adapters or without.
        dtype: precision of the weights and products; None for each weight's own.
        rows: the approximate number of rows of a decoding step, for which the layout is chosen.
    """
    modules = list(model.modules())
    attention = model.config._attn_implementation
    linears = [module for module in modules if type(module) is nn.Linear]
    blocked = {id(module.weight) for module in linears}
    embedded = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    # Replaced in their modules: another dtype of the parameter itself would drop the hooks of its gradient.
    cast = [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
        and parameter.dtype != (dtype or parameter.dtype)
        and (id(parameter) not in blocked or id(parameter) in embedded)
    ]
    with without_wrappers(model), evaluating(model):
        try:
            _multiply_blocked(modules, linears, dtype, rows)
            copies: dict[int, nn.Parameter] = {}
            for holder, name, parameter in cast:
                if id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                holder[name] = copies[id(parameter)]
            model.config._attn_implementation = ATTENTION
            yield
        finally:
            model.config._attn_implementation = attention
            for holder, name, parameter in cast:
                holder[name] = parameter
            for module in linears:
                module.__dict__.pop("forward", None)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Within the block, a model has its own forward passes, and not those that trainers have put in their place."""
    replaced = [(module, module.__dict__["forward"]) for module in model.modules() if "forward" in module.__dict__]
    try:
        for module, _ in replaced:
            del module.forward
        yield
    finally:
        for module, forward in replaced:
            module.forward = forward


def _multiply_blocked(
    modules: list[nn.Module], linears: list[nn.Linear], dtype: torch.dtype | None, rows: int
) -> None:
    """Give linear layers forward passes with blocked weights, and siblings one for all of them."""
    for module in modules:
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if (
                all(type(layer) is nn.Linear for layer in layers)
                and len({(layer.bias is None, layer.weight.dtype) for layer in layers}) == 1
            ):
                fused = _Fused(_product(*layers, dtype=dtype, rows=rows), [layer.out_features for layer in layers])
                for index, layer in enumerate(layers):
                    layer.forward = partial(fused, index)
    for module in linears:
        if "forward" not in module.__dict__:
            module.forward = _product(module, dtype=dtype, rows=rows)


def _product(*layers: nn.Linear, dtype: torch.dtype | None, rows: int) -> Callable[[Tensor], Tensor]:
    """The function that applies linear layers to one input and concatenates their outputs."""
    dtype = dtype or layers[0].weight.dtype
    weight = torch.cat([layer.weight.detach().to(dtype) for layer in layers]).contiguous()
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach().to(dtype) for layer in layers])
    # Adapters cast their input to the precision that their parameters have outside this block.
    if not packs(dtype):
        return lambda states: linear(states.to(dtype), weight, bias)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda states: torch.ops.mkldnn._linear_pointwise(states.to(dtype), blocked, bias, "none", [], "")


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether torch has the blocked layout for a dtype on this processor."""
    try:
        weight, states = torch.eye(16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        return torch.equal(torch.ops.mkldnn._linear_pointwise(states, blocked, None, "none", [], ""), states)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


class _Fused:
    """Sibling layers: the first one called with a tensor computes the outputs of all, and the others take theirs."""

    def __init__(self, product: Callable[[Tensor], Tensor], sizes: list[int]):
        self.product, self.sizes = product, sizes
        self.states: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, index: int, states: Tensor) -> Tensor:
        if states is not self.states:
            self.states, self.outputs = states, self.product(states).split(self.sizes, dim=-1)
        output = self.outputs[index]
        if index == len(self.sizes) - 1:
            self.states, self.outputs = None, ()
        return output
