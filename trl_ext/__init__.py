"""Training objectives for RL-for-LLM courses and small labs, as plug-ins to Hugging Face TRL.

Names load when they are first used: `import trl_ext` imports neither torch nor trl.
"""

from trl_ext import trainers
from trl_ext.names import lazy_names

__version__ = "0.1.0"

_NAMES, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".registry": "preference_loss preference_weighting policy_algorithm",
        ".data": "load_benchmark",
        ".models": "share_prefixes",
        ".rollouts": "fast_rollouts",
        ".rewards": "RewardEnsemble RewardModel",
        # What scripts for TRL import beside the trainers.
        "trl": "TrlParser ModelConfig ScriptArguments DatasetMixtureConfig get_dataset get_peft_config "
        "get_quantization_config",
        ".trainers": " ".join(name for name in trainers.__all__ if name.endswith(("Config", "Trainer"))),
    },
)
__all__ = ["__version__", *_NAMES]
