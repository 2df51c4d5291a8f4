"""`SFTConfig`: TRL's `SFTConfig` with defaults that hold on any device, and packed passes that change no row."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import SFTConfig as TRLSFTConfig

from trl_ext.trainers.defaults import CommonFields, check_at_least, check_training_length, resolve_device_defaults

# Field -> the least it may be; None stands for "not given" where a field allows it.
_LEAST = {
    "max_length": 2,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "max_skipped_updates": 1,
}


@dataclass
class SFTConfig(CommonFields, TRLSFTConfig):
    """Configuration of `SFTTrainer`: everything of `trl.SFTConfig`, and the fields below and of `CommonFields`.

    Raises:
        ValueError: a value outside its range; the message names the field.
    """

    share_prefixes: bool = field(
        default=True,
        metadata={
            "help": "Leave padding out of the forward passes and encode common prefixes once, where the model allows "
            "it and a check at the first batch agrees. Not with packing or padding_free, which are TRL's own ways."
        },
    )

    def __post_init__(self):
        check_at_least(self, _LEAST)
        check_training_length(self)
        resolve_device_defaults(self)
        super().__post_init__()
