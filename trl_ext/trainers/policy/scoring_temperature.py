"""Log-probabilities at temperature 1 from models whose fused LM head TRL has set to the sampling temperature."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, is_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head


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

    @contextmanager
    def of_the_sampler(self) -> Iterator[None]:
        """Within this context, forward passes give log-probabilities under the sampling distribution."""
        self._samples = True
        try:
            yield
        finally:
            self._samples = False

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
