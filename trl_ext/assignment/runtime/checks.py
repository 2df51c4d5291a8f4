"""Call a function on a case and return the outcome as plain values. Only this module imports the student's package.

A case contains arguments. An outcome contains the function's output, the gradients of that output with respect to the
arguments that require one, and the arguments that the function changed. `verdicts` compares outcomes.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from . import fakes


class Given:
    """The arguments of one call, created from a case.

    Attributes:
        arguments: arguments by name.
        leaves: the tensors that gradients are taken with respect to, by path.
        passed: the tensors that the function received, by path.
    """

    def __init__(self, case: dict[str, Any], package: str | None):
        self.package, self.leaves, self.passed, self.models = package, {}, {}, {}
        self.arguments = {name: self._decode(value, name) for name, value in case["arguments"].items()}
        self._before = {path: tensor.detach().clone() for path, tensor in self.passed.items()}

    def changed(self) -> list[str]:
        """Paths of the tensors that have changed."""
        same = {path: _equal(tensor.detach(), self._before[path]) for path, tensor in self.passed.items()}
        return [path for path, equal in same.items() if not equal]

    def _decode(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [self._decode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            return self._tensor(value, path)
        if "$number" in value:
            return float(value["$number"])
        if "$fake" in value:
            made = fakes.make(value["$fake"], **value.get("settings", {}))
            if value.get("grad"):
                self.leaves |= {f"{path}.{name}": leaf for name, leaf in made.named_parameters()}
            return made
        fields = value.get("fields", value)
        decoded = {name: self._decode(item, f"{path}.{name}") for name, item in fields.items()}
        if "$object" not in value:
            return decoded
        module = importlib.import_module(self.package) if self.package else None
        return getattr(module, value["$object"])(**decoded)

    def _tensor(self, value: dict[str, Any], path: str) -> Tensor:
        tensor = torch.tensor(_numbers(value["$tensor"]), dtype=getattr(torch, value["dtype"]))
        tensor = tensor.reshape(value["shape"])
        if value.get("grad"):
            self.leaves[path] = tensor.requires_grad_()
            # Not the leaf itself: torch forbids changing it in place.
            tensor = tensor.clone()
        self.passed[path] = tensor
        return tensor


def call(function, case: dict[str, Any], package: str | None) -> dict[str, Any]:
    """The outcome of a function on a case.

    Args:
        function: the function to test.
        case: see the module.
        package: the module with the classes used in a case.

    Returns:
        `error`, with `kind` and `message`, or `output`, `gradients` and `changed`.
    """
    try:
        given = Given(case, package)
        output = function(**given.arguments)
        if hasattr(output, "__next__"):
            output = list(output)
        output = _differentiable(output, case.get("differentiated"))
        changed = given.changed()
        if case.get("backward") == "own":
            gradients = _own_gradients(given)
        else:
            gradients = _gradients(output, given, even=bool(case.get("unordered")))
        return {"output": encode(output), "gradients": gradients, "changed": changed}
    except KeyboardInterrupt:
        raise
    # Also SystemExit: a function that ends the program has not passed.
    except BaseException as error:
        message = " ".join(str(error).split())[:400]
        return {"error": {"kind": type(error).__name__, "message": message}}


def _differentiable(output: Any, named: list | None) -> Any:
    """A tuple or dict with gradient only in the named parts; None for all."""
    if named is None or not isinstance(output, (dict, list, tuple)):
        return output
    if isinstance(output, dict):
        return {name: part if name in named else _detached(part) for name, part in output.items()}
    return [part if index in named else _detached(part) for index, part in enumerate(output)]


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {name: _detached(item) for name, item in value.items()}
    return [_detached(item) for item in value] if isinstance(value, (list, tuple)) else value


def _gradients(output: Any, given: Given, *, even: bool) -> dict[str, Any]:
    parts = [tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point()]
    if not given.leaves:
        return {}
    if not parts:
        return dict.fromkeys(given.leaves)
    total = sum(((1 if even else _weights(part)) * part.nan_to_num()).sum() for part in parts)
    found = torch.autograd.grad(total, list(given.leaves.values()), allow_unused=True)
    return {path: None if g is None else encode(g) for path, g in zip(given.leaves, found, strict=True)}


def _own_gradients(given: Given) -> dict[str, Any]:
    found = {path: leaf.grad for path, leaf in given.leaves.items()}
    return {path: None if gradient is None else encode(gradient) for path, gradient in found.items()}


def _weights(part: Tensor) -> Tensor:
    """Distinct weights, so that swapped entries have different gradients."""
    return torch.linspace(0.5, 1.5, part.numel(), dtype=part.dtype).reshape(part.shape)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(nan=1e30), other.nan_to_num(nan=1e30))


def encode(value: Any, *, grad: bool = False) -> Any:
    """Encode a value for JSON; an unknown value is represented by its type."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        plain = value.detach().cpu()
        flat = [_plain(item) for item in plain.flatten().tolist()]
        encoded = {"$tensor": flat, "dtype": dtype, "shape": list(value.shape)}
        return {**encoded, "grad": True} if grad or value.requires_grad else encoded
    if isinstance(value, dict):
        return {str(name): encode(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$number": str(value)}
    return {"$other": type(value).__name__}


def _plain(number: float) -> float | str:
    return number if not isinstance(number, float) or math.isfinite(number) else str(number)


def _numbers(flat: list) -> list:
    return [float(number) if isinstance(number, str) else number for number in flat]
