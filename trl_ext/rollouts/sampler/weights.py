"""A model prepared for sampling on a CPU: weights in oneDNN's blocked layout, siblings of one input in one product.

A decoding step multiplies every weight by a few dozen rows, for which the blocked layout is faster than that of
`torch.nn.functional.linear`. The operators are private to torch, so they are tried first; without them, the public one
computes the same products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trl_ext.rollouts.sampler.rows import ATTENTION

# Layers that are called one after another with the same input, by their names in a parent module.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of a model's modules that shares their parameters, in evaluation mode.

    What is set on the copy does not reach the model. The copy has the forward passes of its classes, without those
    that trainers have put in their place.
    """
    copies: dict[nn.Module | None, nn.Module | None] = {None: None}
    for module in model.modules():
        copies[module] = twin = object.__new__(type(module))
        twin.__dict__.update({**module.__dict__, "training": False})
        twin.__dict__.pop("forward", None)
    for module, twin in copies.items():
        if twin is not None:
            twin._parameters, twin._buffers = {**module._parameters}, {**module._buffers}
            twin._modules = {name: copies[child] for name, child in module._modules.items()}
    return copies[model]


def prepared(model: nn.Module, dtype: torch.dtype | None, rows: int) -> nn.Module:
    """A copy of a model that computes with blocked weights, and whose attention is that of the call's keyword.

    The model stays as it is. The blocked weights take as much memory as those of the linear layers.

    Args:
        dtype: precision of the weights and products; None for each weight's own.
        rows: the approximate number of rows of a decoding step, for which the layout is chosen.
    """
    twin, config = shared_copy(model), copy.copy(model.config)
    config._attn_implementation = ATTENTION
    for module in twin.modules():
        if module.__dict__.get("config") is model.config:
            module.config = config
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            alike = all(type(layer) is nn.Linear for layer in layers) and (
                len({(layer.bias is None, layer.weight.dtype) for layer in layers}) == 1
            )
            if alike:
                fused = _Fused(_product(*layers, dtype=dtype, rows=rows), [layer.out_features for layer in layers])
                for index, layer in enumerate(layers):
                    layer.forward = partial(fused, index)
        if type(module) is not nn.Linear:
            # Linear layers keep theirs: adapters cast their input to the dtype of their parameters.
            for name, parameter in module._parameters.items():
                if parameter is not None and dtype is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        elif "forward" not in module.__dict__:
            module.forward = _product(module, dtype=dtype, rows=rows)
    return twin


def _product(*layers: nn.Linear, dtype: torch.dtype | None, rows: int) -> Callable[[Tensor], Tensor]:
    """The function that applies linear layers to one input and concatenates their outputs."""
    dtype = dtype or layers[0].weight.dtype
    weight = torch.cat([layer.weight.detach().to(dtype) for layer in layers]).contiguous()
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach().to(dtype) for layer in layers])
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
