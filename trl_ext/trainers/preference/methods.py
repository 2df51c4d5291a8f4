"""`DPOTrainer`, `DPOConfig` and the other named pairs: `PreferenceTrainer` with one loss each."""

from trl_ext.registry import preference_losses
from trl_ext.trainers import PREFERENCE_METHODS
from trl_ext.trainers.named import named_pairs
from trl_ext.trainers.preference.config import PreferenceConfig
from trl_ext.trainers.preference.trainer import PreferenceTrainer

globals().update(
    named_pairs(preference_losses, PREFERENCE_METHODS, PreferenceConfig, PreferenceTrainer, __name__, "loss")
)
