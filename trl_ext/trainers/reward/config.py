"""`RewardConfig`: TRL's, with margins from any column, smoothed labels, and device-dependent defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trl import RewardConfig as TRLRewardConfig

from trl_ext.trainers.defaults import TruncatedFields, check_choice, check_training, resolve_device_defaults

SELECTION_CRITERIA = ("accuracy", "margin", "calibration", "best_of_n")


@dataclass
class RewardConfig(TruncatedFields, TRLRewardConfig):
    """Configuration of `RewardTrainer`: the fields of `trl.RewardConfig` and `TruncatedFields`, and those below.

    Raises:
        ValueError: a value is out of range, `max_length` is set, or two ways to choose a checkpoint are combined; the
            message names the field and what to do.
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
    select_best: str | None = field(
        default="accuracy",
        metadata={
            "help": "What decides which checkpoint is kept as the best: accuracy, margin, calibration (negative "
            "log-likelihood), or best_of_n (known score of the response it ranks first). none keeps the last."
        },
    )

    def __post_init__(self):
        if isinstance(self.select_best, str) and self.select_best.lower() == "none":
            self.select_best = None
        self._check()
        resolve_device_defaults(self)
        super().__post_init__()

    def _check(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}: at one half labels say nothing"
            )
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not used by RewardConfig: use label_smoothing")
        if not math.isfinite(self.margin_scale):
            raise ValueError(f"margin_scale must be a number, got {self.margin_scale}")
        if self.select_best is not None:
            check_choice("select_best", self.select_best, SELECTION_CRITERIA)
        if self.select_best is not None and self.load_best_model_at_end:
            raise ValueError(
                "select_best and load_best_model_at_end both choose a checkpoint: leave one out (select_best none)"
            )
        check_training(self, center_rewards_coefficient=0)
