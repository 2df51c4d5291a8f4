"""Train tiny models under FSDP2 or DDP on GPUs, as those of `tests.support.zero_once` say: SPECS.json FOLDER."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from torch.distributed.tensor import DTensor

from tests.support import zero_once

CONFIGURATIONS = {"fsdp2": "fsdp2.yaml", "ddp": "multi_gpu.yaml"}


def launch(engine: str, processes: int, command: list[str], folder: Path, **settings) -> subprocess.CompletedProcess:
    """By the configuration that users get, on so many GPUs; `settings` replace some of it."""
    configuration = yaml.safe_load((zero_once.REPOSITORY / "accelerate_configs" / CONFIGURATIONS[engine]).read_text())
    configuration |= {"num_processes": processes, "main_process_port": 0, **settings}
    (folder / f"{engine}.yaml").write_text(yaml.safe_dump(configuration))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(folder / f"{engine}.yaml")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # Every process loads the weights, which a specification then moves.
    environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return subprocess.run(
        [sys.executable, *launcher, *command],
        cwd=zero_once.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )


def train_under(engine: str, specs: dict[str, dict], processes: int, folder: Path) -> dict[str, zero_once.Run]:
    """Train each specification in turn in one launch, in float32."""
    from safetensors.torch import load_file

    folder.mkdir()
    (folder / "specs.json").write_text(json.dumps(specs))
    settings = {"mixed_precision": "no"}
    if engine == "fsdp2":
        original = yaml.safe_load((zero_once.REPOSITORY / "accelerate_configs" / "fsdp2.yaml").read_text())
        settings["fsdp_config"] = {**original["fsdp_config"], "fsdp_cpu_ram_efficient_loading": False}
    command = ["-m", "tests.gpu.fsdp_once", str(folder / "specs.json"), str(folder)]
    launched = launch(engine, processes, command, folder, **settings)
    assert launched.returncode == 0, launched.stderr[-8000:]
    runs = {}
    for name in specs:
        parts = {"start": {}, "parameters": {}}
        for key, tensor in load_file(folder / f"{name}.safetensors").items():
            kind, _, own_name = key.partition("/")
            parts[kind][own_name] = tensor
        told = json.loads((folder / f"{name}.json").read_text())
        runs[name] = zero_once.Run(parts["start"], parts["parameters"], None, **told, folder=folder / name)
    return runs


def whole_parameters(trainer, kind: str) -> dict[str, torch.Tensor]:
    """Copies of the parameters to train, put together from their shards, on the CPU; every process must call this."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    copies = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            copies[f"{kind}/{name}"] = tensor.cpu().clone().contiguous()
    return copies


def main() -> None:
    from safetensors.torch import save_file

    from trl_ext.rollouts import end_processes

    specs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, spec in specs.items():
        trainer = zero_once.build(spec, str(folder / name))
        tensors = whole_parameters(trainer, "start")
        trainer.train(resume_from_checkpoint=spec.get("resume_from_checkpoint"))
        trainer.save_model()
        tensors |= whole_parameters(trainer, "parameters")
        told = zero_once.told(trainer)
        told["facts"]["in_force"] = trainer.accelerator.distributed_type.value
        told["facts"]["shards"] = sum(isinstance(p, DTensor) for p in trainer.model.parameters())
        if trainer.accelerator.is_main_process:
            save_file(tensors, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(told))
    end_processes(trainer.accelerator)


if __name__ == "__main__":
    main()
