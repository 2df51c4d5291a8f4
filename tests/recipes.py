"""Running the recipes from tests: in this process for what is quick, as a command for what is real."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = REPOSITORY / "recipes"


PREFERENCE = {"aot": "AOT", "dpo": "DPO", "ipo": "IPO", "preference": "Preference"}
ONLINE = {
    "grpo": "GRPO",
    "dr_grpo": "DrGRPO",
    "gspo": "GSPO",
    "rloo": "RLOO",
    "remax": "ReMax",
    "policy": "Policy",
    "ppo": "PPO",
    "online_preference": "OnlinePreference",
    # A second configuration of the same recipe.
    "online_preference_replay": "OnlinePreference",
}
# Recipes with a module of their own: its arguments, and the trainer's configuration where it trains.
# Names in the script itself.
REASONING = {
    "evaluate_math": ("EvaluationArguments", None),
    "best_of_n": ("BestOfNArguments", None),
    "sweep_generation": ("SweepArguments", None),
    "sft": ("SFTArguments", "SFTConfig"),
    "expert_iteration": ("ExpertIterationArguments", "ExpertIterationConfig"),
    "grpo_math": ("GRPOMathArguments", "CourseConfig"),
    "kto": ("RecipeArguments", "KTOConfig"),
    "rlhf_sft": ("DemonstrationArguments", "SFTConfig"),
    "rlhf": ("RLHFArguments", None),
}


def parse(monkeypatch, script: str, *arguments: str):
    """The dataclasses that `recipes/{script}.py` would run with: the recipe's own, the model's and any trainer's."""
    _as_script(monkeypatch, script, arguments)
    import common
    import offline
    import online
    import plan
    import reward
    import training

    import trl_ext

    if script in REASONING:
        module = importlib.import_module(script)
        own, config = (name and getattr(module, name) for name in REASONING[script])
    elif script == "reward_model":
        own, config = reward.RewardArguments, trl_ext.RewardConfig
    elif script in ONLINE:
        own, config = online.OnlineArguments, getattr(trl_ext, f"{ONLINE[script]}Config")
    else:
        own, config = offline.RecipeArguments, getattr(trl_ext, f"{PREFERENCE[script]}Config")
    # The pipeline passes its model on.
    model = () if script == "rlhf" else (training.ModelArguments,)
    types = (own, *model, *([config] if config else []))
    # Every recipe that trains takes the flags of its launch, too.
    launch = (plan.LaunchArguments,) if config else ()
    default_config = RECIPES / "configs" / "toy" / f"{script}.yaml"
    return common.parse_arguments((*types, *launch), default_config=default_config)[: len(types)]


def run(monkeypatch, script: str, *arguments: str) -> None:
    """Run a recipe in this process."""
    _as_script(monkeypatch, script, arguments)
    import offline
    import online
    import reward

    import trl_ext

    if script in REASONING:
        importlib.import_module(script).main()
    elif script == "reward_model":
        reward.main()
    elif script in ONLINE:
        name = ONLINE[script]
        online.main(getattr(trl_ext, f"{name}Config"), getattr(trl_ext, f"{name}Trainer"))
    else:
        name = PREFERENCE[script]
        offline.main(getattr(trl_ext, f"{name}Config"), getattr(trl_ext, f"{name}Trainer"))


def _as_script(monkeypatch, script: str, arguments: tuple[str, ...]) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])


def launch(script: str, *arguments: str, folder: Path, **popen) -> subprocess.CompletedProcess:
    """Run `accelerate launch recipes/{script}.py` as a user does, in a folder of its own."""
    return subprocess.run(launch_command(script, *arguments), cwd=folder, env=environment(), **popen)


def launch_command(script: str, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    config = ["--config_file", str(REPOSITORY / "accelerate_configs" / "cpu.yaml")]
    return [*launcher, *config, str(RECIPES / f"{script}.py"), *arguments]


def environment() -> dict[str, str]:
    """The environment of this process, without the hub."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}
