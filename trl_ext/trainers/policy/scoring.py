"""How a policy and its reference score responses: at which temperature, at which positions, and from which states."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, is_peft_model
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from trl_ext.models.batches import temporarily
from trl_ext.models.packing import packing_of, unwrapped


class ScoringTemperature:
    """Lets a trainer's policy and reference score at temperature 1, and on request at the sampling temperature.

    The policy of a preference loss is the model itself at temperature 1, whatever the sampling temperature.

    Args:
        trainer: a `PolicyTrainer`, immediately after TRL has put its heads on the models.

    Attributes:
        differs: whether the sampling temperature is not 1; otherwise nothing is changed.
    """

    def __init__(self, trainer):
        self.differs = trainer.temperature != 1
        self._samples = False
        if self.differs:
            self._add_head(trainer, trainer.model, ("log_probs", "entropy"))
            if trainer.ref_model is not None:
                self._add_head(trainer, trainer.ref_model, ("log_probs",))

    def of_the_sampler(self) -> AbstractContextManager[None]:
        """Within this context, forward passes give log-probabilities under the sampling distribution."""
        return temporarily(self, _samples=True)

    @staticmethod
    def _as_prepared(accelerator: Accelerator, forward: Callable) -> Callable:
        """Apply the precision that accelerate gives to prepared models; TRL has already prepared the reference."""
        if not accelerator.native_amp:
            return forward

        def mixed(*args, **kwargs):
            with accelerator.autocast():
                return convert_to_fp32(forward(*args, **kwargs))

        return functools.wraps(forward)(mixed)

    def _add_head(self, trainer, model: nn.Module, outputs: tuple[str, ...]) -> None:
        model = trainer.accelerator.unwrap_model(model)
        model = model.get_base_model() if is_peft_model(model) else model
        sampling = model.forward.__func__
        add_fused_lm_head(model, cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32, outputs=outputs)
        scoring = self._as_prepared(trainer.accelerator, model.forward.__func__)

        # Generation checks its arguments against the signature. Wraps the function, so a copied model calls itself.
        @functools.wraps(scoring)
        def forward(self_, *args, fused_lm_head=False, **kwargs):
            own = scoring if fused_lm_head and not self._samples else sampling
            return own(self_, *args, fused_lm_head=fused_lm_head, **kwargs)

        model.forward = types.MethodType(forward, model)


def count_from_the_first_token(*models: nn.Module) -> None:
    """Make passes for log-probabilities count positions from each row's first token, as generation does.

    TRL pads prompts on the left and passes no positions, so a model with learnt absolute positions would score its
    samples at different positions than in generation. Models with rotary positions are left as they are, since only
    position differences matter there. Packed passes set their own positions.
    """
    for model in models:
        if getattr(model.config.get_text_config(), "rope_parameters", None):
            continue
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if "position_ids" in inspect.signature(base.forward).parameters:
            model.register_forward_pre_hook(_name_positions, with_kwargs=True)


def _name_positions(model, args, kwargs):
    packing, mask = packing_of(model), kwargs.get("attention_mask")
    is_packed = packing is not None and packing.active
    if is_packed or not kwargs.get("fused_lm_head") or mask is None or kwargs.get("position_ids") is not None:
        return None
    return args, {**kwargs, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}


@contextmanager
def reading_hidden_states(model, function: Callable[[Tensor], Tensor]) -> Iterator[Callable]:
    """Gives a function that returns what a function makes of the last hidden states of the passes within.

    Once the passes are done, it takes a number of tokens T, and returns what was made of the state before each of the
    last T.
    """
    passes: list[Tensor] = []
    latest: list[Tensor] = []

    def of_trunk(trunk, args, output) -> None:
        latest[:] = [function(output.last_hidden_state)]

    # Packing's check of itself also runs the trunk; the second hook marks the end of a requested pass.
    with (
        unwrapped(model).base_model.register_forward_hook(of_trunk),
        model.register_forward_hook(lambda *_: passes.extend(latest)),
    ):
        yield lambda count: torch.cat(passes)[:, -count - 1 : -1]
