"""Log-probabilities at temperature 1 from models whose fused LM head TRL puts at the temperature of sampling."""

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
    """Lets a trainer's policy and reference score at temperature 1, and on demand at the temperature of sampling.

    The policy of a preference loss is the model itself, at temperature 1, whatever its responses are sampled at.

    Args:
        trainer: a `PolicyTrainer` on whose models TRL has just put its heads, and nothing else.

    Attributes:
        differs: whether responses are sampled at another temperature than 1; nothing is changed where they are not.
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
        """Around forward passes whose log-probabilities are to be those of the distribution that is sampled from."""
        self._samples = True
        try:
            yield
        finally:
            self._samples = False

    @staticmethod
    def _as_prepared(accelerator: Accelerator, forward: Callable) -> Callable:
        """With the precision that accelerate gives to models that it prepares; TRL has had the reference prepared."""
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

        # Generation checks its arguments against the signature; by function, so that a copy of the model calls itself.
        @functools.wraps(scoring)
        def forward(self_, *args, fused_lm_head=False, **kwargs):
            own = scoring if fused_lm_head and not self._samples else sampling
            return own(self_, *args, fused_lm_head=fused_lm_head, **kwargs)

        model.forward = types.MethodType(forward, model)
