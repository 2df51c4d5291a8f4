"""Train a tiny model for a few steps as a specification says, in this process or in several.

Tests call `train` in their own process. `train_in_processes` runs this file under torchrun, several specifications to
one launch: `train_once.py SPECS.json FOLDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support import REPOSITORY
from tests.support.float64 import precision

ONE_STEP = {
    "max_steps": 1,
    "learning_rate": 1.0,
    # Plain SGD without clipping: the change of the parameters is minus the gradient.
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 0,
}
# The order of the rows, so that how they are split is the only difference.
DEFAULTS = {**ONE_STEP, "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
# A reference that is not the policy.
REFERENCE = {"reference_seed": 1, "reference_scale": 0.1}


@dataclass
class Run:
    """What a run leaves: trained parameters by name, and what it logged at each step, times left out."""

    parameters: dict
    logs: list[dict]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.logs]

    def gradient(self, model_path: str):
        """Gradient of one step of SGD at learning rate 1 on all parameters of the model at `model_path`, [P]."""
        import torch
        from safetensors.torch import load_file

        initial = load_file(Path(model_path) / "model.safetensors")
        return torch.cat([(initial[name] - self.parameters[name]).flatten() for name in sorted(initial)]).double()


def relative_difference(tensor, expected) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((tensor - expected).norm() / expected.norm()).item()


def largest_difference(parameters: dict, expected: dict) -> float:
    """Largest absolute difference of two sets of parameters, which must have the same names."""
    assert parameters.keys() == expected.keys()
    return max((parameters[name] - expected[name]).abs().max().item() for name in expected)


def classes(name: str) -> tuple[type, type]:
    """A trainer's class and its configuration's, by its name in trl_ext, or in TRL as "trl.NAME"."""
    import trl

    import trl_ext

    library = trl if name.startswith("trl.") else trl_ext
    name = name.removeprefix("trl.")
    return getattr(library, name), getattr(library, name.replace("Trainer", "Config"))


def demonstrations(rows: list[dict]) -> list[dict]:
    """The prompts of pairs with their chosen responses."""
    return [{"row_id": row["row_id"], "prompt": row["prompt"], "completion": row["chosen"]} for row in rows]


def build_plain(spec: dict, output_dir: str, **trainer_arguments: Any):
    """A trainer of any kind on a model as it is, not yet trained.

    Keys: `trainer` (a name of `classes`), `model` (path or model), `rows` (of `SFTTrainer` and others pairs, of a
    policy prompts), and `args` for the configuration. A policy is rewarded by `thirds`, or by the `reward` given.
    """
    from datasets import Dataset

    from tests.support import rollout_once
    from tests.support.tiny import pairs

    trainer_class, config_class = classes(spec["trainer"])
    trainer_class = trainer_arguments.pop("trainer_class", trainer_class)
    defaults, rewards, rows = DEFAULTS, [], spec.get("rows")
    if spec["trainer"] in ("PolicyTrainer", "trl.GRPOTrainer"):
        defaults, rewards = rollout_once.DEFAULTS, [trainer_arguments.pop("reward", rollout_once.thirds)]
        rows = rows or rollout_once.prompts(8)
    rows = rows or pairs(12)
    if spec["trainer"] == "SFTTrainer":
        rows = demonstrations(rows)
    args = config_class(**{**defaults, **spec.get("args", {}), "output_dir": output_dir})
    dataset = Dataset.from_list(rows)
    return trainer_class(spec["model"], *rewards, args=args, train_dataset=dataset, **trainer_arguments)


def build(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The trainer of a specification, not yet trained.

    Keys: `trainer` (a name in trl_ext, or "trl.DPOTrainer"), `model` (path), `reference_seed` (perturb the reference
    by this seed; None for TRL's own), `reference_scale` (how far), `pairs`, `data_seed`, `rows` (indices of the pairs
    to take, in order), `lora` (True for a new adapter, "given" for a model that comes with one, its own reference),
    `lora_dropout`, `dtype` (of the weights, float64 unless given), and `args` for the configuration.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.support.tiny import pairs, perturbed

    name = spec.get("trainer", "PreferenceTrainer")
    stock = name.startswith("trl.")
    trainer_class, config_class = classes(name)
    trainer_class = trainer_arguments.pop("trainer_class", trainer_class)
    arguments = {**DEFAULTS, **spec.get("args", {}), "output_dir": output_dir}
    if stock:
        arguments.setdefault("max_length", None)
    lora = None
    if spec.get("lora"):
        lora = LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=spec.get("lora_dropout", 0.0),
            target_modules=["q_proj", "v_proj", "up_proj"],
        )
        lora.init_lora_weights = False  # B is zero otherwise, and the first gradients of A with it
        torch.manual_seed(0)
    dtype = getattr(torch, spec.get("dtype", "float64"))
    load = lambda: AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype)  # noqa: E731
    model, reference = load(), None
    if spec.get("lora") == "given":
        model, lora = get_peft_model(model, lora), None
    if spec.get("reference_seed") is not None:
        reference = perturbed(load(), seed=spec["reference_seed"], scale=spec.get("reference_scale", 0.05))
    rows = pairs(spec.get("pairs", 8), seed=spec.get("data_seed", 0))
    if "rows" in spec:
        rows = [rows[index] for index in spec["rows"]]
    defaults = {
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(spec["model"]),
        "peft_config": lora,
    }
    return trainer_class(model, reference, args=config_class(**arguments), **{**defaults, **trainer_arguments})


def load_models(path: str) -> tuple:
    """The tokenizer, the policy before training and the reference of `REFERENCE`, in float64."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.support.tiny import perturbed

    load = lambda: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)  # noqa: E731
    reference = perturbed(load(), seed=REFERENCE["reference_seed"], scale=REFERENCE["reference_scale"])
    return AutoTokenizer.from_pretrained(path), load().double(), reference.double()


