"""How a policy and its reference score responses: at which temperature, and at which positions."""

from __future__ import annotations

import functools
import inspect
import types
from contextlib import AbstractContextManager

from accelerate.utils import convert_to_fp32, is_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from trl_ext.models.batches import temporarily
from trl_ext.models.packing import packing_of


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

    def _add_head(self, trainer, model: nn.Module, outputs: tuple[str, ...]) -> None:
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(model)
        model = model.get_base_model() if is_peft_model(model) else model
        sampling = model.forward.__func__
        add_fused_lm_head(model, cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32, outputs=outputs)
        scoring = model.forward.__func__

        # Generation checks its arguments against the signature. Wraps the function, so a copied model calls itself.
        @functools.wraps(scoring)
        def forward(self_, *args, fused_lm_head=False, **kwargs):
            if not fused_lm_head or self._samples:
                return sampling(self_, *args, fused_lm_head=fused_lm_head, **kwargs)
            # In the precision of prepared models, as TRL has already prepared the reference.
            with accelerator.autocast():
                output = scoring(self_, *args, fused_lm_head=True, **kwargs)
            return convert_to_fp32(output) if accelerator.native_amp else output

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
