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
        passed: the tensors that the function received, by path, each with a copy.
    """

    def __init__(self, case: dict[str, Any], package: str | None):
        self.package, self.leaves, self.passed = package, {}, {}
        self.arguments = {name: self._decode(value, name) for name, value in case["arguments"].items()}

    def changed(self) -> list[str]:
        """Paths of the tensors that have changed."""
        pairs = self.passed.items()
        return [path for path, (now, before) in pairs if not torch.equal(now.nan_to_num(1e30), before)]

    def _decode(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [self._decode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if "$tensor" in value:
            return self._tensor(value, path)
        if "$fake" in value:
            made = fakes.make(value["$fake"], **value["settings"])
            if value.get("grad"):
                self.leaves |= {f"{path}.{name}": leaf for name, leaf in made.named_parameters()}
            return made
        fields = value.get("fields", value)
        decoded = {name: self._decode(item, f"{path}.{name}") for name, item in fields.items()}
        if "$object" not in value:
            return decoded
        return getattr(importlib.import_module(self.package), value["$object"])(**decoded)

    def _tensor(self, value: dict[str, Any], path: str) -> Tensor:
        numbers = [float(number) if isinstance(number, str) else number for number in value["$tensor"]]
        tensor = torch.tensor(numbers, dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
        if value.get("grad"):
            self.leaves[path] = tensor.requires_grad_()
            # Not the leaf itself: torch forbids changing it in place.
            tensor = tensor.clone()
        self.passed[path] = tensor, tensor.detach().clone().nan_to_num(1e30)
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
        changed = given.changed()
        if case["own_backward"]:
            gradients = [leaf.grad for leaf in given.leaves.values()]
        else:
            gradients = _gradients(output, list(given.leaves.values()), even=case["unordered"])
        encoded = {path: encode(each) for path, each in zip(given.leaves, gradients, strict=True)}
        return {"output": encode(output), "gradients": encoded, "changed": changed}
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())[:400]
        return {"error": {"kind": type(error).__name__, "message": message}}


def _gradients(output: Any, leaves: list[Tensor], *, even: bool) -> list[Tensor | None]:
    """The gradients of the output, which may be the first part of a tuple or the `log_probs` of a dict.

    Its entries have distinct weights, so that swapped entries have different gradients, or `even` ones.
    """
    part = output
    if isinstance(output, dict):
        part = output.get("log_probs")
    elif isinstance(output, (list, tuple)) and output:
        part = output[0]
    if not leaves or not isinstance(part, Tensor) or not part.requires_grad:
        return [None] * len(leaves)
    weights = torch.linspace(0.5, 1.5, part.numel(), dtype=part.dtype).reshape(part.shape)
    total = ((1 if even else weights) * part.nan_to_num()).sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def encode(value: Any) -> Any:
    """Encode a value for JSON; an unknown value is represented by its type."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().flatten().tolist()
        flat = [str(x) if isinstance(x, float) and not math.isfinite(x) else x for x in numbers]
        encoded = {"$tensor": flat, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return encoded | ({"grad": True} if value.requires_grad else {})
    if isinstance(value, dict):
        return {str(name): encode(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$other": str(value)}
    return value if value is None or isinstance(value, (int, str)) else {"$other": type(value).__name__}
