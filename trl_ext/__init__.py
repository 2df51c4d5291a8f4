"""Training objectives for RL-for-LLM courses and small labs, as plug-ins to Hugging Face TRL.

Names load when they are first used: `import trl_ext` imports neither torch nor trl.
"""

from trl_ext.names import lazy_names
from trl_ext.trainers import MODULE_OF_NAME as _TRAINERS

__version__ = "0.1.0"

_MODULE_OF_NAME = {
    **dict.fromkeys(("preference_loss", "preference_weighting", "policy_algorithm"), "trl_ext.registry"),
    "load_benchmark": "trl_ext.data",
    "share_prefixes": "trl_ext.models",
    "fast_rollouts": "trl_ext.rollouts",
    **dict.fromkeys(("RewardEnsemble", "RewardModel"), "trl_ext.rewards"),
    **{name: module for name, module in _TRAINERS.items() if name.endswith(("Config", "Trainer"))},
}

__all__ = ["__version__", *_MODULE_OF_NAME]
__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF_NAME)
