"""Call a function on a case, compare the outcome with the expected one, and say what is likely wrong. Needs torch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Relative and absolute tolerances for float64, and for values computed in float32.
FINE, COARSE = (1e-6, 1e-8), (2e-4, 2e-5)
NAN_REACHES = (
    "a NaN at a position that does not count has reached the result: take such positions out with masked_fill or "
    "torch.where, as 0 times NaN is NaN"
)


def call(function, case: dict[str, Any], **stand_ins: Any) -> dict[str, Any]:
    """The outcome: the parts of the result, the gradients and the changed arguments by name, or an error."""
    leaves, passed = {}, {}

    def given(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            # A copy of a leaf, as torch forbids changing a leaf in place.
            leaf = value.detach().clone().requires_grad_(value.requires_grad)
            leaves.update({path: leaf} if value.requires_grad else {})
            passed[path] = leaf.clone(), value
            return passed[path][0]
        if not isinstance(value, dict):
            return value
        parts = {name: given(item, f"{path}.{name}") for name, item in value.items()}
        made = (STAND_INS | stand_ins)[parts.pop("make")](**parts) if "make" in parts else parts
        if isinstance(made, Model):
            leaves.update({f"{path}.{name}": leaf for name, leaf in made.named_parameters() if leaf.requires_grad})
        return made

    try:
        result = function(**{name: given(value, name) for name, value in case["arguments"].items()})
        result = list(result) if hasattr(result, "__next__") else result
        gradients = _gradients(result, list(leaves.values()), case["kind"])
        outcome = _flat(result.sort().values if case["kind"] == "unordered" and isinstance(result, Tensor) else result)
        # The gradient of a NaN may or may not be NaN.
        if not _has_nan(outcome):
            outcome |= {f"the gradient of {path}": each for path, each in zip(leaves, gradients, strict=True)}
        changed = [path for path, two in passed.items() if not torch.equal(*(each.nan_to_num(1e30) for each in two))]
        return outcome | {"changed": changed}
    except (Exception, SystemExit) as error:
        return {"error": type(error).__name__, "message": " ".join(str(error).split())[:400]}


def _gradients(result: Any, leaves: list[Tensor], kind: str) -> list[Tensor]:
    """Gradients of the result, of its first part or of its `log_probs`; 0 where none flows.

    Entries have distinct weights, so that exchanged entries have other gradients, unless their order has no meaning.
    A step has called `backward` itself.
    """
    part = result.get("log_probs") if isinstance(result, dict) else result
    part = part[0] if isinstance(part, (list, tuple)) and part else part
    found = [leaf.grad for leaf in leaves]
    if leaves and kind != "step" and isinstance(part, Tensor) and part.requires_grad:
        spread = 0.0 if kind == "unordered" else 0.5
        weights = torch.linspace(1 - spread, 1 + spread, part.numel(), dtype=part.dtype)
        found = torch.autograd.grad((weights * part.nan_to_num().flatten()).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)]


def _flat(value: Any, path: str = "the result") -> dict[str, Any]:
    """The parts of a value by path. Metadata, a dict in a tuple, has none; other objects are their types."""
    if isinstance(value, Tensor):
        return {path: value.detach().cpu().clone()}
    if isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        kept = [(key, item) for key, item in items if not (isinstance(value, tuple) and isinstance(item, dict))]
        parts = {inner: part for key, item in kept for inner, part in _flat(item, f"{path}[{key!r}]").items()}
        return parts if isinstance(value, dict) else {f"the length of {path}": len(value)} | parts
    return {path: value if value is None or type(value) in (bool, int, float, str) else f"<{type(value).__name__}>"}


def _has_nan(outcome: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and bool(value.isnan().any()) for value in outcome.values())


def verdict(outcome: dict[str, Any], case: dict[str, Any], values: bool = True) -> str | None:
    """None for a correct outcome, otherwise what is wrong; without `values`, only where and why."""
    if "error" in outcome:
        kind, message = outcome["error"], outcome["message"]
        said = {
            # An error of the file or the process.
            "": message,
            "NotImplementedError": f"not implemented yet: {message}",
            "SystemExit": "it ends the program (sys.exit or exit): return a value or raise an error",
        }
        return said.get(kind, f"it raises {kind}: {message}")
    problem = difference(outcome, case["expected"], values)
    if problem is None:
        return None
    # If NaN reaches the result, all mistakes look alike.
    if "NaN" in case["about"] and _has_nan(outcome):
        return f"{problem}; {NAN_REACHES}"
    reasons = [message for message, wrong in case["mistakes"] if difference(outcome, wrong) is None]
    return problem + (f"; this is what you get when {', or when '.join(reasons)}" if reasons else "")


def difference(found: dict[str, Any], wanted: dict[str, Any], values: bool = True) -> str | None:
    """The first difference between two outcomes."""
    for path, right in wanted.items():
        own, place = found.get(path, "nothing"), ""
        if isinstance(right, Tensor):
            if not isinstance(own, Tensor):
                return f"{path} must be a tensor, got {own!r}" + (": is there a return?" if own is None else "")
            if own.shape != right.shape:
                return f"{path} must have the shape {list(right.shape)}, got {list(own.shape)}"
            # float32 is accepted for float64, and for a mask 0 and 1 of any type.
            if right.is_floating_point():
                fits = own.dtype in (right.dtype, torch.float32)
            else:
                fits = right.dtype == torch.bool or not own.is_floating_point()
            if not fits:
                return f"{path} must have the dtype {right.dtype}, got {own.dtype}"
            if path.startswith("the gradient") and right.any() and not own.any():
                return f"{path} is 0: is there a detach(), an item(), a torch.tensor(...) or a no_grad() on the way?"
            relative, absolute = COARSE if torch.float32 in (own.dtype, right.dtype) else FINE
            close = torch.isclose(own.double(), right.double(), rtol=relative, atol=absolute, equal_nan=True)
            if close.all():
                continue
            index = (~close).nonzero()[0].tolist()
            own, right = (f"{each[tuple(index)].item():.6g}" for each in (own, right))
            place = f" at {index}" if index else ""
        elif own == right:
            continue
        elif path == "changed":
            return f"it changes its argument {', '.join(own)} in place: work on a new tensor"
        return f"{path} is wrong{place}" + (f": expected {right}, got {own}" if values else "")
    return None


# ---- Stand-ins for arguments ----


def scores(**tensors: Tensor) -> SimpleNamespace:
    """The argument of a preference loss: fields of shape [B], with the log-ratios and the margin."""
    given = SimpleNamespace(**tensors)
    given.chosen_log_ratio = given.chosen - given.ref_chosen
    given.rejected_log_ratio = given.rejected - given.ref_rejected
    given.margin = given.chosen_log_ratio - given.rejected_log_ratio
    return given


class Tokenizer:
    """A tokenizer with one token per word; the letters determine its id. 0 pads and 1 ends a text."""

    bos_token, eos_token, eos_token_id = None, "<end>", 1

    def __init__(self, pad_token_id: int | None = 0):
        self.pad_token_id = pad_token_id

    def encode(self, text: str, **ignored) -> list[int]:
        return [2 + sum((i + 1) * ord(letter) for i, letter in enumerate(word)) % 62 for word in text.split()]

    def __call__(self, text: str | list[str], **ignored) -> dict[str, list]:
        return {"input_ids": self.encode(text) if isinstance(text, str) else [self.encode(each) for each in text]}


class Model(torch.nn.Module):
    """A causal language model that reads a token and the mean of those up to it; the seed determines its weights."""

    def __init__(self, seed: int, size: int = 64, grad: bool = True):
        super().__init__()
        drawn = torch.randn(2, size, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.embedding, self.head = (torch.nn.Parameter(each.clone(), requires_grad=grad) for each in drawn)

    def forward(self, input_ids: Tensor, **ignored) -> SimpleNamespace:
        embedded = self.embedding[input_ids]
        seen = embedded.cumsum(dim=1) / torch.arange(1, input_ids.shape[1] + 1).unsqueeze(1)
        return SimpleNamespace(logits=torch.tanh(embedded + seen) @ self.head.T)


def word_reward(response: str, truth: str, scale: float) -> dict[str, float]:
    """`scale` if the truth is the response's last word, plus an eighth for each time it occurs."""
    words = response.split()
    return {"reward": scale * float(words[-1:] == [truth]) + words.count(truth) / 8}


STAND_INS = {"scores": scores, "tokenizer": Tokenizer, "model": Model, "reward": partial(partial, word_reward)}
