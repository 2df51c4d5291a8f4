"""`SFTConfig`: TRL's `SFTConfig` with defaults that hold on any device, and packed passes that change no row."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import SFTConfig as TRLSFTConfig

from trl_ext.trainers.defaults import check_at_least, check_training_length, resolve_device_defaults
from trl_ext.trainers.secrets import KeepsSecrets

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
class SFTConfig(KeepsSecrets, TRLSFTConfig):
    """Configuration of `SFTTrainer`: everything of `trl.SFTConfig`, and the fields below.

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
    max_skipped_updates: int = field(
        default=5,
        metadata={"help": "Stop, with a checkpoint, after this many updates in a row that were not finite."},
    )
    bf16: bool | None = field(
        default=None,
        metadata={"help": "Mixed precision in bfloat16. Default: on where the accelerator has it, off on a CPU."},
    )
    gradient_checkpointing: bool | None = field(
        default=None,
        metadata={
            "help": "Recompute activations in the backward pass. Default: on with an accelerator, off on a CPU."
        },
    )

    def __post_init__(self):
        check_at_least(self, _LEAST)
        check_training_length(self)
        resolve_device_defaults(self)
        super().__post_init__()
