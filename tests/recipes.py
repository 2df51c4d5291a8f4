"""Running the recipes from tests: in this process for what is quick, as a command for what is real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = REPOSITORY / "recipes"


def parse(monkeypatch, script: str, *arguments: str):
    """The dataclasses that `recipes/{script}.py` would run with."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    import common
    import offline

    import trl_ext

    config = {"aot": "AOTConfig", "dpo": "DPOConfig", "ipo": "IPOConfig", "preference": "PreferenceConfig"}[script]
    return common.parse_arguments(
        (offline.RecipeArguments, offline.ModelArguments, getattr(trl_ext, config)),
        default_config=RECIPES / "configs" / "toy" / f"{script}.yaml",
    )


def run(monkeypatch, script: str, *arguments: str) -> None:
    """Run a recipe in this process."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    import offline

    import trl_ext

    names = {"aot": "AOT", "dpo": "DPO", "ipo": "IPO", "preference": "Preference"}
    offline.main(getattr(trl_ext, f"{names[script]}Config"), getattr(trl_ext, f"{names[script]}Trainer"))


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
