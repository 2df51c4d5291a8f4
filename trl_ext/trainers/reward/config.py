"""`RewardConfig`: TRL's, with margins from any column, smoothed labels, and device-dependent defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trl import RewardConfig as TRLRewardConfig

from trl_ext.trainers.defaults import TruncatedFields, check_training, resolve_device_defaults
from trl_ext.trainers.trl_settings import refuse_given


@dataclass
class RewardConfig(TruncatedFields, TRLRewardConfig):
    """Configuration of `RewardTrainer`: the fields of `trl.RewardConfig` and `TruncatedFields`, and those below.

    Raises:
        ValueError: a value is out of range, or `max_length` is set; the message names the field and what to do.
    """

    margin_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of numbers by how much a chosen response should win, such as avg_preference_strength. "
            "Default: the column margin where the data has one."
        },
    )
    margin_scale: float = field(default=1.0, metadata={"help": "Factor on the margins."})
    label_smoothing: float = field(
        default=0.0, metadata={"help": "Probability that a label is wrong, in [0, 0.5); 0 trusts every label."}
    )

    def __post_init__(self):
        self._check()
        resolve_device_defaults(self)
        super().__post_init__()

    def _check(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}: at one half labels say nothing"
            )
        refuse_given(self, {"label_smoothing_factor": "use label_smoothing"})
        if not math.isfinite(self.margin_scale):
            raise ValueError(f"margin_scale must be a number, got {self.margin_scale}")
        check_training(self, center_rewards_coefficient=0)
