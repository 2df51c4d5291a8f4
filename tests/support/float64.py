"""Training and scoring in float64 throughout, so that equal results are equal on every processor."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from unittest.mock import patch


@contextmanager
def float64_throughout():
    """Compute in float64 what transformers, TRL and this library compute in float32 whatever the type of the weights.

    In float32, two ways to the same sum differ by an amount that depends on the processor's instructions, and a token
    whose ratio lies at the edge of the clip range may fall on either side of it. In float64 they agree to about 1e-14.
    """
    import torch

    _originals()
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def wide(dtype):
        return torch.float64 if dtype is torch.float32 else dtype

    def to_wide(tensor, *arguments, **keywords):
        keywords = {name: wide(value) for name, value in keywords.items()}
        return to(tensor, *map(wide, arguments), **keywords)

    def softmax_wide(*arguments, dtype=None, **keywords):
        return softmax(*arguments, dtype=wide(dtype), **keywords)

    class WideTorch:
        """The module torch with float64 under the name float32, for modules that allocate tensors of that type."""

        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    replacements = [to_wide, torch.Tensor.double, softmax_wide, *[WideTorch()] * (len(_originals()) - 3)]
    with _replaced(replacements, float32=torch.float64):
        yield


def precision(dtype: str) -> AbstractContextManager:
    """What to train under where the weights are of this type: `float64_throughout`, or nothing."""
    return float64_throughout() if dtype == "float64" else nullcontext()


@contextmanager
def float32_again():
    """Undo `float64_throughout` inside it, for a test that is about float32 or mixed precision."""
    import torch

    with _replaced([original for _, _, original in _originals()], float32=torch.float32):
        yield


@cache
def _originals() -> list[tuple]:
    """What is replaced: (owner, name of its attribute, the attribute); the first three are functions of tensors."""
    import torch
    import trl.kernels.chunked_logprob

    import trl_ext.trainers.ppo.value_head

    modules = (trl.kernels.chunked_logprob, trl_ext.trainers.ppo.value_head)
    functions = ((torch.Tensor, "to"), (torch.Tensor, "float"), (torch.nn.functional, "softmax"))
    places = [*functions, *((module, "torch") for module in modules)]
    return [(owner, name, getattr(owner, name)) for owner, name in places]


@contextmanager
def _replaced(replacements: list, float32):
    import torch

    from trl_ext.rewards.reward_model import DTYPES

    with ExitStack() as stack:
        for (owner, name, _), replacement in zip(_originals(), replacements, strict=True):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(patch.dict(DTYPES, float32=float32))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(float32)
        yield