def train(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The trainer of a specification, trained; a further key is `resume_from_checkpoint`."""
    trainer = build(spec, output_dir, **trainer_arguments)
    trainer.train(resume_from_checkpoint=spec.get("resume_from_checkpoint"))
    return trainer


def parameters(trainer) -> dict:
    """The trained parameters by name."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def entries(trainer) -> list[dict]:
    """What a trainer logged of its steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def without_times(logs: list[dict]) -> list[dict]:
    return [{k: v for k, v in entry.items() if "_per_second" not in k} for entry in logs]


def result(trainer) -> Run:
    """The `Run` of a trainer that has trained; an entry of its logs for each step."""
    return Run(parameters(trainer), without_times(entries(trainer)))


def launch(engine: str | None, command: list[str], folder: Path, *, processes: int = 2, cwd: Path = REPOSITORY):
    """Run a Python command as several processes on the CPU in float32, and how it ended.

    Under torchrun, or under the configuration of `accelerate_configs` with the name of an engine.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    if engine is not None:
        configuration = yaml.safe_load((REPOSITORY / "accelerate_configs" / f"{engine}.yaml").read_text())
        configuration |= {"use_cpu": True, "mixed_precision": "no", "num_processes": processes, "main_process_port": 0}
        (folder / "accelerate.yaml").write_text(yaml.safe_dump(configuration))
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, *launcher, *command], **options)


def in_processes(processes: int, *command: str, cwd: Path = REPOSITORY) -> None:
    """Run a Python command as several processes on the CPU, to a good end."""
    launched = launch(None, list(command), cwd, processes=processes, cwd=cwd)
    assert launched.returncode == 0, launched.stderr[-8000:]


def train_in_processes(
    specs: list[dict], processes: int, folder: Path, module: str = "tests.support.train_once"
) -> list[Run]:
    """Train each specification in turn, by the `main` of a module, in one launch of several processes on the CPU."""
    from safetensors import safe_open

    (folder / "specs.json").write_text(json.dumps(specs))
    in_processes(processes, "-m", module, str(folder / "specs.json"), str(folder))
    runs = []
    for index in range(len(specs)):
        with safe_open(folder / f"{index}.safetensors", "pt") as file:
            assert file.metadata()["processes"] == str(processes)
            runs.append(Run({n: file.get_tensor(n) for n in file.keys()}, json.loads(file.metadata()["logs"])))  # noqa: SIM118
    return runs


def main(train=train) -> None:
    from safetensors.torch import save_file

    from trl_ext.rollouts import end_processes

    specs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for index, spec in enumerate(specs):
        with precision(spec.get("dtype", "float64")):
            trainer = train(spec, str(folder / f"{index}-run"))
        if trainer.accelerator.is_main_process:
            run = result(trainer)
            metadata = {"logs": json.dumps(run.logs), "processes": str(trainer.accelerator.num_processes)}
            save_file(run.parameters, folder / f"{index}.safetensors", metadata=metadata)
    end_processes(trainer.accelerator)


if __name__ == "__main__":
    main()
